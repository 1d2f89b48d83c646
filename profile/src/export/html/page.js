// Entry point of the page: its panels, and what they show.

class Page {
  constructor(profile) {
    this.model = new Model(profile);
    const { model } = this;
    profile.total = model.total;
    this.palette = new Palette(model);
    this.filters = new Filters(model);
    this.details = new Details(model, {
      sandwich: (fn) => this.openSandwich(fn),
      only: (fn) => this.onlyFunction(fn),
      hide: (fn) => this.hideFunction(fn),
      copy: (text) => this.copy(text),
      select: (fn) => model.set({ selected: fn }, "selection"),
      source: (fn) => this.openSource(fn),
      overview: () => this.overview(),
    });
    this.buildPanels();
    this.buildTimeline();
    this.toolbar = new Toolbar(this);
    this.header();
    theme.changed = () => {
      this.palette.load();
      this.timeline?.redraw();
      this.active.draw?.();
    };
    model.listen((what) => this.changed(what));
    this.open("flame");
    this.filters.refresh();
    this.details.refresh();
  }

  header() {
    const { meta } = this.model.profile;
    const { comparison } = this.model;
    const command = comparison ? `${comparison.after} compared to ${comparison.before}` : meta.command || (meta.pid ? `process ${meta.pid}` : "Profile");
    const title = shorten(comparison ? command : shortCommand(command), 400);
    $("title").replaceChildren(pathText(title, title.length - Math.min(16, title.length >> 1), command));
    document.title = `${shorten(command, 80)} · nativeprof`;
    if (comparison) {
      $("quality-button").hidden = true;
      $("facts").replaceChildren(...comparisonFacts(this.model));
      return;
    }
    const facts = [
      [this.model.number(this.model.profile.total), this.model.profile.total === 1 ? this.model.value.name.replace(/s$/, "") : this.model.value.name],
      meta.duration > 0 && [duration(meta.duration * 1e6), ""],
      meta.rate > 0 && [`${count(meta.rate)} Hz`, meta.event],
      meta.python && [shorten(meta.python.replace(/ \(.*/, ""), 24), ""],
    ].filter(Boolean);
    $("facts").replaceChildren(...facts.map(([value, word]) => el("span", null, el("b", { text: value }), word ? " " + word : "")));
    const q = meta.quality;
    const all = q.exact + q.repaired + q.partial + q.lost;
    const complete = q.exact + q.repaired;
    const state = !all ? "truncated" : complete / all >= 0.95 ? "exact" : complete / all >= 0.8 ? "partial" : "lost";
    $("quality-button").replaceChildren(el("i", { class: "dot " + state }), all ? `${percent(complete, all)} complete stacks` : "About");
  }

  describe(source, id) {
    const { model } = this;
    const fn = source.fn(id);
    const lines = [id === 0 && !source.prepare ? "All samples" : model.profile.functions.name[fn]];
    const place = model.place(fn);
    if (place) lines.push(`${KIND_NAMES[model.kind(fn)]} · ${place}`);
    if (source.prepare) {
      const { span, seen, from } = source.samples(id);
      lines.push(`${duration(span)} from ${(from / 1e6).toFixed(3)} s · ${plural(seen, "sample")}`);
    } else if (model.comparison) {
      lines.push(model.comparison.describe(source.sides(id, model.comparison), "total", fn));
    } else {
      const { all, self } = source.samples(id);
      lines.push(`total ${percent(all, model.total)} · ${model.amount(all)}`, `self ${percent(self, model.total)} · ${model.amount(self)}`);
    }
    return lines;
  }

  chart(label, role, extra = {}) {
    const { model } = this;
    return new Chart(model, this.palette, {
      label,
      role,
      describe: (source, id) => this.describe(source, id),
      onselect: (fn) => model.set({ selected: fn }, "selection"),
      onopen: (fn) => this.openSandwich(fn),
      onview: (chart) => {
        if (chart === this.active?.chart) $("zoom-out").disabled = !chart.isZoomed;
      },
      ...extra,
    });
  }

  buildPanels() {
    const { model } = this;
    const select = (fn) => model.set({ selected: fn }, "selection");
    this.flame = this.chart("Flame graph of all stacks shown", "flame graph");
    this.time = this.chart("Stacks of one thread in chronological order", "flame chart");
    this.callers = this.chart("Callers of the selected function", "flame graph", { upward: true });
    this.callees = this.chart("Callees of the selected function", "flame graph");
    this.table = new FunctionTable(model, {
      id: "function-row",
      label: "Functions",
      columns: ["self", "selfn", "total", "totaln", "function", "kind", "module", "place"],
      sorted: model.comparison ? "total" : "self",
      onpick: select,
      onopen: (fn) => this.openSandwich(fn),
    });
    this.list = new FunctionTable(model, { id: "sandwich-row", label: "Selected function", columns: ["total", "function"], sorted: "total", onpick: select });
    this.tree = new CallTree(model, { onpick: select });
    this.source = new SourcePanel(model, { onpick: select, onopen: (fn) => this.openSandwich(fn) });
    this.waits = model.profile.waits && new WaitsPanel(model);
    this.lag = new LagPanel(model, { onpick: (lag) => this.openLag(lag), onopen: () => this.open("flame") });
    this.middle = el("div", { class: "middle" });
    const change = model.comparison ? " comparison" : "";
    const panel = (name, ...children) => el("div", { class: "panel " + name + change, role: "tabpanel", id: "panel-" + name, "aria-labelledby": "tab-" + name, hidden: true }, ...children);
    this.sides = [el("span", { class: "side up" }), el("span", { class: "side down" })];
    const charts = el("div", { class: "sandwich-charts" }, this.sides[0], this.callers.element, this.middle, this.callees.element, this.sides[1]);
    this.panels = {
      flame: { title: "Flame graph", element: panel("flame", this.flame.element), draw: () => this.flame.draw(), show: () => this.flame.show(new TreeSource(model.view)), chart: this.flame },
      time: { title: "Chronological", element: panel("time", this.time.element), draw: () => this.time.draw(), show: () => this.showTime(), chart: this.time },
      sandwich: {
        title: "Sandwich",
        element: panel("sandwich", el("div", { class: "sandwich-list" }, this.list.element), charts),
        draw: () => (this.callers.draw(), this.callees.draw()),
        show: () => (this.list.refresh(), this.showSandwich()),
        chart: this.callees,
      },
      sources: { title: "Source", element: panel("sources", ...this.source.element), show: () => this.source.refresh() },
      tree: { title: "Call tree", element: panel("tree", this.tree.element), show: () => this.tree.refresh() },
      waits: { title: "Waits", element: panel("waits", ...(this.waits?.element ?? [])), show: () => this.waits.refresh() },
      lag: { title: "Loop lag", element: panel("lag", ...this.lag.element), show: () => this.lag.refresh() },
      table: { title: "Table", element: panel("table", this.table.element), show: () => this.table.refresh() },
    };
    if (!model.profile.timeline.n) delete this.panels.time;
    if (!model.profile.waits) delete this.panels.waits;
    if (!model.profile.lags.length) delete this.panels.lag;
    if (!model.profile.files.some((file) => file.startsWith("/"))) delete this.panels.sources;
    for (const [name, { title, element }] of Object.entries(this.panels)) {
      $("panels").append(element);
      const tab = el("button", { role: "tab", id: "tab-" + name, "aria-controls": "panel-" + name, text: title, onclick: () => this.open(name) });
      $("tabs").append(tab);
    }
    $("tabs").addEventListener("keydown", (event) => {
      const names = Object.keys(this.panels);
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const name = names[(names.indexOf(this.name) + step + names.length) % names.length];
      this.open(name);
      $("tab-" + name).focus();
      event.preventDefault();
    });
    this.empty = el("div", { class: "empty", hidden: true });
  }

  open(name) {
    if (!this.panels[name]) return;
    this.name = name;
    this.active = this.panels[name];
    tooltip.hide();
    for (const [key, { element }] of Object.entries(this.panels)) {
      element.hidden = key !== name;
      $("tab-" + key).setAttribute("aria-selected", String(key === name));
      $("tab-" + key).tabIndex = key === name ? 0 : -1;
    }
    $("thread").hidden = name !== "time" || this.model.profile.threads.length < 2;
    $("direction").hidden = !this.active.chart || name === "sandwich";
    $("zoom-out").hidden = !this.active.chart;
    this.showActive();
  }

  showActive() {
    const { model } = this;
    const nothing = model.total === 0;
    this.empty.hidden = !nothing;
    if (nothing) {
      this.empty.textContent = model.profile.total === 0 ? "This profile has no samples." : "No samples match: widen the time range or remove a filter.";
      this.active.element.append(this.empty);
    }
    this.active.show();
  }

  showTime() {
    const { model } = this;
    const chosen = Number($("thread").value);
    this.time.show(new TimeSource(model, chosen));
  }

  showSandwich() {
    const { model } = this;
    const fn = model.selected;
    const shown = fn > 0 && model.totals.all[fn] > 0 && !model.isGroup(fn);
    if (!shown) {
      // The user's own first: the callers of a state such as `[runnable]` say little.
      const { self } = model.totals;
      const hottest = model.ownFunctions()[0]?.fn ?? this.list.rows.rows.reduce((best, i) => (best < 0 || self[i] > self[best] ? i : best), -1);
      if (fn <= 0 && hottest > 0) {
        model.set({ selected: hottest }, "selection");
        return;
      }
      this.middle.replaceChildren(el("span", { class: "dim", text: fn > 0 ? "Not on any of the stacks shown." : "Select a function." }));
    } else {
      this.middle.replaceChildren(
        functionName(model, fn),
        el("span", { class: "dim", text: model.comparison ? model.comparison.describe(model.comparison.ofFunction(fn), "total", fn) : `total ${percent(model.totals.all[fn], model.total)} · self ${percent(model.totals.self[fn], model.total)}` }),
      );
    }
    const none = layOut({ n: 1, parent: new Int32Array(1), fn: new Int32Array(1) }, new Float64Array(1));
    const { callers, callees } = shown ? model.sandwich(fn) : { callers: none, callees: none };
    this.callers.show(new TreeSource(callers, 1));
    this.callees.show(new TreeSource(callees, 1));
    // Below its root such a tree has the function itself.
    const texts = [
      [callers, "Callers", "No callers: its stacks begin with it"],
      [callees, "Callees", "No callees: its stacks end with it"],
    ];
    texts.forEach(([tree, title, none], side) => {
      const isEmpty = tree.n <= 2;
      this.sides[side].textContent = !shown ? "" : isEmpty ? none : title;
      this.sides[side].classList.toggle("none", isEmpty);
    });
    this.sandwiched = fn;
  }

  openSandwich(fn) {
    if (this.model.isGroup(fn)) return;
    this.model.selected = fn;
    this.open("sandwich");
    this.details.refresh();
    announce(`Callers and callees of ${this.model.profile.functions.name[fn]}`);
  }

  // The file of a function, at its lines.
  openSource(fn) {
    this.open("sources");
    this.source.open(this.model.profile.functions.file[fn], fn);
  }

  // Deselects the function: the details are those of the program again.
  overview() {
    const { model } = this;
    if (model.selected <= 0) return;
    model.set({ selected: -1 }, "selection");
    announce($("details").querySelector("h2")?.textContent ?? "");
  }

  // The samples of the time in which something blocked an event loop, and its function.
  openLag({ begin, length, fn, thread }) {
    const { model } = this;
    const { timeline } = model.profile;
    // A sample represents the time before it.
    const [first, last] = [begin, Math.ceil(begin + length + model.period)];
    const hasSamples = timeline.thread.some((of, i) => of === thread && timeline.time[i] >= first && timeline.time[i] <= last);
    const selected = fn > 0 ? fn : model.selected;
    if (hasSamples) model.set({ selected, range: [first, last], threads: new Set([thread]) });
    else model.set({ selected }, "selection");
  }

  onlyFunction(fn) {
    const { model } = this;
    const matches = new Uint8Array(model.profile.functions.count);
    matches[fn] = 1;
    model.set({ only: [...model.only, { label: model.profile.functions.name[fn], matches }] });
  }

  hideFunction(fn) {
    const { model } = this;
    if (fn > 0 && !model.isGroup(fn)) model.set({ hiddenFunctions: new Set([...model.hiddenFunctions, fn]) });
  }

  copy(text) {
    navigator.clipboard?.writeText(text).then(
      () => announce("Copied"),
      () => announce("The browser blocked copying"),
    );
  }

  buildTimeline() {
    const { model } = this;
    if (!model.profile.timeline.n) {
      $("timeline").hidden = true;
      return;
    }
    this.timeline = new Timeline(model, this.palette);
    $("lanes").append(this.timeline.element);
    $("range-clear").addEventListener("click", () => this.timeline.choose(0, model.whole));
    for (const t of this.timeline.order.slice(0, 2000)) {
      $("thread").append(el("option", { value: t, text: model.profile.threads[t].label }));
    }
    $("thread").addEventListener("change", () => this.showTime());
  }

  changed(what) {
    const { model } = this;
    if (what === "tree") {
      this.filters.refresh();
      this.timeline?.redraw();
      this.details.refresh();
      this.toolbar.found();
      this.showActive();
    } else if (what === "search") {
      this.toolbar.found();
      if (this.name === "table") this.table.refresh();
      if (this.name === "sandwich") this.list.refresh();
      if (this.name === "tree") this.tree.list(true);
      this.active.draw?.();
    } else {
      this.details.refresh();
      if (this.name === "sandwich" && this.sandwiched !== model.selected && !this.inside()) this.showSandwich();
      if (this.name === "sources" && this.source.followed !== model.selected) this.source.follow();
      this.active.draw?.();
    }
  }

  // A click in the callers and callees graphs selects, but the graphs keep their function.
  inside() {
    const focus = document.activeElement;
    return focus === this.callers.canvas || focus === this.callees.canvas;
  }
}

theme.load();
(async () => {
  const start = performance.now();
  try {
    const holder = $("profile");
    const profile = await readProfile(holder.textContent);
    holder.remove();
    const page = new Page(profile);
    $("loading").remove();
    // For use in the browser's console.
    globalThis.nativeprof = { profile, model: page.model, page };
    requestAnimationFrame(() =>
      setTimeout(() => {
        document.documentElement.dataset.ready = Math.round(performance.now() - start);
        requestIdleCallback?.(() => page.model.prepare());
      }),
    );
  } catch (e) {
    $("loading").textContent = `This profile could not be shown: ${e.message}\nRequires a 2024 or newer browser. If yours is newer, the file is damaged: export it again.`;
    throw e;
  }
})();
