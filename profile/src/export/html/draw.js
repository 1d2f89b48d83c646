// Colors and text on a canvas, at the resolution of the screen.

const KIND_NAMES = {
  python: "Python",
  native: "Native",
  inlined: "Inlined",
  kernel: "Kernel",
  truncated: "Truncated stack",
  task: "Task",
  worker: "Worker thread",
  state: "Off CPU",
  unknown: "No symbol",
  process: "Process",
  thread: "Thread",
  root: "All",
};

// The class of a category's color: "extension numpy" and "extension PIL" have one.
const CATEGORIES = ["your code", "library", "standard library", "interpreter", "garbage collection", "extension", "C library", "kernel",
  "waiting", "unknown"];
function categoryClass(label) {
  const fitting = CATEGORIES.filter((name) => label === name || label.startsWith(name + " "));
  return "of-" + (fitting.pop() ?? "unknown").replaceAll(" ", "-").toLowerCase();
}

// By kind as in the svg, or by category; the tint depends only on the name, so that neighbors differ and runs can be compared.
class Palette {
  constructor(model) {
    this.model = model;
    const { name, count } = model.profile.functions;
    this.tint = new Uint8Array(count);
    for (let i = 0; i < count; i++) {
      let hash = 0x811c9dc5;
      const text = name[i];
      for (let k = 0; k < text.length && k < 100; k++) hash = Math.imul(hash ^ text.charCodeAt(k), 0x01000193);
      this.tint[i] = (hash >>> 16) % TINTS;
    }
    this.load();
  }

  // Reads the colors of the current theme.
  load() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
    this.colors = {};
    for (const name of ["text", "dim", "faint", "line", "panel", "page", "accent", "found", "frame-text"]) {
      this.colors[name] = value("--" + name);
    }
    this.font = value("--font");
    const toward = rgb(value("--tint"));
    const reach = Number(value("--tint-reach"));
    const bare = rgb(this.colors.panel);
    const mix = (a, b, part) => `rgb(${a.map((c, i) => Math.round(c + (b[i] - c) * part)).join(",")})`;
    const shades = (kind) => {
      const base = rgb(value("--" + kind));
      const tints = [];
      for (let t = 0; t < TINTS; t++) tints.push(mix(base, toward, (t / (TINTS - 1)) * reach));
      return { base: value("--" + kind), tints, dimmed: mix(base, bare, 0.72), crowd: mix(base, bare, 0.35) };
    };
    this.kinds = this.model.profile.kinds.map(shades);
    this.memory = Object.fromEntries(MEMORY_KINDS.map(({ color }) => [color, value("--memory-" + color)]));
    this.states = STATES.map((state) => value("--state-" + state));
    this.changes = changeColors(value, mix, rgb);
    this.categories = this.model.profile.categories.map((label) => shades(label ? categoryClass(label) : "root"));
  }

  // `tints`: colors of single functions; `crowd`: of several drawn together; `dimmed`: of functions that a search did not match.
  fill(fn, how) {
    const { functions: f } = this.model.profile;
    const kind = this.model.byCategory ? this.categories[f.category[fn]] : this.kinds[f.kind[fn]];
    return how === "tints" ? kind.tints[this.tint[fn]] : kind[how];
  }

  // The color of a change, from -1 (gone) to 1 (new).
  change(part) {
    return this.changes[STEPS + Math.sign(part) * Math.ceil(Math.abs(part) * STEPS)];
  }
}
const TINTS = 8;

// Fits a canvas to its box in device pixels; returns its context, scaled to CSS pixels.
function fit(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const w = Math.max(1, Math.round(width * ratio));
  const h = Math.max(1, Math.round(height * ratio));
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// Writes as much of a text as fits; each text's width is measured once per font.
class Letters {
  constructor() {
    this.widths = new Map();
    this.font = "";
  }

  use(context, font) {
    context.font = font;
    context.textBaseline = "middle";
    context.direction = "ltr";
    if (font !== this.font) {
      this.font = font;
      this.widths.clear();
      this.dots = context.measureText("…").width;
    }
  }

  width(context, text) {
    let width = this.widths.get(text);
    if (width === undefined) {
      if (this.widths.size > 50000) this.widths.clear();
      width = context.measureText(text).width;
      this.widths.set(text, width);
    }
    return width;
  }

  // Returns the width that was used.
  draw(context, text, x, y, room) {
    if (text.length > 400) text = text.slice(0, 400) + "…";
    let width = this.width(context, text);
    if (width <= room) {
      context.fillText(text, x, y);
      return width;
    }
    let keep = Math.floor((text.length * (room - this.dots)) / width);
    while (keep > 0) {
      const part = text.slice(0, keep);
      width = context.measureText(part).width + this.dots;
      if (width <= room) {
        context.fillText(part + "…", x, y);
        return width;
      }
      keep -= Math.max(1, Math.ceil((keep * (width - room)) / width));
    }
    return 0;
  }
}
