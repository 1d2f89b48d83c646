// Uses pages of memory like a person: a profile of resident memory, one of allocations, and a census.
//
//     node tests/page/memory.mjs DIRECTORY      DIRECTORY as tests/page/memory.rs fills it

import assert from "node:assert/strict";
import { join } from "node:path";
import { launch, open, pixels, settled, under } from "./browser.mjs";

const directory = process.argv[2];
const MIB = 2 ** 20;
const MEMORY = "#memory canvas";
const color = (page, name) => page.evaluate((name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim(), name);

// Selects a part of the width of a canvas.
async function select(page, canvas, from, to) {
  const box = await page.locator(canvas).boundingBox();
  await page.mouse.move(box.x + box.width * from, box.y + 10);
  await page.mouse.down();
  await page.mouse.move(box.x + box.width * to, box.y + 12, { steps: 4 });
  await page.mouse.up();
  await settled(page);
}

const range = (page, from, to) => page.evaluate(([from, to]) => nativeprof.page.timeline.choose(from * 1e6, to * 1e6), [from, to]);

const tests = {
  "resident.html": async (page) => {
    assert.equal(await page.textContent("#memory .name"), "Resident memory");
    assert.match(await page.getAttribute(MEMORY, "aria-label"), /30\.00 MiB at first, 60\.00 MiB at most, 60\.00 MiB in the end/);
    assert.deepEqual(await page.$$eval(".memory-kinds span", (kinds) => kinds.map((kind) => kind.textContent)), ["Anonymous", "Files"]);
    assert.match(await page.textContent("#facts"), /^30\.00 MiB rss_bytes/);
    assert.equal(await page.textContent("#details h2 >> nth=-1"), "Memory by kind of code");
    await settled(page);
    // Half of the height at first, all of it in the end; files take a sixth in the end.
    const { width, height } = await page.locator(MEMORY).boundingBox();
    const [anonymous, files] = await Promise.all([color(page, "--memory-anonymous"), color(page, "--memory-file")]);
    const part = async (hex) => (await pixels(page, MEMORY, hex)) / (width * height);
    const [ofAnonymous, ofFiles] = [await part(anonymous), await part(files)];
    assert.ok(Math.abs(ofAnonymous / ofFiles - 3.5) < 0.4, `${ofAnonymous} ${ofFiles}`);
    const tip = await under(page, MEMORY, width * 0.508, 5);
    assert.match(tip[0], /^3\.0[45]. s$/);
    assert.deepEqual(tip.slice(1), ["Anonymous: 35.00 MiB", "Files: 10.00 MiB", "Together: 45.00 MiB"]);

    // What grew in a range, and what of it is still there; the flame graph has the same.
    assert.ok(await page.isHidden("#memory-range"));
    await range(page, 1, 2.95);
    await settled(page);
    assert.equal(
      await page.textContent("#memory-range"),
      "In the selected range resident memory went from 35.00 MiB to 44.50 MiB (+9.50 MiB). By the samples 20.00 MiB grew in it, of which 10.00 MiB is still resident in the end; 10.00 MiB was given back.",
    );
    assert.match(await page.textContent("#shown"), /^10\.00 MiB of 30\.00 MiB/);
    assert.deepEqual(await page.evaluate(() => nativeprof.page.model.totals.all[nativeprof.profile.functions.name.indexOf("drop")]), 0);
    // By the mouse, and by the keys of the other tracks.
    await select(page, MEMORY, 0.5, 0.75);
    const [from, to] = await Promise.all(["#range-from", "#range-to"].map((id) => page.inputValue(id)));
    assert.ok(Math.abs(from - 3) < 0.03 && Math.abs(to - 4.5) < 0.03, `${from} ${to}`);
    assert.match(await page.textContent("#memory-range"), /\(\+7\.[05]0 MiB\)/);
    await page.focus("#lanes .plot canvas");
    await page.keyboard.press("Escape");
    await settled(page);
    assert.ok(await page.isHidden("#memory-range"));
    for (const [width, height] of [[360, 640], [780, 500], [1440, 900]]) {
      await page.setViewportSize({ width, height });
      await settled(page);
      const sizes = await page.$eval("#memory", (memory) => [memory.scrollWidth - memory.clientWidth, document.documentElement.scrollWidth - innerWidth]);
      assert.ok(Math.max(...sizes) <= 0, `${width}: ${sizes}`);
      assert.ok((await pixels(page, MEMORY, anonymous)) > 500, String(width));
    }
  },

  "live.html": async (page) => {
    assert.equal(await page.textContent("#memory .name"), "Live allocations");
    assert.equal(await page.textContent(".memory-kinds"), "");
    await range(page, 4, 5);
    await settled(page);
    assert.equal(
      await page.textContent("#memory-range"),
      "In the selected range live memory went from 20.00 MiB to 25.00 MiB (+5.00 MiB). By the samples 11.00 MiB was allocated in it, of which 6.00 MiB still lives in the end.",
    );
  },

  "census.html": async (page) => {
    assert.match(await page.textContent("#title"), /python3\.13 server\.py --port 8080/);
    assert.match(await page.textContent("#facts"), /^900\.00 MiB resident3\.00 MiB swapped out/);
    const boxes = () => page.$$eval("#map .box", (boxes) => boxes.map((box) => ({ text: [...box.children].slice(1).map((line) => line.textContent).join(""), label: box.firstChild.textContent, area: box.getBoundingClientRect().width * box.getBoundingClientRect().height, isPart: box.classList.contains("part") })));
    const of = async (name) => (await boxes()).findIndex(({ label }) => label.startsWith(name));
    const { width, height } = await page.locator("#map").boundingBox();
    // Parts fill the map, in proportion to their bytes.
    const parts = (await boxes()).filter((box) => box.isPart);
    assert.equal(parts.length, 11);
    const areas = parts.reduce((sum, { area }) => sum + area, 0);
    assert.ok(Math.abs(areas / (width * height) - 1) < 0.02, `${areas}`);
    for (const [title, bytes] of [["C heap: large blocks, mapped one by one", 300], ["C heap: free but kept", 90]]) {
      const { area } = parts.find(({ label }) => label.startsWith(title));
      assert.ok(Math.abs(area / (width * height) / (bytes / 900) - 1) < 0.03, title);
    }
    // Cells sum to their parts, also where more was allocated than is resident.
    const sums = await page.evaluate(() => nativeprof.census.parts.map((part) => [part.name, part.bytes, part.cells.reduce((sum, cell) => sum + cell.area, 0), part.cells.length]));
    for (const [name, bytes, sum, cells] of sums) if (cells) assert.ok(Math.abs(sum - bytes) <= 1e-3 * bytes, `${name}: ${sum} of ${bytes}`);
    const array = (await boxes()).find(({ label }) => label.startsWith("numpy.ndarray") && label.includes("large blocks"));
    assert.equal(
      array.label,
      "numpy.ndarray, 40 objects (99 %: 30 to 50), 300.00 MiB resident here, 33.3 % of all, of 400.00 MiB, 420.00 MiB (99 %: 400.00 MiB to 460.00 MiB) in all parts, C heap: large blocks, mapped one by one",
    );
    assert.deepEqual([array.text.startsWith("numpy.ndarray300.00 MiB40 objects"), array.text.endsWith("in all parts 400.00 MiB to 460.00 MiB")], [true, true], array.text);
    // A name is text.
    assert.ok((await page.textContent("#tables")).includes("<img src=x onerror=alert(1)>") && !(await page.$("#tables img, #map img")));

    // Keys move, open a part and lead back.
    await page.focus('#map .box[tabindex="0"]');
    const at = () => page.evaluate(() => document.activeElement.textContent || document.activeElement.id);
    const first = await at();
    await page.keyboard.press("ArrowRight");
    assert.notEqual(await at(), first);
    await page.keyboard.press("ArrowLeft");
    await page.focus(`#map .box >> nth=${await of("dict")}`);
    await page.keyboard.press("Enter");
    await settled(page);
    assert.equal(await page.textContent("#path .here"), "Python: objects and what they own");
    assert.match(await page.textContent("#path .amount"), /^300\.00 MiB · 33\.3 %/);
    assert.ok((await at()).length > 0 && (await page.evaluate(() => document.getElementById("map").contains(document.activeElement))));
    assert.match((await boxes())[0].label, /^(dict|of no known type)/);
    const rows = await page.$$eval("#tables tbody tr", (rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent)));
    assert.ok(rows.some((row) => row.join("|") === "dict|500,000|100.00 MiB|11.1 %|"), rows.slice(0, 4).join("\n"));
    assert.ok(rows.some(([name, n, bytes]) => name === "of no known type" && n === "" && bytes === byMib(300 - 4 - 100 - 30 - 1 - (499 * 500 * 500) / 2 / MIB)), rows.slice(0, 4).join("\n"));
    assert.match(await page.textContent("#tables"), /more are not listed: filter them by name/);
    await page.keyboard.press("/");
    await page.keyboard.type("type49");
    assert.equal(await page.$$eval("#tables tbody tr", (rows) => rows.length), 11);
    assert.ok((await page.$$("#map .box.found")).length > 0);
    await page.keyboard.press("Escape");
    await page.keyboard.press("Escape");
    await settled(page);
    assert.equal(await page.textContent("#path .here"), "Resident memory");
    await page.click('#tables button:has-text("C heap: free but kept")');
    await settled(page);
    assert.match((await boxes())[0].label, /^main arena, 88\.00 MiB, 9\.8 % of the resident memory, 79\.00 MiB can be given back by malloc_trim/);
    await page.click("#path button");
    await page.hover(`#map .box >> nth=${await of("dict")}`);
    assert.equal(await page.textContent("#tooltip strong"), "dict");
    await page.keyboard.press("?");
    assert.ok(await page.isVisible("#help"));
    await page.keyboard.press("Escape");
    for (const [width, height] of [[320, 640], [780, 500], [2560, 1400], [1440, 900]]) {
      await page.setViewportSize({ width, height });
      await settled(page);
      assert.ok((await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)) <= 0, String(width));
      const map = await page.locator("#map").boundingBox();
      assert.ok(map.width > 250 && map.height > 200, `${width}: ${map.width} ${map.height}`);
      const outside = await page.$$eval("#map .box", (boxes) => boxes.filter((box) => box.offsetLeft + box.offsetWidth > box.parentElement.clientWidth + 1 || box.offsetTop + box.offsetHeight > box.parentElement.clientHeight + 1).length);
      assert.equal(outside, 0, String(width));
    }
  },

  "damaged.html": async (page) => {
    assert.match(await page.textContent("#tables"), /Python: objects and what they own/);
    assert.equal((await page.$$("#map .box.part")).length, 1);
  },
};

const byMib = (mib) => `${mib.toFixed(2)} MiB`;
const browser = await launch();
let failed = 0;
for (const [file, test] of Object.entries(tests)) {
  const { page, complaints } = await open(browser.context, join(directory, file));
  try {
    await test(page);
    assert.deepEqual(complaints, []);
    console.log(`ok ${file}`);
  } catch (e) {
    failed++;
    console.log(`FAILED ${file}\n${e.stack}\n${complaints.join("\n")}`);
  }
  await page.close();
}
await browser.close();
process.exit(failed ? 1 : 0);
