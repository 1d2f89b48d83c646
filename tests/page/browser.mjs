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
