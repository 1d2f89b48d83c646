// What is known of one function, with its source lines; and of the recording.

class Details {
  constructor(model, actions) {
    Object.assign(this, { model, actions });
    this.element = $("details");
  }

  refresh() {
    const { model, element } = this;
    const fn = model.selected;
    if (fn <= 0) {
      this.overview();
      return;
    }
    const { functions: f, files, modules } = model.profile;
    const kind = model.kind(fn);
    const facts = [
      ["Total", `${percent(model.totals.all[fn], model.total)} · ${model.amount(model.totals.all[fn])}`],
      ["Self", `${percent(model.totals.self[fn], model.total)} · ${model.amount(model.totals.self[fn])}`],
      ["Kind", KIND_NAMES[kind]],
      ["Module", modules[f.module[fn]]],
      [kind === "python" ? "File" : "Source", model.source(fn)],
    ].filter(([, text]) => text);
    const list = el("dl", null);
    for (const [key, text] of facts) list.append(el("dt", { text: key }), el("dd", null, el("bdi", { text })));
    const name = f.name[fn];
    const button = (text, title, action) => el("button", { text, title, onclick: action });
    const actions = model.isGroup(fn)
      ? null
      : el(
          "div",
          { class: "actions" },
          button("Callers and callees", "Open the sandwich view (s)", () => this.actions.sandwich(fn)),
          button("Only stacks with it", "Leave out stacks without this function", () => this.actions.only(fn)),
          button("Fold it away", "Give its samples to its callers (h)", () => this.actions.hide(fn)),
          button("Copy name", "Copy the name", () => this.actions.copy(name)),
        );
    element.replaceChildren(
      el("h2", null, el("i", { class: "dot " + kind }), el("bdi", { text: shorten(name, 1200) })),
      list,
      ...(actions ? [actions] : []),
      ...this.neighbours(fn),
      this.source(fn, files[f.file[fn]]),
    );
    element.scrollTop = 0;
  }

  // Before a function is chosen: where the time goes by kind, and the hottest functions.
  overview() {
    const { model, element } = this;
    const { functions: f, kinds } = model.profile;
    const byKind = new Float64Array(kinds.length);
    const hot = [];
    for (let i = 1; i < f.count; i++) {
      byKind[f.kind[i]] += model.totals.self[i];
      if (model.totals.self[i] > 0 && !model.isGroup(i)) hot.push(i);
    }
    hot.sort((a, b) => model.totals.self[b] - model.totals.self[a]);
    const bar = el("div", { class: "quality-bar", role: "img", "aria-label": "Shares of the kinds of code" });
    const list = el("dl", { class: "by-kind" });
    const order = [...kinds.keys()].filter((k) => byKind[k] > 0).sort((a, b) => byKind[b] - byKind[a]);
    for (const k of order) {
      const piece = el("span", { class: "dot " + kinds[k] });
      piece.style.flexGrow = String(byKind[k] / model.total);
      bar.append(piece);
      list.append(
        el("dt", null, el("i", { class: "dot " + kinds[k] }), KIND_NAMES[kinds[k]]),
        el("dd", { class: "num", text: percent(byKind[k], model.total) }),
      );
    }
    element.replaceChildren(
      el("h2", { text: "Where the time goes" }),
      bar,
      list,
      el("h3", { text: "Hottest functions, self" }),
      this.links(hot.slice(0, 12).map((i) => [i, model.totals.self[i]]), model.total),
      el("p", { class: "hint", text: "Choose a function to see its lines, callers and callees." }),
    );
  }

  links(rows, all) {
    const items = rows.map(([fn, n]) =>
      el(
        "li",
        null,
        el("button", { class: "bare link", onclick: () => this.actions.select(fn) }, functionName(this.model, fn)),
        el("span", { class: "num", text: percent(n, all) }),
      ),
    );
    return el("ul", { class: "neighbours" }, ...items);
  }

  // The largest callers and callees.
  neighbours(fn) {
    const { model } = this;
    if (model.isGroup(fn)) return [];
    const { callers, callees } = model.sandwich(fn);
    const part = (title, view) => {
      const rows = [];
      for (let i = 2; i < view.n && rows.length < 5; i = view.end[i]) rows.push([view.fn[i], view.all[i]]);
      return rows.length ? el("section", null, el("h3", { text: title }), this.links(rows, view.all[1])) : null;
    };
    return [part("Called by", callers), part("Calls", callees)].filter(Boolean);
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
    const excerpt = this.model.profile.excerpts.get(file);
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
      if (n || self) row.title = `${plural(n, "sample")} on the stack, ${count(self)} ended here`;
      table.append(row);
    }
    const note = this.model.range || this.model.threads ? " (whole recording)" : "";
    return el("section", null, el("h3", { text: (excerpt ? "Source" : "Lines") + note }), table);
  }
}

// The facts of the recording and how good it is.
function qualityDialog(model, about) {
  const { meta, ticks } = model.profile;
  const q = meta.quality;
  const all = q.exact + q.repaired + q.partial + q.lost;
  const bar = el("div", { class: "quality-bar", role: "img", "aria-label": "Shares of exact, repaired, partial and lost samples" });
  const rows = [];
  const meanings = {
    exact: "complete, from unwind tables and the interpreter's own marks",
    repaired: "complete; code without tables was analysed on the way",
    partial: "a node [cut: …] stands where something is missing",
    lost: "due, but not in the profile",
  };
  for (const key of ["exact", "repaired", "partial", "lost"]) {
    const piece = el("span", { class: key, title: `${key} ${percent(q[key], all)}` });
    piece.style.flexGrow = String(q[key] / Math.max(1, all));
    if (q[key]) bar.append(piece);
    rows.push([el("span", null, el("i", { class: "dot " + key }), key), count(q[key]), percent(q[key], all), meanings[key]]);
    if (key !== "partial") continue;
    for (const [reason, n] of Object.entries(q.reasons)) rows.push([el("span", { class: "reason", text: reason }), count(n), percent(n, all), ""]);
  }
  const quality = el("table", null, el("thead", null, el("tr", null, ...["Stacks", "Samples", "Share", ""].map((t) => el("th", { text: t, scope: "col" })))));
  const body = el("tbody", null);
  for (const [first, ...rest] of rows) body.append(el("tr", null, el("th", { scope: "row" }, first), ...rest.map((t) => el("td", { text: t }))));
  quality.append(body);

  const reached = meta.rate && q.asked ? (meta.rate * q.taken) / q.asked : 0;
  const facts = [
    ["Command", meta.command],
    ["Process", meta.pid ? String(meta.pid) : ""],
    ["Python", meta.python],
    ["Started", meta.start > 0 ? new Date(meta.start * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : ""],
    ["Duration", meta.duration > 0 ? duration(meta.duration * 1e6) : ""],
    ["Samples", `${count(q.taken)} of ${count(q.asked)} asked`],
    ["Rate", meta.rate ? `${count(meta.rate)} Hz asked${reached ? `, ${reached.toFixed(1)} Hz reached` : ""}` : ""],
    ["Event", [meta.event, meta.backend].filter(Boolean).join(", by ")],
    ["Held", meta.held ? `${count(meta.held.median_us)} µs a sample (median), ${count(meta.held.longest_us)} µs at most` : ""],
    ["Own CPU", meta.own_cpu > 0 ? `${duration(meta.own_cpu * 1e6)}${q.taken ? `, ${duration((meta.own_cpu * 1e6) / q.taken)} a sample` : ""}` : ""],
    ["Timeline", ticks.n ? plural(ticks.n, "sample") : "none in this profile"],
    ["Version", meta.version],
  ].filter(([, text]) => text);
  const list = el("dl", null);
  for (const [key, text] of facts) list.append(el("dt", { text: key }), el("dd", null, el("bdi", { text: shorten(text, 2000) })));

  const names = el("table", { class: "names" }, el("thead", null, el("tr", null, ...["File", "Samples", "Names from"].map((t) => el("th", { text: t, scope: "col" })))));
  const files = el("tbody", null);
  for (const m of meta.modules.slice(0, 300)) {
    const from = [m.names, m.missing && `missing: ${m.missing}`].filter(Boolean).join("; ");
    files.append(el("tr", null, el("th", { scope: "row", title: m.build_id && `build id ${m.build_id}` }, el("bdi", { text: m.path })), el("td", { text: count(m.samples) }), el("td", null, el("bdi", { text: from }))));
  }
  names.append(files);
  about.replaceChildren(
    el("h3", { text: "Quality of the stacks" }),
    all ? bar : el("p", { class: "hint", text: "This profile does not say." }),
    ...(all ? [el("div", { class: "wide" }, quality)] : []),
    el("h3", { text: "Recording" }),
    list,
    ...(meta.modules.length ? [el("h3", { text: "Where names came from" }), el("div", { class: "wide" }, names)] : []),
  );
}
