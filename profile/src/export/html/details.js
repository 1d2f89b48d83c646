// Details of one function with its source lines, and of the recording.

class Details {
  constructor(model, actions) {
    Object.assign(this, { model, actions });
    this.element = $("details");
  }

  refresh() {
    const { element } = this;
    const hadFocus = element.contains(document.activeElement);
    if (this.model.selected > 0) this.ofFunction(this.model.selected);
    else this.overview();
    // What had it, such as a link to this function, is gone.
    if (hadFocus) element.focus({ preventScroll: true });
  }

  ofFunction(fn) {
    const { model, element } = this;
    const { functions: f, files, modules } = model.profile;
    const kind = model.kind(fn);
    const facts = [
      ...(model.comparison
        ? changeFacts(model, fn)
        : [
            ["Total", `${percent(model.totals.all[fn], model.total)} · ${model.amount(model.totals.all[fn])}`],
            ["Self", `${percent(model.totals.self[fn], model.total)} · ${model.amount(model.totals.self[fn])}`],
          ]),
      ["Kind", KIND_NAMES[kind]],
      ["Module", modules[f.module[fn]]],
      [kind === "python" ? "File" : "Source", model.source(fn)],
    ].filter(([, text]) => text);
    const list = el("dl", null);
    for (const [key, text] of facts) list.append(el("dt", { text: key }), el("dd", null, key === "File" || key === "Source" ? this.file(fn, text) : el("bdi", { text })));
    const name = f.name[fn];
    const button = (text, title, action) => el("button", { text, title, onclick: action });
    const actions = model.isGroup(fn)
      ? null
      : el(
          "div",
          { class: "actions" },
          button("Callers and callees", "Show callers and callees (s)", () => this.actions.sandwich(fn)),
          button("Only stacks containing it", "Show only stacks with this function", () => this.actions.only(fn)),
          button("Hide", "Hide the function; its samples go to its callers (h)", () => this.actions.hide(fn)),
          button("Copy name", "Copy the function's name", () => this.actions.copy(name)),
        );
    element.replaceChildren(
      this.crumb(),
      el("h2", null, el("i", { class: "dot " + kind }), el("bdi", { text: shorten(name, 1200) })),
      list,
      ...(actions ? [actions] : []),
      model.profile.waits && kind !== "state" ? (timeByState(model, fn) ?? "") : "",
      ...this.neighbors(fn),
      this.source(fn, files[f.file[fn]]),
      ...(model.profile.assembly.has(fn) ? [assemblyOf(model, fn)] : []),
    );
    element.scrollTop = 0;
  }

  // The place of a function in its file, as a link to the lines of the file if there are any.
  file(fn, text) {
    const { files, functions: f } = this.model.profile;
    const place = el("bdi", { text });
    if (!files[f.file[fn]].startsWith("/")) return place;
    return el("button", { class: "bare link", title: "Show the file with the samples of each line", onclick: () => this.actions.source(fn) }, place);
  }

  // While no function is selected: time by whose code it is, and the top functions.
  overview() {
    const { model, element } = this;
    if (model.comparison) {
      changeOverview(this);
      return;
    }
    const { functions: f, categories } = model.profile;
    const sums = new Float64Array(categories.length);
    const hot = [];
    for (let i = 1; i < f.count; i++) {
      sums[f.category[i]] += model.totals.self[i];
      if (model.totals.self[i] > 0 && !model.isGroup(i)) hot.push(i);
    }
    hot.sort((a, b) => model.totals.self[b] - model.totals.self[a]);
    const bar = el("div", { class: "quality-bar", role: "img", "aria-label": "Share of your code, libraries and the interpreter" });
    const list = el("dl", { class: "by-kind" });
    const order = [...categories.keys()].filter((k) => categories[k] && sums[k] > 0).sort((a, b) => sums[b] - sums[a]);
    for (const k of order) {
      const dot = "dot " + categoryClass(categories[k]);
      const piece = el("span", { class: dot });
      piece.style.flexGrow = String(sums[k] / model.total);
      bar.append(piece);
      const isOn = !model.hiddenCategories.has(k);
      const toggle = () => {
        const hiddenCategories = new Set(model.hiddenCategories);
        if (!hiddenCategories.delete(k)) hiddenCategories.add(k);
        model.set({ hiddenCategories });
      };
      list.append(
        el(
          "dt",
          null,
          el("button", { class: "bare link category", title: "Fold this code into what calls it", "aria-pressed": String(isOn), onclick: toggle }, el("i", { class: dot }), categories[k]),
        ),
        el("dd", { class: "num", text: percent(sums[k], model.total) }),
      );
    }
    const own = this.ownFunctions();
    element.replaceChildren(
      ...(own ?? []),
      el("h2", { text: this.kindsTitle() }),
      bar,
      list,
      el("h3", { text: "Top functions (self)" }),
      this.links(hot.slice(0, 12).map((i) => [i, model.totals.self[i]]), model.total),
      el("p", { class: "hint", text: "Select a function to see its lines, callers and callees." }),
    );
  }

  kindsTitle() {
    return `${this.model.value.unit === "bytes" ? "Memory" : "Time"} by kind of code`;
  }

  // The list that the page begins with, and its titles.
  ownFunctions() {
    const { model } = this;
    const { functions: f, files } = model.profile;
    const own = model.ownFunctions();
    if (!own.length) return null;
    const title = model.ownTitle();
    const what = title === YOURS ? "the libraries and C code that it runs" : "the C code that it runs";
    const place = ({ fn, line }) => baseName(files[f.file[fn]]) + (line ? ":" + line : "");
    const links = this.links(own.map((row) => [row.fn, row.samples, place(row)]), model.total);
    return [el("h2", { text: title }), links, el("p", { class: "hint", text: `Each with ${what}, at its line with most samples.` })];
  }

  // Leads back from a function to what is shown while none is selected.
  crumb() {
    const { model } = this;
    const back = model.comparison ? "What changed" : model.ownFunctions().length ? model.ownTitle() : this.kindsTitle();
    return el("nav", { class: "crumb", "aria-label": "Back" }, el("button", { class: "bare", title: `Back to "${back}" (y)`, text: `‹ ${back}`, onclick: () => this.actions.overview() }));
  }

  // Functions with their parts of `all`, or with texts; some with a place.
  links(rows, all) {
    const items = rows.map(([fn, n, place]) =>
      el(
        "li",
        null,
        el("button", { class: "bare link", onclick: () => this.actions.select(fn) }, functionName(this.model, fn), place ? el("span", { class: "dim place", text: place }) : null),
        el("span", { class: "num", text: all === undefined ? n : percent(n, all) }),
      ),
    );
    return el("ul", { class: "neighbors" }, ...items);
  }

  // The largest callers and callees.
  neighbors(fn) {
    const { model } = this;
    if (model.isGroup(fn)) return [];
    const { callers, callees } = model.sandwich(fn);
    const part = (title, view) => {
      const rows = [];
      for (let i = 2; i < view.n && rows.length < 5; i = view.end[i]) rows.push([view.fn[i], view.all[i]]);
      return rows.length ? el("section", null, el("h3", { text: title }), this.links(rows, view.all[1])) : null;
    };
    return [part("Called by", callers), this.pythonCallers(fn), part("Calls", callees)].filter(Boolean);
  }

  // The Python functions nearest to a native one on its stacks, where others lie between.
  pythonCallers(fn) {
    const { model } = this;
    const { view } = model;
    if (model.kind(fn) === "python") return null;
    const sums = new Map();
    let isDirect = true;
    let all = 0;
    walkOutermost(view, model.profile.functions.count, (i, outermost) => {
      if (!outermost || view.fn[i] !== fn) return;
      all += view.all[i];
      let up = view.parent[i];
      while (up > 0 && model.kind(view.fn[up]) !== "python") up = view.parent[up];
      if (up === 0) return;
      isDirect &&= up === view.parent[i];
      sums.set(view.fn[up], (sums.get(view.fn[up]) ?? 0) + view.all[i]);
    });
    if (isDirect || !sums.size) return null;
    const rows = [...sums].sort((a, b) => b[1] - a[1]).slice(0, 5);
    return el("section", null, el("h3", { text: "From Python" }), this.links(rows, all));
  }

  source(fn, file) {
    const counts = this.model.lines(fn);
    if (counts.size === 0) return el("span", null);
    let most = 0;
    let sum = 0;
    for (const [all] of counts.values()) {
      most = Math.max(most, all);
      sum += all;
    }
    const quoted = this.model.profile.excerpts.get(file);
    const excerpt = quoted?.isEmpty ? null : quoted?.lines;
    const start = this.model.profile.functions.line[fn];
    const wanted = [...counts.keys()].sort((a, b) => a - b);
    const near = (line) => wanted.some((w) => line >= w - 6 && line <= w + 3);
    const lines = excerpt ? excerpt.filter(([line]) => near(line) && line >= Math.min(start || 0, wanted[0])) : wanted.map((line) => [line, ""]);
    const indents = lines.filter(([, text]) => text.trim()).map(([, text]) => text.length - text.trimStart().length);
    const indent = Math.min(...indents, 200);
    const table = el("div", { class: "source", role: "table", "aria-label": "Source lines with samples" });
    let before = 0;
    for (const [line, text] of lines.slice(0, 400)) {
      if (excerpt && before && line > before + 1) table.append(el("div", { class: "gap", "aria-hidden": true, text: "⋯" }));
      before = line;
      const [n, self] = counts.get(line) ?? [0, 0];
      const row = el(
        "div",
        { class: "code" + (n ? " hit" : ""), role: "row" },
        el("span", { class: "heat num", role: "cell", text: counts.has(line) ? percent(n, sum) : "" }),
        el("span", { class: "num dim", role: "cell", text: String(line) }),
        el("code", { role: "cell", text: text.slice(indent) }),
      );
      if (n) row.style.setProperty("--heat", String(Math.max(0.08, n / most)));
      if ((n || self) && !this.model.comparison) row.title = `${plural(n, "sample")} on the stack, ${count(self)} ended here`;
      table.append(row);
    }
    const { comparison } = this.model;
    const note = comparison ? ` of ${shorten(comparison.after, 60)} (newer)` : this.model.range || this.model.threads ? " (whole recording)" : "";
    return el("section", null, el("h3", { text: (excerpt ? "Source" : "Lines") + note }), table);
  }
}

// Metadata and quality of the recording.
function qualityDialog(model, about) {
  const { meta, timeline } = model.profile;
  const q = meta.quality;
  const all = q.exact + q.repaired + q.partial + q.lost;
  const bar = el("div", { class: "quality-bar", role: "img", "aria-label": "Shares of exact, repaired, partial and lost samples" });
  const rows = [];
  const meanings = {
    exact: "complete, from unwind tables and interpreter anchors",
    repaired: "complete, with code analysis where unwind tables are missing",
    partial: "incomplete; a node [truncated: …] marks where frames are missing",
    lost: "expected, but not taken",
  };
  for (const key of ["exact", "repaired", "partial", "lost"]) {
    const piece = el("span", { class: key, title: `${key} ${percent(q[key], all)}` });
    piece.style.flexGrow = String(q[key] / Math.max(1, all));
    if (q[key]) bar.append(piece);
    rows.push([el("span", null, el("i", { class: "dot " + key }), key), count(q[key]), percent(q[key], all), meanings[key]]);
    if (key !== "partial") continue;
    for (const [reason, n] of Object.entries(q.reasons)) rows.push([el("span", { class: "reason", text: reason }), count(n), percent(n, all), ""]);
  }
  const quality = el("table", { class: "shares" }, el("thead", null, el("tr", null, ...["Stacks", "Samples", "Share", "Meaning"].map((t) => el("th", { text: t, scope: "col" })))));
  const body = el("tbody", null);
  for (const [first, ...rest] of rows) body.append(el("tr", null, el("th", { scope: "row" }, first), ...rest.map((t) => el("td", { text: t }))));
  quality.append(body);

  const reached = meta.rate && q.expected ? (meta.rate * q.taken) / q.expected : 0;
  const facts = [
    ["Command", meta.command],
    ["Process", meta.pid ? String(meta.pid) : ""],
    ["Python", meta.python],
    ["Started", meta.start > 0 ? new Date(meta.start * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : ""],
    ["Duration", meta.duration > 0 ? duration(meta.duration * 1e6) : ""],
    ["Samples", q.expected ? `${count(q.taken)} of ${count(q.expected)} expected` : count(q.taken)],
    ["Rate", meta.rate ? `${count(meta.rate)} Hz requested${reached ? `, ${reached.toFixed(1)} Hz reached` : ""}` : ""],
    ["Event", [meta.event, meta.backend].filter(Boolean).join(", by ")],
    ["Stops", meta.stopped ? `${count(meta.stopped.median_us)} µs per sample (median), ${count(meta.stopped.max_us)} µs at most` : ""],
    ["Overhead", meta.profiler_cpu > 0 ? `${duration(meta.profiler_cpu * 1e6)} CPU${q.taken ? `, ${duration((meta.profiler_cpu * 1e6) / q.taken)} per sample` : ""}` : ""],
    ["Timeline", timeline.n ? plural(timeline.n, "sample") : "none"],
    ["Version", meta.version],
  ].filter(([, text]) => text);
  const list = el("dl", null);
  for (const [key, text] of facts) list.append(el("dt", { text: key }), el("dd", null, el("bdi", { text: shorten(text, 2000) })));

  const names = el("table", { class: "names" }, el("thead", null, el("tr", null, ...["File", "Samples", "Symbols from"].map((t) => el("th", { text: t, scope: "col" })))));
  const files = el("tbody", null);
  for (const m of meta.modules.slice(0, 300)) {
    const from = [m.symbols_from, m.symbols_missing && `missing: ${m.symbols_missing}`].filter(Boolean).join("; ");
    files.append(el("tr", null, el("th", { scope: "row", title: m.build_id && `build ID ${m.build_id}` }, el("bdi", { text: m.path })), el("td", { text: count(m.samples) }), el("td", null, el("bdi", { text: from }))));
  }
  names.append(files);
  about.replaceChildren(
    el("h3", { text: "Stack quality" }),
    all ? bar : el("p", { class: "hint", text: "Not recorded." }),
    ...(all ? [el("div", { class: "wide" }, quality)] : []),
    el("h3", { text: "Recording" }),
    list,
    ...(meta.modules.length ? [el("h3", { text: "Symbols" }), el("div", { class: "wide" }, names)] : []),
  );
}
