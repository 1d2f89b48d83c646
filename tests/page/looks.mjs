// How exported pages look: each tab in small and usual windows, light and dark. No text of the header, the toolbar or the head
// of a table may be cut, and axe-core must find nothing that keeps people from using it.
//
//     node tests/page/looks.mjs DIRECTORY FILE...      PICTURES=DIRECTORY takes a picture of each

import { readFileSync } from "node:fs";
import { basename, join } from "node:path";
import { pathToFileURL } from "node:url";
import { launch, library, open } from "./browser.mjs";

const [directory, ...files] = process.argv.slice(2);
const axe = readFileSync(library("axe-core/axe.min.js"), "utf8");
const SIZES = [
  { width: 800, height: 600 },
  { width: 1280, height: 800 },
];

// Texts that are cut, with what cuts them. One that is out of sight as a whole is not: a column, or a fact of the header, that
// has no room is left out. So is what is to be cut in the middle, which shows that it is.
const cut = () => {
  const found = [];
  const shows = (box, outer) => box.right > outer.left + 1 && box.left < outer.right - 1 && box.bottom > outer.top + 1 && box.top < outer.bottom - 1;
  const isWithin = (first, last, from, to) => first >= from - 1 && last <= to + 1;
  // What one can scroll down to is not cut.
  const holds = (clip, box) => {
    const outer = clip.getBoundingClientRect();
    const scrolls = getComputedStyle(clip).overflowY === "auto";
    return isWithin(box.left, box.right, outer.left, outer.right) && (scrolls || isWithin(box.top, box.bottom, outer.top, outer.bottom));
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const element = text.parentElement;
    if (!text.data.trim() || !element.checkVisibility({ visibilityProperty: true }) || element.closest(".unseen, .path .start, option")) continue;
    if (!element.closest("header, #toolbar, #states, .timeline-head, .rows-head, thead, .middle, #tabs")) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    const box = range.getBoundingClientRect();
    const clips = [document.documentElement];
    for (let up = element; up; up = up.parentElement) if (getComputedStyle(up).overflow !== "visible") clips.push(up);
    if (clips.some((clip) => !shows(box, clip.getBoundingClientRect()))) continue;
    const by = clips.find((clip) => !holds(clip, box));
    if (by) found.push(`"${text.data}" by ${by.tagName}.${by.className}#${by.id}`);
  }
  for (const e of document.querySelectorAll("header, header *, #toolbar, #toolbar *, .rows-head *, thead *")) {
    if (e.checkVisibility() && e.scrollWidth > e.clientWidth + 1 && e.clientWidth && !e.matches("input, select, .path .start, svg *")) found.push(`content of ${e.tagName}.${e.className}#${e.id}: ${e.scrollWidth} in ${e.clientWidth}`);
  }
  return found;
};

let failed = 0;

function report(where, wrong) {
  if (!wrong.length) return;
  failed++;
  console.log(`FAILED ${where}\n    ${wrong.join("\n    ")}`);
}

async function look(page, where) {
  await page.mouse.move(0, 0);
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  if (process.env.PICTURES) await page.screenshot({ path: join(process.env.PICTURES, `${where}.png`) });
  const { violations } = await page.evaluate(() => globalThis.axe.run({ resultTypes: ["violations"] }));
  const wrong = violations.flatMap(({ id, nodes }) => nodes.map(({ target, failureSummary }) => `${id}: ${target}: ${failureSummary.replaceAll(/\n\s*/g, " ")}`));
  report(where, [...(await page.evaluate(cut)).map((text) => `cut: ${text}`), ...wrong]);
}

// All parts of a census, and one that is open.
async function lookAtCensus(context, file, scheme) {
  const { page, complaints } = await open(context, join(directory, file));
  await page.evaluate(axe);
  for (const size of [{ width: 400, height: 700 }, ...SIZES]) {
    await page.setViewportSize(size);
    const name = (what) => `${basename(file, ".html")}-${what}-${size.width}-${scheme}`;
    await look(page, name("all"));
    await page.focus("#map .box");
    await page.keyboard.press("Enter");
    await look(page, name("part"));
    await page.fill("#search", "no such type");
    await look(page, name("empty"));
    await page.press("#search", "Escape");
    await page.keyboard.press("?");
    await look(page, name("help"));
    await page.keyboard.press("Escape");
    await page.keyboard.press("Escape");
  }
  report(`${file} ${scheme}`, complaints);
  await page.close();
}

async function lookAtPage(context, file, scheme) {
  const { page, complaints } = await open(context, join(directory, file));
  const tabs = await page.$$eval("#tabs button", (all) => all.map((tab) => tab.id));
  // The content security policy of the page does not apply to what the debugger evaluates.
  await page.evaluate(axe);
  for (const size of SIZES) {
    await page.setViewportSize(size);
    const name = (what) => `${basename(file, ".html")}-${what}-${size.width}-${scheme}`;
    for (const tab of tabs) {
      await page.click("#" + tab);
      await look(page, name(tab.slice(4)));
    }
    // With a function selected, a search, and filters.
    await page.click("#tab-table");
    await page.click("#panel-table .rows-body .row >> nth=1");
    if (await page.isVisible("#lanes")) await page.evaluate(() => globalThis.nativeprof.page.timeline?.choose(1e6, 3e6));
    await page.fill("#search", "e");
    await page.press("#search", "Enter");
    if (await page.isVisible("[data-kind]")) await page.click("[data-kind] >> nth=-1");
    for (const tab of ["table", "flame", "sources"]) {
      await page.click("#tab-" + tab);
      await look(page, name(`${tab}-filtered`));
    }
    await page.fill("#search", "no such function");
    await page.press("#search", "Enter");
    await page.click("#tab-table");
    await look(page, name("table-empty"));
    await page.fill("#search", "(");
    await page.press("#search", "Enter");
    report(name("search-wrong"), await page.evaluate(cut));
    await page.press("#search", "Escape");
    if (await page.isVisible("[data-kind]")) await page.click("[data-kind] >> nth=-1");
    for (const button of ["#quality-button", "#help-button", "#modules-button"]) {
      if (!(await page.isVisible(button))) continue;
      await page.click(button);
      await look(page, name(button.slice(1)));
      await page.keyboard.press("Escape");
    }
    await page.keyboard.press("y");
    await page.evaluate(() => globalThis.nativeprof.page.timeline?.choose(0, Infinity));
  }
  report(`${file} ${scheme}`, complaints);
  await page.close();
}

// The control for the search can be seen: text of full strength in another color than the background.
async function lookAtImage(context, file, scheme) {
  const page = await context.newPage();
  await page.goto(pathToFileURL(join(directory, file)).href);
  const [opacity, text, background] = await page.evaluate(() => {
    const of = (e) => getComputedStyle(e);
    return [of(document.getElementById("search")).opacity, of(document.getElementById("search")).fill, of(document.querySelector("rect")).fill];
  });
  const isLight = (color) => color.match(/\d+/g).every((part) => Number(part) > 128);
  if (opacity !== "1" || isLight(text) !== (scheme === "dark") || (scheme === "dark" && isLight(background))) report(`${file} ${scheme}`, [`search: ${text} at ${opacity} on ${background}`]);
  if (process.env.PICTURES) await page.screenshot({ path: join(process.env.PICTURES, `svg-${scheme}.png`) });
  await page.close();
}

for (const colorScheme of ["light", "dark"]) {
  const browser = await launch({ colorScheme });
  for (const file of files) {
    const looking = file.endsWith(".svg") ? lookAtImage : file === "census.html" ? lookAtCensus : lookAtPage;
    await looking(browser.context, file, colorScheme);
  }
  await browser.close();
}
process.exit(failed ? 1 : 0);
