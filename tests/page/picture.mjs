// Takes the screenshot for the README:
//
//     sudo target/release/nativeprof record --kernel -r 499 -o demo.html -- python3 examples/demo.py
//     node tests/page/picture.mjs demo.html docs/page.png      (then reduced to 256 colors: a third of the size)

import { launch, open } from "./browser.mjs";

const [file, picture] = process.argv.slice(2);
const { context, close } = await launch({ deviceScaleFactor: 2, viewport: { width: 1280, height: 800 } });
const { page } = await open(context, file);
// A function in the middle of the graph, with its lines, callers and callees, next to the complete graph.
await page.click("#tab-table");
await page.fill("#search", "^query ");
await page.keyboard.press("Enter");
await page.click("#panel-table .rows-body .row");
await page.fill("#search", "");
await page.keyboard.press("Enter");
await page.click("#tab-flame");
await page.mouse.move(0, 0);
await page.waitForTimeout(300);
await page.screenshot({ path: picture });
await close();
