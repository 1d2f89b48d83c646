// Takes the screenshots of memory for the guide, of examples/growing.py after it has run for a minute:
//
//     sudo target/release/nativeprof heap PID --all -o heap.html
//     sudo target/release/nativeprof attach PID --mode rss -d 30 -o growth.html
//     node tests/page/memory-pictures.mjs heap.html docs/heap.png growth.html docs/memory.png   (then reduced to 256 colors)

import { launch, open, settled } from "./browser.mjs";

const [census, censusPicture, growth, growthPicture] = process.argv.slice(2);
const { context, close } = await launch({ deviceScaleFactor: 2, viewport: { width: 1280, height: 720 } });
const first = await open(context, census);
await first.page.mouse.move(0, 0);
await settled(first.page);
await first.page.screenshot({ path: censusPicture });
// A part of the time is selected.
const { page } = await open(context, growth);
await page.evaluate(() => {
  const { timeline } = nativeprof.page;
  timeline.choose(nativeprof.model.whole * 0.4, nativeprof.model.whole * 0.7);
});
await page.mouse.move(0, 0);
await settled(page);
await page.screenshot({ path: growthPicture });
await close();
