// Source files with the samples of each line, over all functions in them.

// Marks on the map of a file, at most.
const MARKS = 400;
// Files to choose from without the list, at most.
const MAX_CHOICES = 500;

// Samples of each line of a file in the complete recording: line -> { all, self, fn }, where fn is the function that has
// most of them.
function linesOfFile(model, file) {
  const { tree, lineStart, lines, lineSamples, functions: f } = model.profile;
  const isIn = (fn) => f.file[fn] === file;
  const rows = [...model.lineTotals((fn) => (isIn(fn) ? 0 : -1))].map(([line, [all, self]]) => [line, { all, self, fn: 0, most: -1 }]);
  const counts = new Map(rows);
  for (let i = 1; i < tree.n; i++) {
    if (!isIn(tree.fn[i])) continue;
    for (let k = lineStart[i]; k < lineStart[i + 1]; k++) {
      const row = counts.get(lines[k]);
      if (lineSamples[k] > row.most) [row.most, row.fn] = [lineSamples[k], tree.fn[i]];
    }
  }
  return counts;
}

class SourcePanel {
  constructor(model, options) {
    this.model = model;
    this.file = 0;
    this.why = "";
    this.followed = 0; // the selected function when a file was opened
    this.list = new Rows({
      id: "file-row",
      label: "Source files",
      role: "grid",
      columns: [
        { key: "total", title: "Total", num: true, cell: (file) => share(this.totals.all[file], model.total) },
        { key: "function", title: "File", cell: (file) => this.name(file) },
      ],
      onpick: (file) => this.open(file),
      why: () => "No file: no function that is shown has one.",
    });
    this.code = new Rows({
      id: "line-row",
      label: "Source lines with samples",
      role: "grid",
      columns: [
        { key: "total", title: "Total", help: "Samples with this line on the stack, each once, C code that it runs included; at least that many where functions call each other from several lines of it", num: true, cell: (row) => (row.all ? share(row.all, this.whole) : "") },
        { key: "self", title: "Self", help: "Samples that ended in this line itself", num: true, cell: (row) => (row.self ? share(row.self, this.whole) : "") },
        { key: "line", title: "Line", num: true, cell: (row) => (row.line ? el("span", { class: "dim", text: String(row.line) }) : "") },
        { key: "quoted", title: "Code", cell: (row) => this.text(row) },
      ],
      onpick: (row) => {
        if (row.fn <= 0) return;
        this.followed = row.fn;
        options.onpick(row.fn);
      },
      onopen: (row) => row.fn > 0 && options.onopen(row.fn),
      why: () => (this.file ? "No line of this file has samples." : "No file is shown."),
    });
    this.title = el("div", { class: "middle" });
    // Instead of the list, where that has no room.
    this.choice = el("select", { class: "file-choice", "aria-label": "Source file" });
    this.choice.addEventListener("change", () => this.open(Number(this.choice.value)));
    // The file from its first line to its last one, in the height of the panel.
    this.map = el("div", { class: "heat-map", "aria-hidden": true, title: "The whole file: click to go there" });
    this.map.addEventListener("click", (event) => {
      const box = this.map.getBoundingClientRect();
      this.scrollTo(((event.clientY - box.top) / box.height) * this.code.rows.length);
    });
    const code = el("div", { class: "source-lines" }, this.code.element, this.map);
    this.element = [el("div", { class: "sandwich-list" }, this.list.element), el("div", { class: "source-code" }, this.title, code)];
  }

  // The end of the path of a file, with the color of whose code it is.
  name(file) {
    const { files, categories } = this.model.profile;
    const category = categories[this.category.get(file) ?? 0];
    const short = shortPath(files[file]);
    return el("span", { class: "function" }, el("i", { class: "dot " + categoryClass(category), title: category || null }), pathText(short, short.lastIndexOf("/"), files[file]));
  }

  // Brings a row into the middle.
  scrollTo(row) {
    const { scroller } = this.code;
    scroller.scrollTop = Math.max(0, row * ROW_HEIGHT - scroller.clientHeight / 2);
    this.code.draw();
  }

  drawMap(rows) {
    const hot = [...rows.keys()].filter((at) => rows[at].all > 0).sort((a, b) => rows[b].all - rows[a].all);
    const marks = hot.slice(0, MARKS).map((at) => {
      const mark = el("i", null);
      mark.style.top = (100 * at) / rows.length + "%";
      mark.style.height = `max(2px, ${100 / rows.length}%)`;
      mark.style.setProperty("--heat", String(Math.max(0.15, rows[at].all / this.most)));
      return mark;
    });
    this.map.replaceChildren(...marks);
  }

  text(row) {
    const code = el("code", { class: row.line ? "" : "dim", text: row.text });
    if (row.all || row.self) {
      code.className = "hit";
      code.style.setProperty("--heat", String(Math.max(0.08, row.all / this.most)));
    }
    return code;
  }

  // Files with samples that are shown, the user's own and those with text first, and the lines of the open one.
  refresh() {
    const { model } = this;
    const { functions: f, files } = model.profile;
    this.totals = functionTotals({ ...model.view, fn: model.view.fn.map((fn) => f.file[fn]) }, files.length);
    const { all } = this.totals;
    const yours = model.profile.categories.indexOf("your code");
    this.category = new Map();
    for (let fn = f.count - 1; fn > 0; fn--) if (model.totals.all[fn] > 0) this.category.set(f.file[fn], f.category[fn]);
    const isOwn = (file) => Number(yours > 0 && this.category.get(file) === yours);
    const isQuoted = (file) => Number(model.profile.excerpts.get(files[file])?.isEmpty === false);
    const shown = [...files.keys()].filter((file) => files[file].startsWith("/") && all[file] > 0).sort((a, b) => isOwn(b) - isOwn(a) || isQuoted(b) - isQuoted(a) || all[b] - all[a]);
    this.list.show(shown, true);
    const options = shown.slice(0, MAX_CHOICES).map((file) => el("option", { value: file, text: `${shortPath(files[file])} · ${percent(all[file], model.total)}` }));
    this.choice.replaceChildren(...options);
    if (this.followed !== model.selected || !shown.includes(this.file)) this.follow();
    else this.draw();
  }

  // Opens the file of the selected function; while none is selected, of the user's function with most samples.
  follow() {
    const { model, list } = this;
    const { selected, profile } = model;
    this.followed = selected;
    const isListed = new Uint8Array(profile.files.length);
    for (const file of list.rows) isListed[file] = 1;
    const { category } = profile.functions;
    const hasFile = (fn) => isListed[profile.functions.file[fn]] === 1;
    if (selected > 0 && !model.isGroup(selected)) {
      const isOwn = (fn) => hasFile(fn) && profile.categories[category[fn]] === "your code";
      const caller = (isWanted) => nearestCaller(model.view, profile.functions.count, selected, isWanted);
      const fn = hasFile(selected) ? selected : caller(isOwn) || caller(hasFile);
      if (fn) {
        const name = shorten(profile.functions.name[selected], 60);
        this.open(profile.functions.file[fn], fn, fn === selected ? "" : `${name} has no source file: here is what calls it most.`);
        return;
      }
    }
    const own = model.ownFunctions().find(({ fn }) => hasFile(fn));
    if (own) {
      this.open(profile.functions.file[own.fn], own.fn);
      return;
    }
    this.open(list.rows[0] ?? 0);
  }

  // Shows a file at the line with most samples: of the function, if one is given. `why`: said of it.
  open(file, fn = 0, why = "") {
    this.file = file;
    this.why = why;
    this.draw();
    const { rows } = this.code;
    const own = fn ? this.model.lines(fn) : null;
    const amount = (row) => (own ? (own.get(row.line)?.[0] ?? 0) : row.all);
    let hot = 0;
    for (let at = 1; at < rows.length; at++) if (amount(rows[at]) > amount(rows[hot])) hot = at;
    const first = fn ? rows.findIndex((row) => row.line === this.model.profile.functions.line[fn]) : 0;
    if (rows.length && amount(rows[hot]) === 0) hot = Math.max(0, first);
    this.code.at = rows.length ? hot : -1;
    this.scrollTo(hot);
  }

  // Draws the open file.
  draw() {
    const { model, file } = this;
    const { profile } = model;
    this.list.at = this.list.rows.indexOf(file);
    this.list.draw();
    this.choice.value = String(file);
    const counts = file ? linesOfFile(model, file) : new Map();
    this.whole = model.comparison ? WHOLE : profile.total;
    this.most = Math.max(1, ...[...counts.values()].map((row) => row.all));
    const quoted = profile.excerpts.get(profile.files[file]);
    const excerpt = quoted?.isEmpty ? null : quoted?.lines;
    const numbers = [...counts.keys()].filter((line) => line > 0).sort((a, b) => a - b);
    const rows = [];
    let before = 0;
    for (const [line, text] of excerpt ?? numbers.map((line) => [line, ""])) {
      if (excerpt && line > before + 1) rows.push(gap(before, line));
      before = line;
      rows.push({ line, text, ...(counts.get(line) ?? { all: 0, self: 0, fn: 0 }) });
    }
    if (excerpt && quoted.length > before) rows.push(gap(before, quoted.length + 1));
    this.code.show(rows, true);
    this.drawMap(rows);
    const notes = [this.why, file ? this.note(quoted) : "No source files."];
    if (model.range || model.threads || model.only.length) notes.push("Lines are those of the whole recording.");
    const note = notes.filter(Boolean).join(" ");
    this.title.replaceChildren(this.choice, el("div", { class: "name" }, pathText(profile.files[file])), ...(note ? [el("span", { class: "dim note", text: note })] : []));
  }

  // What the page does not have of a file.
  note(quoted) {
    const { profile, comparison } = this.model;
    const side = comparison ? `Lines and their amounts are those of ${comparison.after}, the newer profile.` : "";
    if (profile.noSource) return `This page was made without source text. ${side}`;
    if (!quoted) return `The text of this file was not available. ${side}`;
    if (quoted.isEmpty) return `There was no room for the text of this file in the page. ${side}`;
    return side;
  }
}

// A row for lines that the page does not have, between two others.
const gap = (before, next) => ({ line: 0, text: `⋯ ${plural(next - before - 1, "line")} left out`, all: 0, self: 0, fn: 0 });

// The end of a path.
const shortPath = (path) => path.split("/").slice(-2).join("/");

// Instructions of a native function around those with samples, in the complete recording.
function assemblyOf(model, fn) {
  const { rows, isChecked } = model.profile.assembly.get(fn);
  const sum = rows.reduce((sum, row) => sum + row.samples, 0);
  const most = rows.reduce((most, row) => Math.max(most, row.samples), 1);
  const table = el("div", { class: "source assembly", role: "table", "aria-label": "Instructions with samples" });
  let end = rows.length ? rows[0].address : 0;
  let place = "";
  for (const { address, length, text, samples, place: here } of rows) {
    if (address !== end) table.append(el("div", { class: "gap", "aria-hidden": true, text: "⋯" }));
    end = address + length;
    if (here && here !== place) {
      place = here;
      table.append(el("div", { class: "place dim", role: "row" }, el("bdi", { role: "cell", text: here })));
    }
    const row = el(
      "div",
      { class: "code" + (samples ? " hit" : ""), role: "row", title: samples ? plural(samples, "sample") : null },
      el("span", { class: "heat num", role: "cell", text: samples ? percent(samples, sum) : "" }),
      el("span", { class: "num dim", role: "cell", text: address.toString(16) }),
      el("code", { role: "cell", text }),
    );
    if (samples) row.style.setProperty("--heat", String(Math.max(0.08, samples / most)));
    table.append(row);
  }
  const hints = ["The processor may report an instruction after the one that took the time."];
  if (!isChecked) hints.unshift("Not checked: the file has no build ID to verify that it is the one that was recorded.");
  return el("section", null, el("h3", { text: "Assembly (whole recording)" }), table, ...hints.map((text) => el("p", { class: "hint", text })));
}
