// Page of a census: the map of resident memory, and tables of the same.

const PARTS = {
  python_objects: "Python: objects and what they own",
  python_free_blocks: "Python: free blocks in pools in use",
  python_free_pools: "Python: free pools",
  python_arenas: "Python: arenas",
  c_in_use: "C heap: in use",
  c_free: "C heap: free but kept",
  c_large: "C heap: large blocks, mapped one by one",
  c_heap: "C heap, not divided",
  stacks: "Thread stacks",
  files_private: "Files: private pages",
  files_shared: "Files: shared pages",
  anonymous: "Other anonymous memory",
  kernel: "The kernel's own mappings",
  unknown: "Unknown",
};
// What is in a part, but in none of its rows.
const RESTS = {
  python_objects: "of no known type",
  c_in_use: "C code, and blocks without a known owner",
  c_large: "blocks without a known owner",
  files_private: "other files",
  files_shared: "other files",
  anonymous: "other mappings",
};
// Boxes in a part that is open, and in each of all parts; rows of a table; the smallest box, square pixels.
const MAX_BOXES = 400;
const MAX_SMALL_BOXES = 80;
const MAX_ROWS = 400;
const MIN_AREA = 60;
const HEADER = 18;

const isNumber = (n) => typeof n === "number" && Number.isFinite(n) && n >= 0;
const list = (value) => (Array.isArray(value) ? value.filter((row) => row && typeof row === "object") : []);
const bytesOf = (n) => (isNumber(n) ? n : 0);

// An amount with its interval; of a damaged one, 0.
function estimate(value) {
  const [n, low, high] = Array.isArray(value) ? value.map(bytesOf) : [0, 0, 0];
  return { value: n, low: low ?? n, high: high ?? n };
}
const isExact = ({ low, high }) => low === high;
const interval = (amount, show) => (isExact(amount) ? "" : `${show(amount.low)} to ${show(amount.high)}`);

class Census {
  constructor(json) {
    this.json = json;
    this.rss = bytesOf(json.rss_bytes);
    this.types = list(json.types).map((row) => ({
      name: String(row.name ?? ""),
      count: estimate(row.count),
      bytes: estimate(row.bytes),
      parts: row.parts && typeof row.parts === "object" ? row.parts : {},
      isObject: row.is_object !== false,
    }));
    this.types.sort((a, b) => b.bytes.value - a.bytes.value);
    const order = Object.keys(PARTS);
    this.parts = list(json.parts)
      .filter((part) => order.includes(part.name) && bytesOf(part.bytes) > 0)
      .map(({ name, bytes }) => this.part(name, bytes));
    this.parts.sort((a, b) => b.bytes - a.bytes);
  }

  // A part with its cells, the largest first, whose areas sum to it.
  part(name, bytes) {
    const cells = this.cells(name).filter((cell) => cell.bytes > 0);
    const sum = cells.reduce((sum, cell) => sum + cell.bytes, 0);
    // Estimates may exceed what is resident, and what was allocated need not be.
    const scale = sum > bytes ? bytes / sum : 1;
    for (const cell of cells) cell.area = cell.bytes * scale;
    const rest = bytes - sum * scale;
    if (cells.length && rest > bytes / 1e4) cells.push({ name: RESTS[name] ?? "others", bytes: rest, area: rest, isRest: true });
    cells.sort((a, b) => b.area - a.area);
    for (const cell of cells) cell.part = name;
    return { name, title: PARTS[name], bytes, cells, isReduced: scale < 0.999 };
  }

  cells(name) {
    const { json } = this;
    const ofTypes = this.types.map((type) => ({ name: type.name, bytes: bytesOf(type.parts[name]), type }));
    if (name === "c_free") {
      return list(json.glibc?.arenas).map((arena) => ({ name: arena.is_main ? "main arena" : `arena ${address(arena.address)}`, bytes: bytesOf(arena.free_resident), returnable: bytesOf(arena.returnable) }));
    }
    if (name.startsWith("files_")) {
      return list(json.files).map((file) => ({ name: String(file.name), bytes: bytesOf(name === "files_private" ? file.private_bytes : file.shared_bytes) }));
    }
    if (name === "anonymous") {
      return [...ofTypes, ...list(json.anonymous).map((mapping) => ({ name: `${address(mapping.address)} ${mapping.name ?? ""}`.trim(), bytes: bytesOf(mapping.rss_bytes), mapped: bytesOf(mapping.mapped_bytes) }))];
    }
    return ofTypes;
  }
}

const address = (n) => "0x" + bytesOf(n).toString(16);

// What is said of a cell: its name, and what is known of it.
function describe(census, cell) {
  const lines = [cell.name];
  const share = (n) => percent(n, census.rss);
  const { type } = cell;
  if (type) {
    const within = interval(type.bytes, byteCount);
    const all = `${byteCount(type.bytes.value)}${within && ` (99 %: ${within})`}`;
    const counted = interval(type.count, count);
    lines.push(`${plural(type.count.value, type.isObject ? "object" : "block")}${counted && ` (99 %: ${counted})`}`);
    const isElsewhere = Math.abs(cell.bytes - type.bytes.value) >= 1;
    // Of what was never touched, less is resident.
    if (cell.bytes - cell.area >= 1) lines.push(`${byteCount(cell.area)} resident here, ${share(cell.area)} of all, of ${isElsewhere ? byteCount(cell.bytes) : all}`);
    else lines.push(`${isElsewhere ? byteCount(cell.bytes) + " here" : all}, ${share(cell.area)} of the resident memory`);
    if (isElsewhere) lines.push(`${all} in all parts`);
  } else {
    lines.push(`${byteCount(cell.area)}, ${share(cell.area)} of the resident memory`);
  }
  if (cell.returnable) lines.push(`${byteCount(cell.returnable)} can be given back by malloc_trim`);
  if (cell.mapped) lines.push(`${byteCount(cell.mapped)} mapped`);
  lines.push(PARTS[cell.part]);
  return lines;
}

class Page {
  constructor(census) {
    this.census = census;
    this.open = null; // the part that fills the map
    this.filter = "";
    this.header();
    theme.changed = () => {};
    $("search").addEventListener("input", () => {
      this.filter = $("search").value.toLowerCase();
      this.draw();
      this.tables();
    });
    $("theme").addEventListener("click", () => theme.toggle());
    $("help-button").addEventListener("click", () => $("help").showModal());
    for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
    $("help").addEventListener("click", (event) => event.target === $("help") && $("help").close());
    document.addEventListener("keydown", (event) => this.key(event));
    $("map").addEventListener("pointerleave", () => tooltip.hide());
    new ResizeObserver(() => this.draw()).observe($("map"));
    this.show(null);
  }

  header() {
    const { json, rss } = this.census;
    const command = String(json.command ?? "") || `process ${json.pid}`;
    const title = shorten(shortCommand(command), 400);
    $("title").replaceChildren(pathText(title, title.length - Math.min(16, title.length >> 1), command));
    document.title = `${shorten(command, 80)} · memory · nativeprof`;
    const { pools } = json;
    const facts = [
      [byteCount(rss), "resident"],
      bytesOf(json.swap_bytes) && [byteCount(json.swap_bytes), "swapped out"],
      bytesOf(json.hugetlb_bytes) && [byteCount(json.hugetlb_bytes), "in huge pages beside it"],
      [`process ${json.pid}`, ""],
      json.python && [shorten(String(json.python).replace(/ \(.*/, ""), 24), ""],
      pools && !pools.is_full && [`${count(bytesOf(pools.read))} of ${count(bytesOf(pools.all))}`, "pools read"],
      json.time_ms > 0 && [new Date(json.time_ms).toISOString().replace("T", " ").slice(0, 19) + " UTC", ""],
    ].filter(Boolean);
    $("facts").replaceChildren(...facts.map(([value, word]) => el("span", null, el("b", { text: value }), word ? " " + word : "")));
  }

  show(part) {
    const hadFocus = $("map").contains(document.activeElement);
    this.open = part;
    this.at = 0;
    this.path();
    this.draw(hadFocus);
    this.tables();
    $("tables").scrollTop = 0;
  }

  path() {
    const { open, census } = this;
    const all = open ? el("button", { class: "bare", text: "Resident memory", onclick: () => this.show(null) }) : el("span", { class: "here", text: "Resident memory" });
    const bytes = open ? open.bytes : census.rss;
    $("path").replaceChildren(all, ...(open ? [el("span", { class: "dim", "aria-hidden": true, text: "›" }), el("span", { class: "here", text: open.title })] : []), el("span", { class: "amount", text: open ? `${byteCount(bytes)} · ${percent(bytes, census.rss)}` : byteCount(bytes) }));
  }

  // The boxes of the map: parts, and cells within them.
  boxes(width, height) {
    const { open, census } = this;
    const boxes = [];
    const cellsOf = (part, area, most) => {
      // A pixel of distance, so that neighbors can be told apart.
      let cells = part.cells;
      const least = (MIN_AREA * part.bytes) / Math.max(1, area.w * area.h);
      const shown = cells.slice(0, most).filter((cell) => cell.area >= least);
      if (shown.length < cells.length) {
        const others = cells.slice(shown.length);
        const sum = others.reduce((sum, cell) => sum + cell.area, 0);
        cells = [...shown, { name: `${count(others.length)} others`, bytes: sum, area: sum, part: part.name, isRest: true }];
        cells.sort((a, b) => b.area - a.area);
      }
      squarify(cells.map((cell) => cell.area), area).forEach((rectangle, at) => boxes.push({ ...rectangle, cell: cells[at], part }));
    };
    const whole = { x: 0, y: 0, w: width, h: height };
    if (open) {
      if (open.cells.length) cellsOf(open, whole, MAX_BOXES);
      else boxes.push({ ...whole, part: open });
      return boxes;
    }
    const { parts } = census;
    squarify(parts.map((part) => part.bytes), whole).forEach((rectangle, at) => {
      const part = parts[at];
      const { x, y, w, h } = rectangle;
      const inner = { x: x + 2, y: y + HEADER, w: w - 4, h: h - HEADER - 2 };
      const isAround = part.cells.length > 0 && inner.w > 30 && inner.h > 16;
      boxes.push({ ...rectangle, part, isAround });
      if (isAround) cellsOf(part, inner, MAX_SMALL_BOXES);
    });
    return boxes;
  }

  draw(focus = $("map").contains(document.activeElement)) {
    const map = $("map");
    const { clientWidth: width, clientHeight: height } = map;
    if (!width || !height) return;
    const { census, filter } = this;
    this.rectangles = this.boxes(width, height).filter(({ w, h }) => w > 1 && h > 1);
    this.at = Math.min(this.at ?? 0, this.rectangles.length - 1);
    const elements = this.rectangles.map((box, at) => {
      const { cell, part } = box;
      const lines = cell ? describe(census, cell) : [part.title, `${byteCount(part.bytes)}, ${percent(part.bytes, census.rss)} of the resident memory`];
      const isFound = filter && cell && cell.name.toLowerCase().includes(filter);
      const shown = (text, numbers) => el("span", { class: numbers ? "numbers" : null, "aria-hidden": true, text });
      const element = el(
        "button",
        { class: `box fill-${part.name}${cell ? "" : " part"}${!cell && box.isAround ? " around" : ""}${isFound ? " found" : ""}`, tabindex: at === this.at ? "0" : "-1" },
        el("span", { class: "unseen", text: lines.join(", ") }),
        box.w > 26 && box.h > 15 ? shown(cell ? cell.name : part.title + (box.w > 90 ? ` · ${byteCount(part.bytes)}` : "")) : null,
        cell && box.w > 50 && box.h > 32 ? shown(byteCount(cell.area), true) : null,
        cell?.type && box.w > 60 && box.h > 48 ? shown(plural(cell.type.count.value, cell.type.isObject ? "object" : "block"), true) : null,
        cell?.type && !isExact(cell.type.bytes) && box.w > 130 && box.h > 64 ? shown(`${cell.bytes < cell.type.bytes.value ? "in all parts " : ""}${interval(cell.type.bytes, byteCount)}`, true) : null,
      );
      // A line between neighbors.
      element.style.left = `${box.x}px`;
      element.style.top = `${box.y}px`;
      element.style.width = `${Math.max(1, box.w - 1)}px`;
      element.style.height = `${Math.max(1, box.h - 1)}px`;
      if (cell && !cell.isRest) element.style.setProperty("--reach", tint(cell.name));
      element.addEventListener("pointermove", (event) => tooltip.show(lines, event.clientX, event.clientY));
      element.addEventListener("focus", () => this.move(at, false));
      element.addEventListener("click", () => this.enter(at));
      return element;
    });
    map.replaceChildren(...elements);
    if (focus) elements[this.at]?.focus({ preventScroll: true });
  }

  move(at, focus = true) {
    const boxes = $("map").children;
    boxes[this.at]?.setAttribute("tabindex", "-1");
    this.at = at;
    boxes[at]?.setAttribute("tabindex", "0");
    if (focus) boxes[at]?.focus({ preventScroll: true });
  }

  // Opens the part of a box.
  enter(at) {
    const { part } = this.rectangles[at];
    tooltip.hide();
    if (this.open || !part.cells.length) return;
    this.show(part);
    announce(`${part.title}, ${byteCount(part.bytes)}`);
  }

  back() {
    if (!this.open) return;
    this.show(null);
    announce("Resident memory");
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target === $("search")) {
      if (event.key !== "Escape") return;
      $("search").value = "";
      $("search").dispatchEvent(new Event("input"));
      $("search").blur();
      return;
    }
    if (event.key.startsWith("Arrow")) {
      if (!$("map").contains(event.target)) return;
      const next = neighbor(this.rectangles, this.at, event.key);
      if (next >= 0) this.move(next);
    } else if (event.key === "Escape" || event.key === "Backspace") this.back();
    else if (event.key === "/") $("search").focus();
    else if (event.key === "t") theme.toggle();
    else if (event.key === "?") $("help").showModal();
    else return;
    event.preventDefault();
  }

  tables() {
    const { census, open } = this;
    const { json } = census;
    const tables = open ? [this.partTable(open)] : [this.partsTable(), this.typesTable(), this.arenasTable(), this.sampleTable(json.sample)];
    const notes = Array.isArray(json.notes) ? json.notes.map(String) : [];
    const said = notes.length && !open ? [el("h2", { text: "Notes" }), el("ul", { class: "notes" }, ...notes.map((note) => el("li", { text: note })))] : [];
    $("tables").replaceChildren(...tables.flat().filter(Boolean), ...said);
  }

  // A table of rows, [name, ...texts], with those that the filter lets through.
  table(title, heads, rows, onopen) {
    const fitting = rows.filter(([name]) => name.toLowerCase().includes(this.filter));
    if (!rows.length) return [];
    const body = el("tbody", null);
    for (const [name, ...cells] of fitting.slice(0, MAX_ROWS)) {
      const action = onopen?.(name);
      const text = el("bdi", { text: shorten(name, 300) || "[unnamed]" });
      body.append(el("tr", null, el("th", { scope: "row" }, action ? el("button", { class: "bare", onclick: action }, text) : text), ...cells.map((text, at) => el("td", { text, class: heads[at + 1] === "99 % interval" ? "interval" : null }))));
    }
    const left = fitting.length - MAX_ROWS;
    return [
      el("h2", { text: title }),
      el("table", null, el("thead", null, el("tr", null, ...heads.map((text) => el("th", { scope: "col", text, class: text === "99 % interval" ? "interval" : null })))), body),
      !fitting.length ? el("p", { class: "hint", text: `None has "${shorten(this.filter, 100)}" in its name.` }) : null,
      left > 0 ? el("p", { class: "hint", text: `${count(left)} more are not listed: filter them by name.` }) : null,
    ];
  }

  partsTable() {
    const { census } = this;
    const { parts, rss } = census;
    const rows = parts.map(({ title, bytes }) => [title, byteCount(bytes), percent(bytes, rss)]);
    return this.table("Parts", ["Part", "Bytes", "Share"], rows, (title) => {
      const part = parts.find((part) => part.title === title);
      return part.cells.length ? () => this.show(part) : null;
    });
  }

  typesTable() {
    const rows = this.census.types.map(({ name, count: n, bytes }) => [name, count(n.value), byteCount(bytes.value), interval(bytes, byteCount)]);
    return this.table("Types, with what their objects own", ["Type", "Count", "Bytes", "99 % interval"], rows);
  }

  partTable(part) {
    const { rss } = this.census;
    const hasTypes = part.cells.some((cell) => cell.type);
    const rows = part.cells.map((cell) => {
      const { type } = cell;
      const more = hasTypes ? [type ? count(type.count.value) : "", type ? interval(type.bytes, byteCount) : ""] : [];
      const [n, within] = more;
      return [cell.name, ...(hasTypes ? [n] : []), byteCount(cell.bytes), percent(cell.area, rss), ...(hasTypes ? [within] : [])];
    });
    const heads = hasTypes ? ["Type", "Count", "Bytes here", "Share", "99 % interval"] : ["What", "Bytes", "Share"];
    const hints = [];
    if (hasTypes) hints.push("Counts and intervals are those of the type in all parts together.");
    if (part.isReduced) hints.push("The sum of the rows is more than is resident here: amounts are estimates, and some of what was allocated may never have been touched. Areas are reduced in proportion.");
    return [...this.table(part.title, heads, rows), ...hints.map((text) => el("p", { class: "hint", text }))];
  }

  arenasTable() {
    const arenas = list(this.census.json.glibc?.arenas).slice(0, MAX_ROWS);
    const rows = arenas.map((arena) => [arena.is_main ? "main" : address(arena.address), ...[arena.in_use, arena.free_resident, arena.returnable].map((n) => byteCount(bytesOf(n)))]);
    return this.table("Arenas of the C heap", ["Arena", "In use", "Free, resident", "For malloc_trim"], rows);
  }

  sampleTable(sample) {
    const rows = list(sample?.objects).map(({ address: at, value }) => [String(value), address(at)]);
    return rows.length ? this.table(`${count(rows.length)} of ${count(bytesOf(sample.met))} objects that were read`, ["Value", "Address"], rows) : [];
  }
}

// How far the color of a cell is from that of its part, by its name, so that neighbors differ.
function tint(name) {
  let hash = 0x811c9dc5;
  for (let i = 0; i < name.length && i < 100; i++) hash = Math.imul(hash ^ name.charCodeAt(i), 0x01000193);
  return `${14 + ((hash >>> 16) & 3) * 8}%`;
}

theme.load();
(async () => {
  const start = performance.now();
  try {
    const holder = $("profile");
    const bytes = await unpack(holder.textContent);
    const census = new Census(cleanAll(JSON.parse(new TextDecoder().decode(bytes))));
    holder.remove();
    const page = new Page(census);
    $("loading").remove();
    // For use in the browser's console.
    globalThis.nativeprof = { census, page };
    requestAnimationFrame(() => setTimeout(() => (document.documentElement.dataset.ready = Math.round(performance.now() - start))));
  } catch (e) {
    $("loading").textContent = `This census could not be shown: ${e.message}\nRequires a 2024 or newer browser. If yours is newer, the file is damaged: export it again.`;
    throw e;
  }
})();
