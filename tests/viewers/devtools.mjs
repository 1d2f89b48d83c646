// Reads trace events with the code that Chrome's DevTools read them with, as it is on npm, and tells what it found in
// each thread, in JSON.
//
// Usage: node devtools.mjs FOLDER_OF_THE_PACKAGE FILE
import fs from "node:fs";
import path from "node:path";

globalThis.DOMRect = class {};
const [folder, file] = process.argv.slice(2);
const main = JSON.parse(fs.readFileSync(path.join(folder, "package.json"))).main;
const engine = await import(path.join(folder, main));

const model = engine.TraceModel.Model.createWithAllHandlers();
await model.parse(JSON.parse(fs.readFileSync(file)).traceEvents, { metadata: {}, isFreshRecording: false });
const parsed = model.parsedTrace(0);
const data = parsed.data ?? parsed;
const threads = [];
for (const [pid, process] of data.Renderer.processes) {
  for (const [tid, thread] of process.threads) {
    const profile = data.Samples.profilesInProcess.get(pid)?.get(tid)?.parsedProfile;
    const own = {};
    for (const id of profile.samples) {
      const { functionName, lineNumber } = profile.nodeById(id).callFrame;
      const key = `${functionName}:${(lineNumber ?? -1) + 1}`;
      own[key] = (own[key] ?? 0) + 1;
    }
    threads.push({ pid, tid, name: thread.name, own, drawn: thread.entries.length });
  }
}
console.log(JSON.stringify({ threads, warnings: data.Warnings.perEvent.size }));
