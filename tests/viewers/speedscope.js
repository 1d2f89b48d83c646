// Runs speedscope's own importer, as published on npm, on a file and prints what it read, as JSON.
//
// Usage: node speedscope.js RELEASE_DIRECTORY FILE
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [directory, file] = process.argv.slice(2);
const bundle = fs.readdirSync(directory).find((name) => /^speedscope-.*\.js$/.test(name));
let text = fs.readFileSync(path.join(directory, bundle), "utf8");

// The importer is a function inside the bundle, which is the only file: it is patched to export that function.
const [, handle, importer] = text.match(/([\w$]+)=\{\};[\w$]+\(\1,\{[^}]*importProfilesFromArrayBuffer:\(\)=>([\w$]+)/);
const escaped = handle.replace(/\$/g, "\\$");
const [, prepare] = text.match(new RegExp(`then\\(\\(\\)=>\\(([\\w$]+)\\(\\),${escaped}\\)\\)`));
const handed = `importProfilesFromArrayBuffer:(globalThis.handOut(()=>(${prepare}(),${importer})),()=>${importer})`;
text = text.replace(`importProfilesFromArrayBuffer:()=>${importer}`, () => handed);

let open;
const said = [];
const say = (...words) => said.push(words.join(" "));
const window = { location: { hash: "", protocol: "file:", search: "" }, addEventListener() {} };
const context = vm.createContext({
  handOut: (get) => (open = get), window, navigator: {}, TextDecoder, TextEncoder, URL, setTimeout, clearTimeout, performance,
  ArrayBuffer, Uint8Array,
  console: { log() {}, info() {}, warn: say, error: say },
});
try {
  vm.runInContext(text, context);
} catch (error) {
  // It ends by drawing itself, for which nothing is available here.
  if (!open) throw error;
}

(async () => {
  const bytes = fs.readFileSync(file);
  const group = await open()(path.basename(file), bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
  const profiles = group.profiles.map((profile) => {
    const frames = [];
    profile.forEachFrame((frame) =>
      frames.push([frame.name, frame.file || "", frame.line || 0, frame.getSelfWeight(), frame.getTotalWeight()]),
    );
    let calls = 0;
    let depth = 0;
    let deepest = 0;
    profile.forEachCall(
      () => (calls++, (deepest = Math.max(deepest, ++depth))),
      () => depth--,
    );
    return {
      name: profile.getName(), unit: profile.getWeightUnit(), total: profile.getTotalWeight(),
      busy: profile.getTotalNonIdleWeight(), calls, deepest, frames,
    };
  });
  console.log(JSON.stringify({ name: group.name, said, profiles }));
})();
