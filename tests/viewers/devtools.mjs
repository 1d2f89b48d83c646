// Reads trace events with the code of Chrome's DevTools, as published on npm, and prints what it found in each thread,
// as JSON.
//
// Usage: node devtools.mjs PACKAGE_DIRECTORY FILE
import fs from "node:fs";
import path from "node:path";

globalThis.DOMRect = class {};
const [directory, file] = process.argv.slice(2);
const main = JSON.parse(fs.readFileSync(path.join(directory, "package.json"))).main;
const engine = await import(path.join(directory, main));

const model = engine.TraceModel.Model.createWithAllHandlers();
await model.parse(JSON.parse(fs.readFileSync(file)).traceEvents, { metadata: {}, isFreshRecording: false });
const parsed = model.parsedTrace(0);
const data = parsed.data ?? parsed;
const threads = [];
for (const [pid, process] of data.Renderer.processes) {
  for (const [tid, thread] of process.threads) {
    const profile = data.Samples.profilesInProcess.get(pid)?.get(tid)?.parsedProfile;
    const counts = {};
    for (const id of profile.samples) {
      const { functionName, lineNumber } = profile.nodeById(id).callFrame;
      const key = `${functionName}:${(lineNumber ?? -1) + 1}`;
      counts[key] = (counts[key] ?? 0) + 1;
    }
    threads.push({ pid, tid, name: thread.name, self: counts, drawn: thread.entries.length });
  }
}
console.log(JSON.stringify({ threads, warnings: data.Warnings.perEvent.size }));
