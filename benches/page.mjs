// How long the exported page takes to open and to respond, in Chromium, and how much of that is CPU time of its
// process:
//
//     cargo bench --bench export -- big.json && nativeprof export big.json -o big.html
//     node benches/page.mjs big.html
//
// Other programs make the page wait, which takes time but no CPU time of its process (all threads).

import { statSync } from "node:fs";
import { launch, open } from "../tests/page/browser.mjs";

const file = process.argv[2];
const RUNS = 7;
const { context, close } = await launch();
const cdp = await context.browser().newBrowserCDPSession();
const cpu = async () => {
  const { processInfo } = await cdp.send("SystemInfo.getProcessInfo");
  return Math.max(...processInfo.filter((p) => p.type === "renderer").map((p) => p.cpuTime * 1000));
};
const median = (list) => list.sort((a, b) => a - b)[list.length >> 1];
const report = (name, wall, used) => console.log(`${name.padEnd(26)} ${median(wall).toFixed(1).padStart(8)} ms ${median(used).toFixed(1).padStart(8)} ms CPU`);

console.log(`${(statSync(file).size / 1e6).toFixed(1)} MB; medians of ${RUNS}`);
let page;
const [wall, used] = [[], []];
for (let run = 0; run < RUNS; run++) {
  await page?.close();
  ({ page } = await open(context, file));
  wall.push(await page.evaluate(() => performance.now()));
  used.push(await cpu());
}
report("open", wall, used);

// Each action ends when the next frame has been drawn.
const actions = {
  "interpreter frames": (page) => page.toolbar.showInterpreter(),
  "zoom to a frame": (page, i) => page.flame.zoom(page.flame.source.at(3 + i, page.flame.from + (page.flame.to - page.flame.from) / 3)),
  "zoom out": (page) => page.flame.back(true),
  "zoom by the wheel": (page, i) => page.flame.setSpan(1000 * i, 50000),
  search: (page, i) => page.model.find(`_${i}+[0-9]`),
  "choose a range": (page, i) => page.timeline.choose(1e8 * i, 1e8 * i + 3e8),
  "one thread": (page, i) => page.timeline.toggleOnly(i % 3),
  "fold a kind away": (page, i) => page.model.set({ hiddenKinds: new Set([i % 2]) }),
  "only stacks with": (page, i) => (page.filters.clear(), page.onlyFunction(100 + i)),
  sandwich: (page, i) => (i || page.filters.clear(), page.openSandwich(10 + i * 7)),
  "source of a function": (page, i) => (page.model.set({ selected: 12 + i * 3 }, "selection"), page.open("sources")),
  table: (page) => page.open("table"),
  "sort by name": (page) => page.table.rows.sort("function"),
  "order of time": (page, i) => (page.open("time"), page.time.setSpan(1e6 * i, 5e8)),
};
for (const [name, action] of Object.entries(actions)) {
  const [wall, used] = [[], []];
  for (let run = 0; run < RUNS; run++) {
    const before = await cpu();
    wall.push(
      await page.evaluate(`new Promise((done) => {
        const start = performance.now();
        (${action})(nativeprof.page, ${run});
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
      })`),
    );
    used.push((await cpu()) - before);
  }
  report(name, wall, used);
}
await close();
