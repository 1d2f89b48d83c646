// Uses exported pages like a person, and compares what they show with the samples they were made of.
//
//     node tests/page/drive.mjs DIRECTORY      DIRECTORY as tests/page/main.rs fills it

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { launch, open, pixels, settled, under } from "./browser.mjs";

const directory = process.argv[2];
const facts = JSON.parse(readFileSync(join(directory, "known.json"), "utf8"));

// Self and total of each function, of some samples and some frames of them.
function expected(keepSample = () => true, keepFrame = () => true) {
  const all = {};
  let taken = 0;
  for (const sample of facts.samples.filter(keepSample)) {
    const stack = sample.stack.filter(keepFrame);
    taken++;
    for (const name of new Set(stack)) (all[name] ??= [0, 0])[1]++;
    if (stack.length) all[stack.at(-1)][0]++;
  }
  return { all, taken };
}

// Contents of the table.
async function table(page) {
  await page.click("#tab-table");
  await settled(page);
  const rows = await page.$$eval("#panel-table .rows-body .row", (rows) =>
    rows.map((row) => [".name", ".selfn", ".totaln"].map((cell) => row.querySelector(cell).textContent)),
  );
  return Object.fromEntries(rows.map(([name, self, all]) => [name, [self, all].map((n) => Number(n.replaceAll(",", "")))]));
}

async function shows(page, { all, taken }) {
  assert.deepEqual(await table(page), all);
  const text = await page.textContent("#shown");
  assert.equal(Number(text.split(" ")[0].replaceAll(",", "")), taken, text);
}

// Position of a function in a row of the flame graph.
async function find(page, canvas, row, name, height = 20) {
  const { width } = await page.locator(canvas).boundingBox();
  for (let x = 3; x < width; x += 12) {
    const tip = await under(page, canvas, x, row * height + 9);
    if (tip?.[0] === name) return { x, y: row * height + 9, tip };
  }
  assert.fail(`${name} is not in row ${row} of ${canvas}`);
}

async function clickAt(page, canvas, { x, y }) {
  const box = await page.locator(canvas).boundingBox();
  await page.mouse.click(box.x + x, box.y + y);
  await settled(page);
}

const FLAME = "#panel-flame canvas";
const tests = {
  async "the table equals the samples"(page) {
    await shows(page, expected());
    assert.match(await page.textContent("#facts"), /^900 samples/);
    assert.equal(await page.title(), "python app.py · nativeprof");
    await page.click("#panel-table .head .function button");
    const names = () => page.$$eval("#panel-table .rows-body .name", (cells) => cells.map((cell) => cell.textContent));
    const sorted = Object.keys(expected().all).sort();
    assert.deepEqual(await names(), sorted);
    assert.equal(await page.getAttribute("#panel-table .columnheader.function, #panel-table .head .function", "aria-sort"), "ascending");
    await page.click("#panel-table .head .function button");
    assert.deepEqual(await names(), sorted.reverse());
  },

  async "clicks zoom, and out again"(page) {
    await page.click("#tab-flame");
    await settled(page);
    const solve = await find(page, FLAME, 2, "solve");
    const { all, taken } = expected();
    assert.equal(solve.tip[2], `total ${((100 * all.solve[1]) / taken).toFixed(1)} % · ${all.solve[1]} samples`);
    assert.ok(await page.isDisabled("#zoom-out"));
    await clickAt(page, FLAME, solve);
    assert.equal((await under(page, FLAME, 5, 49))[0], "solve", "it fills the width now");
    assert.equal((await under(page, FLAME, 5, 9))[0], "All samples");
    assert.equal(await page.textContent("#details h2"), "solve");
    await page.click("#zoom-out");
    assert.equal((await under(page, FLAME, 5, 49))[0], "parse");
    await page.click("#direction");
    const { height } = await page.locator(FLAME).boundingBox();
    assert.equal((await under(page, FLAME, 5, height - 9))[0], "All samples", "the root is at the bottom");
    await page.click("#direction");
  },

  async "the wheel zooms around the mouse, dragging moves"(page) {
    await page.click("#tab-flame");
    await settled(page);
    const at = await find(page, FLAME, 2, "solve");
    await page.keyboard.down("Control");
    await page.mouse.wheel(0, -100);
    await page.keyboard.up("Control");
    assert.equal((await under(page, FLAME, at.x, at.y))[0], "solve");
    assert.ok(await page.isEnabled("#zoom-out"));
    const box = await page.locator(FLAME).boundingBox();
    await page.mouse.move(box.x + 300, box.y + 300);
    await page.mouse.down();
    await page.mouse.move(box.x + 3000, box.y + 300, { steps: 3 });
    await page.mouse.up();
    assert.equal((await under(page, FLAME, 3, 49))[0], "parse", "moved to the left end");
    await page.click("#zoom-out");
  },

  async "search finds by regular expression"(page) {
    await page.click("#tab-flame");
    const color = await page.evaluate(() => getComputedStyle(document.documentElement).getPropertyValue("--found").trim());
    assert.equal(await pixels(page, FLAME, color), 0);
    await page.fill("#search", "^(SCAN|DGEMM) ");
    await page.keyboard.press("Enter");
    assert.equal(await page.textContent("#found"), "0 % · 0 functions", "capitals count");
    await page.fill("#search", "^(scan|d.emm) ");
    await page.keyboard.press("Enter");
    const hit = expected((s) => s.stack.some((name) => /^(scan|d.emm)$/.test(name))).taken;
    assert.equal(await page.textContent("#found"), `${((100 * hit) / 900).toFixed(1)} % · 2 functions`);
    await settled(page);
    assert.ok((await pixels(page, FLAME, color)) > 1000, "they are in another color");
    assert.equal(await page.textContent("#details h2"), "scan", "Enter goes to the largest");
    assert.deepEqual(Object.keys(await table(page)).sort(), ["dgemm", "scan"]);
    await page.click("#only");
    assert.match(await page.textContent("#chips"), /scan\|d\.emm/);
    await page.fill("#search", "");
    await page.waitForFunction(() => document.getElementById("found").textContent === "");
    await shows(page, expected((s) => s.stack.some((name) => /^(scan|d.emm)$/.test(name))));
    await page.click("#chips button");
    await page.fill("#search", "(");
    await page.keyboard.press("Enter");
    assert.match(await page.textContent("#found"), /group/i);
    assert.ok(await page.$(".search.wrong"));
    await page.keyboard.press("Escape");
    await shows(page, expected());
  },

  async "a range takes the samples within"(page) {
    const within = (from, to) => expected((s) => s.time >= from && s.time <= to);
    await page.fill("#range-from", "1");
    await page.keyboard.press("Tab");
    await page.fill("#range-to", "2.001");
    // Text being typed is kept when the page is drawn again.
    const size = page.viewportSize();
    await page.setViewportSize({ ...size, width: size.width - 40 });
    await settled(page);
    await page.setViewportSize(size);
    await settled(page);
    await page.keyboard.press("Tab");
    await shows(page, within(1, 2.001));
    // The range includes both ends.
    assert.equal(within(1, 2.001).taken, 101 + 51 - 1);
    const box = await page.locator(".plot canvas").boundingBox();
    await page.mouse.move(box.x + box.width * 0.6, box.y + 10);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width * 0.9, box.y + 10, { steps: 4 });
    await page.mouse.up();
    await settled(page);
    const [from, to] = await Promise.all(["#range-from", "#range-to"].map((id) => page.inputValue(id)));
    assert.ok(Math.abs(from - 3.6) < 0.02 && Math.abs(to - 5.4) < 0.02, `${from} ${to}`);
    const range = await page.evaluate(() => nativeprof.model.range);
    await shows(page, within(range[0] / 1e6, range[1] / 1e6));
    await page.focus(".plot canvas");
    await page.keyboard.press("ArrowLeft");
    const moved = await page.evaluate(() => nativeprof.model.range);
    assert.equal(moved[0], range[0] - 120000);
    await shows(page, within(moved[0] / 1e6, moved[1] / 1e6));
    await page.focus(".plot canvas");
    await page.keyboard.press("Escape");
    await shows(page, expected());
  },

  async "threads can be left out"(page) {
    const ofWorker = (s) => s.tid === 71;
    await page.hover(".lane:nth-child(2)");
    await page.click(".lane:nth-child(2) .only");
    await shows(page, expected(ofWorker));
    await page.click("#chips button");
    await page.uncheck(".lane:nth-child(2) input");
    await shows(page, expected((s) => !ofWorker(s)));
    await page.check(".lane:nth-child(2) input");
    await shows(page, expected());
  },

  async "kinds, modules and functions fold into their callers"(page) {
    const kind = (name) => facts.functions[name].kind;
    await page.click('[data-kind="native"]');
    await shows(page, expected(undefined, (name) => kind(name) !== "Native"));
    await page.click('[data-kind="kernel"]');
    await shows(page, expected(undefined, (name) => kind(name) !== "Native" && kind(name) !== "Kernel"));
    assert.equal(await page.getAttribute('[data-kind="kernel"]', "aria-pressed"), "false");
    await page.click('[data-kind="native"]');
    await page.click('[data-kind="kernel"]');
    await page.click("#modules-button");
    await page.uncheck('#modules input[aria-label="Show libblas.so"]');
    await page.keyboard.press("Escape");
    await shows(page, expected(undefined, (name) => facts.functions[name].module !== "libblas.so"));
    await page.click("#chips button");
    await page.click('#panel-table .name:text-is("dgemm")');
    await page.keyboard.press("h");
    await shows(page, expected(undefined, (name) => name !== "dgemm"));
    await page.click("#chips button");
    await page.click('#panel-table .name:text-is("tile<double>")');
    await page.click('#details button:text-is("Only stacks containing it")');
    await shows(page, expected((s) => s.stack.includes("tile<double>")));
    await page.click("#chips button");
    await shows(page, expected());
  },

  async "the sandwich has callers and callees"(page) {
    await page.click("#tab-sandwich");
    assert.equal(await page.textContent("#details h2"), "parse", "the user's function with most samples");
    await page.click("#tab-table");
    await page.click('#panel-table .name:text-is("parse")');
    await page.keyboard.press("s");
    await settled(page);
    assert.equal(await page.getAttribute("#tab-sandwich", "aria-selected"), "true");
    const [callers, callees] = [".sandwich-charts .scroller:first-of-type canvas", ".sandwich-charts .middle + .scroller canvas"];
    const of = expected().all.parse[1];
    assert.equal((await under(page, callees, 5, 9))[0], "parse");
    const inner = facts.samples.filter((s) => s.stack.filter((name) => name === "parse").length === 2).length;
    const direct = facts.samples.filter((s) => s.stack.join() === "main,parse,scan").length;
    assert.match((await find(page, callees, 1, "parse")).tip[2], new RegExp(` ${inner} samples`));
    assert.match((await find(page, callees, 1, "scan")).tip[2], new RegExp(` ${direct} samples`));
    const { height } = await page.locator(callers).boundingBox();
    const above = await under(page, callers, 5, height - 29);
    assert.equal(above[0], "main");
    assert.match(above[2], new RegExp(` ${of} samples`));
    const sides = () => page.$$eval(".side", (sides) => sides.map((side) => side.textContent));
    assert.deepEqual(await sides(), ["Callers", "Callees"]);
    await page.click('.sandwich-list .name:text-is("page_fault")');
    assert.deepEqual(await sides(), ["Callers", "No callees: its stacks end with it"]);
    await page.click('.sandwich-list .name:text-is("dgemm")');
    await settled(page);
    assert.equal((await under(page, callees, 5, 9))[0], "dgemm");
    assert.equal((await under(page, callers, 5, height - 29))[0], "solve");
  },

  async "time goes from left to right"(page) {
    await page.click("#tab-time");
    await settled(page);
    const canvas = "#panel-time canvas";
    const { width } = await page.locator(canvas).boundingBox();
    const tip = await under(page, canvas, width / 2, 9);
    assert.equal(tip[0], "main");
    assert.match(tip[2], /6\.00 s from 0\.000 s · 600 samples/);
    // Zoomed in, each sample is seen: second 4.00 is a `solve` after two of `parse` ... as i % 6 says.
    await page.evaluate(() => nativeprof.page.time.setSpan(4e6, 60e3));
    for (let i = 0; i < 6; i++) {
      const name = facts.samples.filter((s) => s.tid === 70)[400 + i].stack[1];
      assert.equal((await under(page, canvas, (width * (i + 0.5)) / 6, 29))[0], name, `sample ${400 + i}`);
    }
    await page.selectOption("#thread", { index: 1 });
    await settled(page);
    assert.equal((await under(page, canvas, width / 2, 9))[0], "wait");
  },

  async "keys are enough"(page) {
    await page.keyboard.press("1");
    await page.focus(FLAME);
    const said = async (text) => {
      await page.waitForFunction((text) => document.getElementById("live").textContent.includes(text), text, { timeout: 30000 });
    };
    await said("All samples");
    await page.keyboard.press("ArrowDown");
    await said("main");
    await page.keyboard.press("ArrowDown");
    await said("parse");
    await page.keyboard.press("ArrowRight");
    await said("solve");
    await page.keyboard.press("Enter");
    await settled(page);
    assert.equal((await under(page, FLAME, 5, 49))[0], "solve");
    await page.keyboard.press("Escape");
    await page.keyboard.press("?");
    assert.ok(await page.isVisible("#help"));
    await page.keyboard.press("Escape");
    assert.ok(!(await page.isVisible("#help")));
    await page.keyboard.press("/");
    assert.equal(await page.evaluate(() => document.activeElement.id), "search");
    await page.keyboard.press("Escape");
    const last = (await page.$$("#tabs button")).length;
    await page.keyboard.press(String(last));
    assert.equal(await page.getAttribute("#tab-table", "aria-selected"), "true");
    await page.focus("#panel-table .rows-scroll");
    await page.keyboard.press("Home");
    await page.keyboard.press("ArrowDown");
    const row = await page.getAttribute("#panel-table .rows-scroll", "aria-activedescendant");
    assert.equal(await page.getAttribute("#" + row, "aria-rowindex"), "3");
    await page.focus("#tab-table");
    await page.keyboard.press("ArrowLeft");
    assert.equal(await page.getAttribute("#tab-tree", "aria-selected"), "true");
  },

  async "the call tree opens and closes"(page) {
    await page.click("#tab-tree");
    await page.focus("#panel-tree .rows-scroll");
    const rows = () =>
      page.$$eval("#panel-tree .rows-body .row", (rows) =>
        rows.map((row) => `${row.getAttribute("aria-level")} ${row.querySelector(".name").textContent} ${row.querySelector(".totaln").textContent}`),
      );
    const { all } = expected();
    assert.deepEqual((await rows()).slice(0, 3), ["1 all 900", "2 main 600", `3 parse ${all.parse[1]}`]);
    await page.keyboard.press("Home");
    await page.keyboard.press("ArrowDown");
    assert.ok((await rows()).some((row) => row.startsWith("3 solve")));
    await page.keyboard.press("ArrowLeft");
    assert.ok(!(await rows()).some((row) => row.startsWith("3 ")), "closed");
    await page.keyboard.press("ArrowRight");
    assert.ok((await rows()).includes(`3 solve ${all.solve[1]}`));
  },

  async "everything that can be used has a name and a role"(page) {
    const nameless = await page.evaluate(() => {
      const wrong = [];
      for (const e of document.querySelectorAll("button, input, select, canvas[tabindex], [role=tabpanel], [role=table], [role=grid], [role=treegrid], dialog")) {
        const labelled = e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim() || e.labels?.length;
        if (!labelled) wrong.push(e.outerHTML.slice(0, 100));
      }
      return wrong;
    });
    assert.deepEqual(nameless, []);
    for (const role of ["tablist", "search", "grid", "treegrid", "slider"]) assert.ok(await page.$(`[role=${role}]`), role);
  },

  async "source lines are next to their samples"(page) {
    await page.click("#tab-table");
    await page.click('#panel-table .name:text-is("solve")');
    const hit = await page.$$eval("#details .code.hit", (rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent)));
    assert.deepEqual(hit, [["100 %", "20", "step_20(value)"]]);
    const around = await page.$$eval("#details .code code", (cells) => cells.map((cell) => cell.textContent));
    assert.equal(around.length, 8);
    assert.ok(around.includes("[hidden: looks like a secret]") && !(await page.content()).includes("hunter2"));
  },

  async "a sample counts once for a line"(page) {
    // A function (2) with a generator expression (3) on line 2, and recursion from line 3.
    const totals = await page.evaluate(() => {
      const tree = { n: 6, parent: [0, 0, 1, 2, 2, 4], fn: [0, 1, 2, 3, 2, 2] };
      const lineStart = [0, 0, 1, 3, 4, 5, 6];
      const profile = { tree, lineStart, lines: [9, 2, 3, 2, 3, 2], lineSamples: [10, 8, 2, 6, 2, 1], lineSelf: [0, 2, 0, 6, 1, 1] };
      const { lineTotals } = globalThis.nativeprof.model;
      return [() => 0, (fn) => (fn === 3 ? 0 : -1)].map((groupOf) => [...lineTotals.call({ profile }, groupOf)].sort(([a], [b]) => a - b));
    });
    assert.deepEqual(totals[0], [[2, [9, 9]], [3, [2, 1]], [9, [10, 0]]]);
    assert.deepEqual(totals[1], [[2, [6, 6]]]);
  },

  async "a file has the samples of all its lines"(page) {
    await page.click("#tab-table");
    await page.click('#panel-table .name:text-is("solve")');
    await page.click('#details button:has-text("app.py:16")');
    await settled(page);
    assert.equal(await page.getAttribute("#tab-sources", "aria-selected"), "true");
    // All rows are in view.
    await page.setViewportSize({ width: 1440, height: 1600 });
    await page.$eval("#panel-sources .source-code .rows-scroll", (list) => (list.scrollTop = 0));
    await settled(page);
    const rows = () =>
      page.$$eval("#panel-sources .source-code .rows-body .row", (rows) =>
        rows.map((row) => [".total", ".line", ".quoted"].map((cell) => row.querySelector(cell).textContent.trim())).filter(([total]) => total),
      );
    const { all, taken } = expected();
    const part = (name) => `${((100 * all[name][1]) / taken).toFixed(1)} %`;
    const wanted = [
      ["main", 5],
      ["parse", 12],
      ["solve", 20],
      ["wait", 44],
    ];
    assert.deepEqual(await rows(), wanted.map(([name, line]) => [part(name), String(line), `step_${line}(value)`]));
    await page.click('#panel-sources .source-code .row:has-text("step_12(value)")');
    assert.equal(await page.textContent("#details h2"), "parse");
    assert.ok(!(await page.content()).includes("hunter2"));
    // It is the user's own: all of it is there, with a map of its hot lines.
    const lines = await page.$$eval("#panel-sources .source-code .rows-body .line", (cells) => cells.map((cell) => Number(cell.textContent)));
    assert.deepEqual(lines, Array.from({ length: 60 }, (_, i) => i + 1));
    assert.ok(!(await page.textContent("#panel-sources .source-code")).includes("left out"));
    const marks = await page.$$eval(".heat-map i", (marks) => marks.map((mark) => [Math.round((parseFloat(mark.style.top) * 60) / 100), mark.style.getPropertyValue("--heat")]));
    assert.deepEqual(marks.map(([at]) => at + 1).sort((a, b) => a - b), [5, 12, 20, 44]);
    assert.equal(marks[0][1], "1", "the line with most samples");
    await page.setViewportSize({ width: 1440, height: 700 });
    await settled(page);
    const map = await page.locator(".heat-map").boundingBox();
    await page.mouse.click(map.x + 5, map.y + map.height - 2);
    await settled(page);
    const [bottom, height] = await page.$eval("#panel-sources .source-code .rows-scroll", (list) => [list.scrollTop + list.clientHeight, list.scrollHeight]);
    assert.ok(height - bottom < 30, `${bottom} of ${height}`);
    await page.setViewportSize({ width: 1440, height: 900 });
  },

  async "the source follows the selected function"(page) {
    const line = () => page.$eval("#panel-sources .source-code .row.at .line", (cell) => cell.textContent);
    const heading = () => page.textContent("#details h2");
    await page.click("#tab-sources");
    await settled(page);
    // Where the innermost of the user's functions spend most, not the line at which all of the program is.
    assert.equal(await line(), "12");
    const scroller = "#panel-sources .source-code .rows-scroll";
    const isInView = () => page.$eval(scroller, (list) => list.querySelector(".row.at").offsetTop >= list.scrollTop && list.querySelector(".row.at").offsetTop < list.scrollTop + list.clientHeight);
    assert.ok(await isInView());
    for (const [name, at] of [["wait", "44"], ["solve", "20"], ["dgemm", "20"]]) {
      await page.click("#tab-table");
      await page.click(`#panel-table .name:text-is("${name}")`);
      await page.click("#tab-sources");
      await settled(page);
      assert.equal(await line(), at, name);
      assert.ok(await isInView(), name);
    }
    assert.match(await page.textContent("#panel-sources .note"), /^dgemm has no source file: here is what calls it most\.$/);
    // A line that was clicked stays where it is.
    const top = () => page.$eval(scroller, (list) => list.scrollTop);
    const before = await top();
    await page.click(`${scroller} .row:has(.line .dim:text-is("12"))`);
    assert.equal(await heading(), "parse");
    assert.deepEqual([await line(), await top()], ["12", before]);
    await page.click('#details .link:has-text("main")');
    await settled(page);
    assert.equal(await line(), "5", "a function selected elsewhere is followed");
    // A key and a button lead back.
    await page.keyboard.press("y");
    assert.equal(await heading(), "Your functions");
    assert.equal(await line(), "12");
    await page.click('#details .link:has-text("solve")');
    assert.equal(await heading(), "solve");
    // What had the focus is gone; the focus stays here.
    assert.equal(await page.evaluate(() => document.activeElement.id), "details");
    await page.click("#details .crumb button");
    assert.equal(await heading(), "Your functions");
  },

  async "a table without rows says why"(page) {
    await page.fill("#search", "no such function");
    await page.keyboard.press("Enter");
    await page.click("#tab-table");
    assert.equal(await page.textContent("#panel-table .nothing"), "No function that is shown matches /no such function/.");
    await page.press("#search", "Escape");
    assert.ok(!(await page.isVisible("#panel-table .nothing")));
    await page.click("#modules-button");
    await page.fill("#modules-filter", "nothing");
    assert.equal(await page.textContent("#modules .nothing"), 'No module has "nothing" in its name.');
    await page.keyboard.press("Escape");
  },

  async "a native function has its Python callers"(page) {
    await page.click("#tab-table");
    await page.click('#panel-table .name:text-is("page_fault")');
    const sections = await page.$$eval("#details section", (sections) => sections.map((section) => section.textContent));
    assert.ok(sections.some((text) => text.startsWith("Called bytile<double>")) && sections.includes("From Pythonsolve100 %"), sections.join());
    await page.click('#panel-table .name:text-is("dgemm")');
    assert.ok(!(await page.textContent("#details")).includes("From Python"), "its caller is Python");
  },

  async "a native function has its instructions"(page) {
    await page.click("#tab-table");
    await page.click('#panel-table .name:text-is("dgemm")');
    const rows = await page.$$eval("#details .assembly > *", (rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent).join("|") || row.textContent));
    assert.match(await page.textContent("#details"), /Not checked: the file has no build ID/);
    assert.deepEqual(rows, ["blas.c:7", "|10|mov %rax,%rbx", "75.0 %|14|vfmadd231pd %ymm0,%ymm1,%ymm2", "⋯", "25.0 %|28|ret"]);
  },

  async "the quality block says all"(page) {
    await page.click("#quality-button");
    const rows = await page.$$eval("#about tbody tr", (rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent)));
    for (const [key, n] of Object.entries(facts.quality)) assert.ok(rows.some((row) => row[0] === key && row[1] === String(n)), key);
    assert.ok(rows.some((row) => row[0] === "stack page not present" && row[1] === "3"));
    const text = await page.textContent("#about");
    for (const part of ["900 of 903 expected", "100 Hz requested, 99.7 Hz reached", "Overhead", "libopenblas.so.0", "symbol table"]) {
      assert.ok(text.includes(part), part);
    }
    await page.keyboard.press("Escape");
  },

  async "dark and light"(page) {
    const theme = () => page.evaluate(() => document.documentElement.dataset.theme);
    const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    await page.click("#tab-flame");
    assert.equal(await theme(), "light");
    const light = await paper();
    await page.emulateMedia({ colorScheme: "dark" });
    await page.waitForFunction(() => document.documentElement.dataset.theme === "dark");
    assert.notEqual(await paper(), light);
    await settled(page);
    assert.ok((await pixels(page, FLAME, "#1b1f26")) > 1000, "the canvas too");
    await page.keyboard.press("t");
    assert.equal(await theme(), "light");
    await page.click("#theme");
    assert.equal(await theme(), "dark");
    await page.emulateMedia({ colorScheme: "light" });
  },

  async "small windows and large ones"(page) {
    for (const [width, height] of [[360, 640], [780, 500], [2560, 1400]]) {
      await page.setViewportSize({ width, height });
      for (const name of ["flame", "sandwich", "table"]) {
        await page.click("#tab-" + name);
        await settled(page);
      }
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `${width}: ${wide} pixels too wide`);
    }
    await page.setViewportSize({ width: 1440, height: 900 });
  },
};

async function hostile(page) {
  const tampered = await page.evaluate(() => ({
    scripts: [...document.scripts].map((script) => script.type),
    images: document.images.length,
    title: document.title,
  }));
  // The page's own, and the profile that it holds.
  assert.deepEqual([tampered.scripts, tampered.images], [["", "application/gzip"], 0]);
  for (const tab of ["flame", "time", "sandwich", "tree", "table"]) {
    await page.click("#tab-" + tab);
    await settled(page);
  }
  const count = (await page.getAttribute("#panel-table .rows-scroll", "aria-rowcount")) - 1;
  assert.ok(count > 10, `${count} rows`);
  for (let i = 0; i < count; i++) {
    // Its position in the document changes while the list scrolls; its number does not.
    await page.$eval("#panel-table .rows-scroll", (list, to) => (list.scrollTop = to), i * 24);
    await settled(page);
    await page.click(`#function-row-${i}`);
    assert.equal(await page.getAttribute(`#function-row-${i}`, "aria-selected"), "true");
  }
  await page.fill("#search", "x{50}");
  await page.keyboard.press("Enter");
  assert.match(await page.textContent("#found"), / · 1 function$/);
  await page.click("#quality-button");
  await page.keyboard.press("Escape");
  await page.fill("#search", "");
  await page.keyboard.press("Enter");
  await under(page, ".plot canvas", 30, 10);
  const text = await page.evaluate(() => document.documentElement.outerHTML + [...document.querySelectorAll("*")].flatMap((e) => [...e.attributes].map((a) => a.value)).join(" "));
  const trick = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b\u202a-\u202e\u2066-\u2069\ufeff]/u.exec(text);
  assert.equal(trick, null, `a character that must not be obeyed: ${trick && escape(trick[0])}`);
  const names = await page.$$eval("#panel-table .name", (cells) => cells.map((cell) => cell.textContent));
  for (const name of ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a\\u{202e}\\u{2066}\\u{200b}\\x00\\x1b[31mb"]) {
    assert.ok(names.includes(name), name);
  }
  assert.ok(Math.max(...names.map((name) => name.length)) < 1100);
  const ran = await page.evaluate(() => {
    const tries = [];
    for (const attempt of [
      () => document.body.insertAdjacentHTML("beforeend", "<b>x</b>"),
      () => (document.body.innerHTML = "x"),
      () => document.body.setAttribute("onclick", "window.ran = 1"),
      () => document.body.append(Object.assign(document.createElement("script"), { textContent: "window.ran = 1" })),
    ]) {
      try {
        attempt();
        tries.push(String(attempt));
      } catch {}
    }
    document.body.click();
    return [tries.length, window.ran];
  });
  assert.deepEqual(ran, [0, undefined], "the policy forbids it");
}

async function deep(page) {
  assert.deepEqual(await table(page), { down: [0, 7], bottom: [7, 7] });
  await page.click("#tab-flame");
  await settled(page); // the first drawing scrolls to the roots
  await page.$eval("#panel-flame .scroller", (e) => (e.scrollTop = e.scrollHeight));
  await settled(page);
  const { height } = await page.locator(FLAME).boundingBox();
  assert.equal((await under(page, FLAME, 100, height - 5))[0], "bottom");
  await clickAt(page, FLAME, { x: 100, y: height - 5 });
  await page.keyboard.press("s");
  await settled(page);
  // The function is at the bottom of its callers, and what calls it directly is in sight.
  const callers = ".sandwich-charts .scroller >> nth=0";
  const [above, below] = await page.$eval(callers, (e) => [e.scrollTop, e.scrollHeight - e.clientHeight - e.scrollTop]);
  assert.ok(above > 1000 && below <= 1, `${above} above, ${below} below`);
  await page.click("#tab-time");
  await settled(page);
  assert.equal((await under(page, "#panel-time canvas", 10, 9))[0], "down");
  await page.click("#tab-tree");
  await page.focus("#panel-tree .rows-scroll");
  await page.keyboard.press("End");
  await page.click('[data-kind="python"]');
  await page.click("#tab-table");
  assert.equal(await page.textContent("#shown"), "7 samples");
}

async function empty(page) {
  assert.match(await page.textContent(".empty"), /no samples/);
  for (const tab of await page.$$("#tabs button")) await tab.click();
  await page.fill("#search", "x");
  await page.click("#quality-button");
  await page.keyboard.press("Escape");
}

async function untimed(page) {
  assert.ok(!(await page.isVisible("#timeline")) && !(await page.$("#tab-time")));
  await shows(page, expected());
}

// Stacks begin at the program's code until the interpreter's frames are requested; no sample changes.
async function calls(page) {
  const names = async () => Object.keys(await table(page));
  assert.deepEqual(await table(page), { "[interpreter start]": [0, 50], "<module>": [0, 50], main: [10, 50], list_sort: [20, 20], get: [10, 10], dumps: [10, 10] });
  await page.click("#interpreter");
  assert.ok((await names()).includes("PyObject_Vectorcall") && (await names()).includes("_start"));
  assert.equal((await table(page)).main[0], 0);
  assert.equal(await page.textContent("#shown"), "50 samples");
  await page.keyboard.press("g");
  assert.deepEqual((await table(page)).main, [10, 50]);
  const parts = async () => page.$$eval("#details .category", (rows) => rows.map((row) => row.textContent));
  assert.deepEqual((await parts()).sort(), ["interpreter", "library requests", "standard library", "your code"]);
  await page.click('#details .category:text-is("library requests")');
  assert.deepEqual((await table(page)).main, [20, 50]);
  await page.click("#chips button");
  assert.deepEqual((await table(page)).main, [10, 50]);
  await page.click("#colors");
  await page.click('#categories button:text-is("standard library")');
  assert.deepEqual((await table(page)).main, [20, 50]);
  // In a low window the first function of the program is in the first third.
  await page.setViewportSize({ width: 800, height: 600 });
  await page.click("#tab-flame");
  await settled(page);
  assert.equal((await under(page, FLAME, 20, 49))[0], "<module>");
  const { y } = await page.locator(FLAME).boundingBox();
  assert.ok(y + 49 < 200, `${y}`);
  assert.ok(await page.isVisible("#shown"));
}

// Both profiles in one graph: colors are changes, and what only one of them has is marked.
async function comparison(page) {
  assert.equal(await page.textContent("#title"), "b.json compared to a.json");
  assert.match(await page.textContent("#facts"), /of all samples/);
  const changes = () =>
    page.$$eval("#panel-table .rows-body .row", (rows) => Object.fromEntries(rows.map((row) => [row.querySelector(".name").textContent, [".total", ".totaln", ".after", ".self"].map((cell) => row.querySelector(cell).textContent)])));
  await page.click("#tab-table");
  await settled(page);
  const rows = await changes();
  assert.deepEqual(rows.new.slice(0, 3), ["+25.0 %", "0 %", "25.0 %"]);
  assert.deepEqual(rows.old.slice(0, 3), ["−33.3 %", "33.3 %", "0 %"]);
  assert.deepEqual(rows.more.slice(0, 3), ["+20.8 %", "16.7 %", "37.5 %"]);
  assert.deepEqual(rows.main.slice(0, 3), ["0 %", "100 %", "100 %"]);
  assert.equal(rows.in_new[3], "+25.0 %");
  const first = await page.$eval("#panel-table .rows-body .row .name", (name) => name.textContent);
  assert.match(first, /old$/, "the largest change is first");
  await page.click("#tab-flame");
  await settled(page);
  const color = (name) => page.evaluate((name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim(), name);
  assert.ok((await pixels(page, FLAME, await color("--grew"))) > 1000, "new");
  assert.ok((await pixels(page, FLAME, await color("--shrank"))) > 1000, "gone");
  assert.ok((await pixels(page, FLAME, await color("--unchanged"))) > 1000, "main");
  assert.match((await find(page, FLAME, 2, "new")).tip.at(-1), /^total 0 % before, 25\.0 % after \(\+25\.0 %: new\)$/);
  assert.match((await find(page, FLAME, 1, "main")).tip.at(-1), /within noise\)$/);
  // Boxes, table and facts say the same: what is not significant has no color anywhere.
  const found = await page.evaluate(() => {
    const { view, profile, comparison } = nativeprof.model;
    const names = (is) => [...new Set([...view.fn].filter((fn, i) => i > 0 && is(fn)).map((fn) => profile.functions.name[fn]))].sort();
    return { colored: names((fn) => comparison.part(fn) !== 0), sure: names((fn) => comparison.changes.get(fn)?.sure) };
  });
  assert.deepEqual(found.colored, found.sure);
  assert.ok(found.sure.includes("old") && !found.sure.includes("end") && !found.sure.includes("main"));
  const painted = await page.$$eval("#panel-table .rows-body .row", (rows) => rows.filter((row) => !row.querySelector(".total .dim")).map((row) => row.querySelector(".name").textContent));
  assert.deepEqual(painted.sort(), found.sure);
  assert.equal(await page.$$eval("#panel-table .rows-body .self .more, #panel-table .rows-body .self .less", (cells) => cells.length), 0, "self was not tested");
  assert.match(await page.textContent("#facts"), new RegExp(`${found.sure.length} of \\d+ functions changed`));
  assert.match(await page.textContent("#facts"), /one run of each side/);
  await clickAt(page, FLAME, await find(page, FLAME, 2, "more"));
  assert.match(await page.textContent("#details"), /16\.7 % → 37\.5 % \(\+20\.8 %\)/);
  // The width of the older profile: nothing new is in it, and no number changes.
  await page.selectOption("#value", { label: "before" });
  await page.click("#tab-table");
  await settled(page);
  assert.ok(!(await changes()).new);
  assert.deepEqual((await changes()).more, rows.more);
  await page.selectOption("#value", { label: "mean of both" });
  await page.click('#panel-table .name:text-is("in_new")');
  await page.keyboard.press("s");
  await settled(page);
  assert.match(await page.textContent(".middle"), /0 % before, 25\.0 % after/);
  await page.click("#tab-tree");
  await page.click("#tab-sources");
  assert.match(await page.textContent("#panel-sources .middle"), /Lines and their amounts are those of b\.json, the newer profile/);
}

// A page for others has the numbers of lines, and no text of them.
async function shared(page) {
  await shows(page, expected());
  await page.click("#tab-sources");
  await settled(page);
  assert.match(await page.textContent("#panel-sources .middle"), /made without source text/);
  const rows = await page.$$eval("#panel-sources .source-code .rows-body .row", (rows) => rows.map((row) => [".line", ".quoted"].map((cell) => row.querySelector(cell).textContent)));
  assert.deepEqual(rows, [["5", ""], ["12", ""], ["20", ""], ["44", ""]]);
  assert.ok(!(await page.content()).includes("step_"));
}

// Callbacks that blocked an event loop, the longest first; a click chooses the samples of their time.
async function lagging(page) {
  await page.click("#tab-lag");
  await settled(page);
  const rows = () => page.$$eval("#panel-lag .rows-body .row", (rows) => rows.map((row) => [".time", ".at", ".task", ".function", ".thread"].map((cell) => row.querySelector(cell).textContent)));
  const names = await rows();
  assert.deepEqual(names, [
    ["90.0 ms", "4.000 s", "-", "parse (app.py:12)", "MainThread (thread 70)"],
    ["70.0 ms", "9.000 s", "late", "gone (other.py:3)", "MainThread (thread 70)"],
    ["60.0 ms", "1.000 s", "report", "solve (app.py:20)", "MainThread (thread 70)"],
  ]);
  await page.click('#panel-lag .row:has-text("solve")');
  await settled(page);
  assert.equal(await page.textContent("#details h2"), "solve");
  const within = expected((s) => s.tid === 70 && s.time >= 1 && s.time <= 1.07);
  assert.equal(within.taken, 8);
  await shows(page, within);
  await page.click("#tab-lag");
  await page.click('#panel-lag .row:has-text("gone")');
  await shows(page, within);
  await page.click("#tab-lag");
  await page.click("#panel-lag .head .at button");
  await settled(page);
  assert.equal((await rows())[0][1], "9.000 s", "sorted by time");
  await page.dblclick('#panel-lag .row:has-text("parse")');
  await settled(page);
  assert.equal(await page.getAttribute("#tab-flame", "aria-selected"), "true");
}

// Samples with a label, which one types or picks from a list.
async function labeled(page) {
  const options = await page.$$eval("#labels option", (options) => options.map((option) => option.value));
  assert.deepEqual(options, ["span=<b>job</b>", "span=request", "route=/a", "route=/b"]);
  const choose = async (text) => {
    await page.fill("#label", text);
    await page.press("#label", "Enter");
    await settled(page);
  };
  const [main, worker] = [70, 71].map((tid) => expected((s) => s.tid === tid));
  for (const text of ["span=request", "request", "route=/a"]) {
    await choose(text);
    await shows(page, main);
  }
  await choose("<b>job</b>");
  await shows(page, worker);
  await choose("nothing");
  assert.equal(await page.getAttribute("#label", "aria-invalid"), "true");
  await shows(page, expected(() => true));
  await choose("request");
  await page.click('#chips .chip:has-text("span=request")');
  await settled(page);
  await shows(page, expected(() => true));
}

// What threads did over time, and where they waited.
async function waits(page) {
  const box = await page.locator(".plot canvas").boundingBox();
  const over = async (part, lane) => (await under(page, ".plot canvas", box.width * part, lane * 26 + 10)).slice(2);
  const lane = async (name) => (await page.$$eval(".lane .name", (names) => names.map((e) => e.textContent))).indexOf(name);
  const [main, worker] = [await lane("MainThread"), await lane("worker")];
  assert.match((await over(0.2, main)).join(), /^Running: .*\(100 %\)$/);
  assert.match((await over(0.8, main)).join(), /^Sleep: .*\(100 %\)$/, "the whole interval before its end");
  assert.match((await over(0.8, worker)).join(), /^GIL: .*\(100 %\)$/);
  assert.match(await page.textContent("#states"), /Running.*GIL/);
  await page.click("#tab-waits");
  await settled(page);
  const rows = () =>
    page.$$eval("#panel-waits .rows-body .row", (rows) => rows.map((row) => [".time", ".count", ".longest", ".waitkind", ".cell.function"].map((cell) => row.querySelector(cell).textContent)));
  assert.deepEqual(await rows(), [
    ["2.00 s", "201", "1.00 s", "gil", "wait (app.py:10)"],
    ["1.00 s", "1", "1.00 s", "sleep", "main (app.py:1)"],
  ]);
  // How much of a function's time is CPU time, and what the rest is.
  const states = async (name) => {
    await page.click("#tab-table");
    await page.click(`#panel-table .name:text-is("${name}")`);
    return page.$$eval("#details .states dl > *", (cells) => cells.map((cell) => cell.textContent));
  };
  assert.deepEqual(await states("main"), ["Running", "90.9 %", "Sleep", "9.1 %"]);
  assert.deepEqual(await states("wait"), [], "all of it is one wait");
  await page.click("#tab-waits");
  await page.fill("#range-to", "1");
  await page.keyboard.press("Tab");
  await settled(page);
  assert.deepEqual(await rows(), [["1.00 s", "200", "5.0 ms", "gil", "wait (app.py:10)"]]);
  const gil = await page.$$eval(".gil tbody tr", (rows) => rows.map((row) => [...row.children].map((cell) => cell.textContent)));
  assert.deepEqual(gil[0], ["worker (thread 71)", "2.00 s", "201", "1.00 s", "-"]);
  assert.ok(gil.some((row) => row.join() === "worker (thread 71),MainThread (thread 70),2.00 s,201,1.00 s"), JSON.stringify(gil));
}

// In a small window there is room for what one came for; lanes and labels say which process and thread they are of.
async function everything(page) {
  const lanes = await page.$$eval(".lane .track", (lanes) => lanes.map((lane) => [...lane.querySelectorAll("span")].map((part) => part.textContent)));
  assert.deepEqual(lanes, [["MainThread", "process 70"], ["worker", "process 70 · thread 71"], ["recalculating worker", "process 80 · thread 81"]]);
  const threads = await page.$$eval("#thread option", (options) => options.map((option) => option.textContent));
  assert.equal(threads.at(-1), "recalculating worker (process 80 · thread 81)");
  assert.match(await page.textContent("#title"), /^python3\.13 levels\.py --configuration/);
  // What stays where there is no room: the names of files, with their lines.
  const kept = (list) => page.$$eval(`${list} .path .end`, (ends) => ends.map((end) => end.textContent));
  await page.click("#tab-sources");
  await settled(page);
  assert.deepEqual(await kept("#panel-sources .sandwich-list"), ["/app.py", "/levels.py"]);
  await page.setViewportSize({ width: 800, height: 600 });
  await settled(page);
  const height = await page.$eval("#panel-sources .source-code .rows-scroll", (list) => list.clientHeight);
  assert.ok(height >= 300, `${height} pixels of code`);
  assert.ok(!(await page.isVisible("#panel-sources .sandwich-list")));
  await page.selectOption(".file-choice", { index: 1 });
  await settled(page);
  assert.match(await page.$eval("#panel-sources .source-code .row.at .line", (cell) => cell.textContent), /^2001$/);
  await page.click("#tab-waits");
  assert.deepEqual(await kept("#panel-waits"), [" (levels.py:1)"]);
  const waiter = await page.textContent(".gil tbody th");
  assert.equal(waiter, "recalculating worker (process 80 · thread 81)");
  await page.uncheck(".lane:nth-child(3) input");
  await settled(page);
  assert.equal(await page.textContent("#panel-waits .nothing"), "No thread that is shown waited.");
}

// Samples of suspended tasks represent the time since they were counted before.
async function suspended(page) {
  const box = await page.locator(".plot canvas").boundingBox();
  const over = async (part) => (await under(page, ".plot canvas", box.width * part, 10)).slice(2).map((line) => line.replace(/:.*\(/, " ("));
  for (const part of [0.1, 0.3, 0.48]) assert.deepEqual(await over(part), ["I/O (75.0 %)", "Sleep (25.0 %)"]);
  for (const part of [0.52, 0.7, 0.9]) assert.deepEqual(await over(part), ["I/O (25.0 %)", "Sleep (75.0 %)"]);
}

// Native workers are below the code that they work for, or apart.
async function attributed(page) {
  const stacks = () =>
    page.evaluate(() => {
      const { model, profile } = globalThis.nativeprof;
      const { view } = model;
      const found = {};
      for (let i = 1; i < view.n; i++) {
        const names = [];
        for (let at = i; at > 0; at = view.parent[at]) names.unshift(profile.functions.name[view.fn[at]]);
        if (view.self[i] > 0) found[names.join(";")] = view.self[i];
      }
      return found;
    });
  const [first, second] = ["first", "second"].map((line) => `MainThread;main;${line};exec_blas`);
  const below = ";[worker thread blas];kernel";
  const together = { [first]: 30, [second]: 50, [first + below]: 30, [second + below]: 50 };
  const apart = { [first]: 30, [second]: 50, [below.slice(1)]: 80 };
  assert.equal(await page.textContent("#workers"), "Workers: attributed");
  assert.deepEqual(await stacks(), together);
  await page.click("#workers");
  await settled(page);
  assert.equal(await page.textContent("#workers"), "Workers: apart");
  assert.equal(await page.getAttribute("#workers", "aria-pressed"), "false");
  assert.deepEqual(await stacks(), apart);
  assert.deepEqual((await table(page))["main"], [0, 80]);
  // Filters apply to both. Lines have the samples of the workers that they gave work to in both.
  const lines = () => page.evaluate(() => {
    const { model, profile } = globalThis.nativeprof;
    return [...model.lines(profile.functions.name.indexOf("first"))];
  });
  assert.deepEqual(await lines(), [[10, [60, 0]]]);
  for (const key of ["w", "w"]) await page.keyboard.press(key);
  await settled(page);
  assert.deepEqual(await stacks(), apart);
  await page.uncheck(".lane:nth-child(1) input");
  await settled(page);
  assert.deepEqual(await stacks(), { [below.slice(1)]: 80 });
  await page.click("#workers");
  await settled(page);
  assert.deepEqual(await stacks(), { [first + below]: 30, [second + below]: 50 });
  assert.deepEqual(await lines(), [[10, [60, 0]]]);
}

const browser = await launch();
let failed = 0;
async function check(name, file, test) {
  const start = performance.now();
  const { page, complaints } = await open(browser.context, join(directory, file));
  try {
    await test(page);
    // The hostile test reports what the policy refuses.
    const reported = complaints.filter((text) => test !== hostile || !/Trusted|Content Security Policy/.test(text));
    assert.deepEqual(reported, []);
    console.log(`ok ${name} (${Math.round(performance.now() - start)} ms)`);
  } catch (e) {
    failed++;
    console.log(`FAILED ${name}\n${e.stack}\n${complaints.join("\n")}`);
    if (process.env.PICTURES) await page.screenshot({ path: join(process.env.PICTURES, `${name.replaceAll(/\W+/g, "-")}.png`) });
  }
  await page.close();
}
for (const [name, test] of Object.entries(tests)) await check(name, "known.html", test);
for (const [name, test] of Object.entries({ hostile, deep, empty, untimed, calls, comparison, waits, shared, lagging, labeled, suspended, attributed, everything })) await check(`a profile that is ${name}`, `${name}.html`, test);
await browser.close();
process.exit(failed ? 1 : 0);
