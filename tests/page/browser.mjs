// Starts Chromium for tests and screenshots of exported pages. No network requests and no errors in the page are
// allowed: both are recorded.

import { createRequire } from "node:module";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { fileURLToPath, pathToFileURL } from "node:url";

const target = process.env.CARGO_TARGET_DIR ?? fileURLToPath(new URL("../../target", import.meta.url));
const require = createRequire(join(resolve(target), "browser/package.json"));
const { chromium } = require("playwright-core");

// The path of a file of a package that .ci/install-browser has installed.
export const library = (name) => require.resolve(name);

export async function launch(options = {}) {
  const directory = mkdtempSync(join(tmpdir(), "nativeprof-browser-"));
  const context = await chromium.launchPersistentContext(directory, {
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    headless: true,
    args: [
      "--no-sandbox",
      "--disable-gpu",
      "--disable-quic",
      "--no-first-run",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
    ],
    viewport: { width: 1440, height: 900 },
    colorScheme: "light",
    reducedMotion: "reduce",
    ...options,
  });
  const close = async () => {
    await context.close();
    rmSync(directory, { recursive: true, force: true });
  };
  return { context, close };
}

// Opens a file; `complaints` records what the page should not do.
export async function open(context, file) {
  const page = await context.newPage();
  page.setDefaultTimeout(30000);
  const url = pathToFileURL(resolve(file)).href;
  const complaints = [];
  page.on("console", (message) => complaints.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => complaints.push(`error: ${error.stack}`));
  page.on("dialog", (dialog) => {
    complaints.push(`dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  page.on("request", (request) => {
    if (request.url() !== url && !request.url().startsWith("data:")) complaints.push(`request: ${request.url()}`);
  });
  page.on("popup", () => complaints.push("another window"));
  await page.goto(url);
  await page.waitForFunction(() => document.documentElement.dataset.ready !== undefined, null, { timeout: 20000 });
  return { page, complaints };
}

// After what was requested has been drawn.
export const settled = (page) => page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));

// The name under the mouse at a position of a canvas, in CSS pixels; the lines of its tooltip.
export async function under(page, canvas, x, y) {
  const box = await page.locator(canvas).boundingBox();
  await page.mouse.move(box.x + x, box.y + y);
  await settled(page);
  return page.evaluate(() => {
    const tip = document.getElementById("tooltip");
    return tip.hidden ? null : [...tip.children].map((line) => line.textContent);
  });
}

// Number of pixels of a canvas with a color.
export const pixels = (page, canvas, hex) =>
  page.$eval(
    canvas,
    (element, hex) => {
      const copy = new OffscreenCanvas(element.width, element.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(element, 0, 0);
      const { data } = copy.getImageData(0, 0, element.width, element.height);
      const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
      let n = 0;
      for (let i = 0; i < data.length; i += 4) if (wanted.every((c, k) => Math.abs(c - data[i + k]) < 3)) n++;
      return n;
    },
    hex,
  );
