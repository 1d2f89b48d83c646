// Text: escaped names, formatted numbers, and elements made of them.

// Control, text-direction and invisible characters are shown as escapes.
const UNSAFE = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\u2028\u2029\ufffe\uffff]/u;
const EACH_UNSAFE = new RegExp(UNSAFE.source, "gu");

function clean(text) {
  if (!UNSAFE.test(text)) return text;
  return text.replace(EACH_UNSAFE, (c) => {
    const code = c.codePointAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u{" + code.toString(16) + "}";
  });
}

const NUMBER = new Intl.NumberFormat("en-US");
const count = (n) => NUMBER.format(n);
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

function percent(part, all) {
  if (!all) return "0 %";
  const p = (100 * part) / all;
  if (p === 0) return "0 %";
  if (p === 100) return "100 %";
  if (p < 0.01) return "<0.01 %";
  return (p < 1 ? p.toFixed(2) : p > 99.9 ? Math.min(p, 99.99).toFixed(2) : p.toFixed(1)) + " %";
}

function duration(us) {
  if (us >= 120e6) return `${Math.floor(us / 60e6)} min ${Math.round((us % 60e6) / 1e6)} s`;
  if (us >= 1e6) return `${(us / 1e6).toFixed(us >= 1e8 ? 1 : 2)} s`;
  if (us >= 1e3) return `${(us / 1e3).toFixed(us >= 1e5 ? 0 : 1)} ms`;
  return `${Math.round(us)} µs`;
}

function byteCount(n) {
  const at = n < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(n) / 10));
  return at === 0 ? `${count(n)} B` : `${(n / 1024 ** at).toFixed(2)} ${["B", "KiB", "MiB", "GiB", "TiB"][at]}`;
}

// The end of a path is more informative than its start.
const baseName = (path) => path.slice(path.lastIndexOf("/") + 1);
const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

// The name of a module without the part that only says for which interpreter it was built: `_json.so`.
const shortModule = (name) => name.replace(/\.(cpython-\d+\w*(-[\w-]+)?|abi3)(?=\.so$)/, "");

// Functions with the names of their files: `parse (/srv/app.py:12) in read (libc.so.6)` is `parse (app.py:12) in read
// (libc.so.6)`.
const shortPlaces = (text) => text.replace(/\(\/[^()]*\/(?=[^()/]+\))/g, "(");

// The same, where the place of the first function stays if there is not enough room.
function placeText(text) {
  const short = shortPlaces(text);
  const [, name, place, rest] = /^(.*?)( \([^()]*\))(.*)$/s.exec(short) ?? [short, short, "", ""];
  return el("bdi", { class: "path", title: shorten(text, 1000) }, el("span", { class: "start", text: name }), el("span", { class: "end", text: place }), el("span", { class: "rest", text: rest }));
}

// A command line whose program and script have no directories: `python3 app.py --port 80`.
function shortCommand(command) {
  const name = (word) => baseName(word) || word;
  const words = command.split(" ");
  return words.map((word, at) => (at === 0 || (at < 4 && word.startsWith("/")) ? name(word) : word)).join(" ");
}

// A text that is cut in the middle where there is not enough room: the last part of its last path stays, by default.
function pathText(text, at = text.lastIndexOf("/"), title = text) {
  const cut = Math.max(0, at);
  return el("bdi", { class: "path", title: shorten(title, 1000) }, el("span", { class: "start", text: text.slice(0, cut) }), el("span", { class: "end", text: text.slice(cut) }));
}

// An element; strings among its children become text, never markup.
function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "text") element.textContent = value;
    else if (key === "class") element.className = value;
    // Attributes of HTML are there or not; those of ARIA say `true`.
    else element.setAttribute(key, value === true && !key.startsWith("aria-") ? "" : value);
  }
  element.append(...children.filter((c) => c !== null && c !== undefined && c !== false));
  return element;
}

const $ = (id) => document.getElementById(id);

// Announces changes to screen readers.
let announced = 0;
function announce(text) {
  clearTimeout(announced);
  announced = setTimeout(() => ($("live").textContent = text), 60);
}
