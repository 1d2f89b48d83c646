// Filters: hidden kinds, modules and functions; functions that stacks must contain. Each shows as a chip that removes it.

class Filters {
  constructor(model) {
    this.model = model;
    this.buildKinds();
    this.buildCategories();
    this.buildModules();
    this.buildLabels();
  }

  // Labels of samples, which one types to find.
  buildLabels() {
    const { model } = this;
    const { labels } = model.profile;
    if (!labels) return;
    const input = $("label");
    input.hidden = false;
    $("labels").append(...labels.all.slice(0, 2000).map(({ text }) => el("option", { value: text })));
    input.addEventListener("change", () => {
      const text = input.value.trim();
      const label = labels.all.find((label) => label.text === text) ?? labels.all.find((label) => label.text === `span=${text}`) ?? null;
      input.setAttribute("aria-invalid", String(text !== "" && !label));
      model.set({ label });
    });
  }

  buildKinds() {
    const { model } = this;
    const { functions: f, kinds } = model.profile;
    const present = new Set();
    for (let i = 1; i < f.count; i++) if (model.totals.all[i] > 0) present.add(f.kind[i]);
    this.kindButtons = [];
    for (let k = 0; k < kinds.length; k++) {
      if (!present.has(k)) continue;
      const button = el(
        "button",
        { class: "kind", "aria-pressed": "true", title: `Hide or show ${KIND_NAMES[kinds[k]]} frames`, "data-kind": kinds[k] },
        el("i", { class: "dot " + kinds[k] }),
        KIND_NAMES[kinds[k]],
      );
      button.addEventListener("click", () => {
        const hiddenKinds = new Set(model.hiddenKinds);
        if (!hiddenKinds.delete(k)) hiddenKinds.add(k);
        model.set({ hiddenKinds });
        announce(`${KIND_NAMES[kinds[k]]} frames ${hiddenKinds.has(k) ? "hidden" : "shown"}`);
      });
      this.kindButtons.push([k, button]);
      $("kinds").append(button);
    }
  }

  // Those with the most samples of their own; "Time by kind of code" has all.
  buildCategories() {
    const { model } = this;
    const { functions: f, categories } = model.profile;
    const sums = new Float64Array(categories.length);
    for (let i = 1; i < f.count; i++) sums[f.category[i]] += model.totals.self[i];
    const order = [...categories.keys()].filter((k) => categories[k] && sums[k] > 0).sort((a, b) => sums[b] - sums[a]);
    this.categoryButtons = order.slice(0, 8).map((k) => {
      const title = `Fold ${categories[k]} into what calls it, or show it again`;
      const button = el("button", { class: "kind", title, onclick: () => this.toggleCategory(k) }, el("i", { class: "dot " + categoryClass(categories[k]) }), shorten(categories[k], 30));
      $("categories").append(button);
      return [k, button];
    });
  }

  toggleCategory(k) {
    const hiddenCategories = new Set(this.model.hiddenCategories);
    if (!hiddenCategories.delete(k)) hiddenCategories.add(k);
    this.model.set({ hiddenCategories });
  }

  buildModules() {
    const { model } = this;
    const { functions: f, modules } = model.profile;
    const samples = new Float64Array(modules.length);
    for (let i = 1; i < f.count; i++) samples[f.module[i]] += model.totals.self[i];
    const kind = new Map();
    for (let i = 1; i < f.count; i++) if (!kind.has(f.module[i])) kind.set(f.module[i], model.kind(i));
    const order = [...modules.keys()].filter((m) => modules[m] && kind.has(m)).sort((a, b) => samples[b] - samples[a]);
    this.rows = new Rows({
      id: "module-row",
      label: "Modules",
      role: "grid",
      columns: [
        { key: "on", title: "Show", cell: (m) => el("input", { type: "checkbox", checked: !model.hiddenModules.has(m), "aria-label": `Show ${modules[m]}`, onchange: () => this.toggleModule(m) }) },
        { key: "function", title: "Module", cell: (m) => el("span", { class: "function" }, el("i", { class: "dot " + kind.get(m) }), el("bdi", { class: "name", text: modules[m], title: modules[m] })) },
        { key: "self", title: "Self", num: true, cell: (m) => share(samples[m], model.profile.total) },
        { key: "solo", title: "Only", cell: (m) => el("button", { class: "bare only", text: "only", title: `Hide all other modules`, onclick: () => this.onlyModule(m) }) },
      ],
      onopen: (m) => this.toggleModule(m),
      why: () => `No module has "${shorten($("modules-filter").value, 100)}" in its name.`,
      onkey: (event, at) => event.key === " " && at >= 0 && (this.toggleModule(this.rows.rows[at]), true),
    });
    $("modules-list").append(this.rows.element);
    this.list = () => {
      const text = $("modules-filter").value.toLowerCase();
      this.rows.show(order.filter((m) => modules[m].toLowerCase().includes(text)), true);
    };
    $("modules-filter").addEventListener("input", this.list);
    $("modules-all").addEventListener("click", () => model.set({ hiddenModules: new Set() }));
    $("modules-none").addEventListener("click", () => model.set({ hiddenModules: new Set(this.rows.rows) }));
    this.modules = order;
  }

  toggleModule(m) {
    const hiddenModules = new Set(this.model.hiddenModules);
    if (!hiddenModules.delete(m)) hiddenModules.add(m);
    this.model.set({ hiddenModules });
  }

  onlyModule(m) {
    this.model.set({ hiddenModules: new Set(this.modules.filter((other) => other !== m)) });
  }

  refresh() {
    const { model } = this;
    const { functions: f, modules, threads } = model.profile;
    for (const [k, button] of this.kindButtons) button.setAttribute("aria-pressed", String(!model.hiddenKinds.has(k)));
    for (const [k, button] of this.categoryButtons) button.setAttribute("aria-pressed", String(!model.hiddenCategories.has(k)));
    if ($("modules").matches(":popover-open")) this.list();
    $("modules-button").classList.toggle("on", model.hiddenModules.size > 0);

    const chips = [];
    const chip = (text, undo) =>
      chips.push(el("button", { class: "chip", title: "Undo", "aria-label": `Undo: ${text}`, onclick: undo }, el("bdi", { text: shorten(text, 60) }), el("span", { "aria-hidden": true, text: "×" })));
    if (model.range) chip(`${(model.range[0] / 1e6).toFixed(2)}–${(model.range[1] / 1e6).toFixed(2)} s`, () => model.set({ range: null }));
    if (model.threads) chip(model.threads.size === 1 ? threads[[...model.threads][0]].number : `${model.threads.size} of ${plural(threads.length, "thread")}`, () => model.set({ threads: null }));
    if (model.label) chip(model.label.text, () => model.set({ label: null }));
    if (model.profile.labels && document.activeElement !== $("label")) $("label").value = model.label?.text ?? "";
    model.only.forEach((only, at) => chip(`with ${only.label}`, () => model.set({ only: model.only.filter((_, i) => i !== at) })));
    if (model.hiddenModules.size === 1) chip(`without ${modules[[...model.hiddenModules][0]]}`, () => model.set({ hiddenModules: new Set() }));
    else if (model.hiddenModules.size) chip(`${plural(model.hiddenModules.size, "module")} hidden`, () => model.set({ hiddenModules: new Set() }));
    for (const k of model.hiddenCategories) {
      chip(`without ${model.profile.categories[k]}`, () => {
        const hiddenCategories = new Set(model.hiddenCategories);
        hiddenCategories.delete(k);
        model.set({ hiddenCategories });
      });
    }
    for (const fn of [...model.hiddenFunctions].slice(0, 8)) {
      chip(`without ${f.name[fn]}`, () => {
        const hiddenFunctions = new Set(model.hiddenFunctions);
        hiddenFunctions.delete(fn);
        model.set({ hiddenFunctions });
      });
    }
    if (chips.length > 1) chips.push(el("button", { class: "bare", text: "Clear all", onclick: () => this.clear() }));
    $("chips").replaceChildren(...chips);
    const isAll = model.total === model.profile.total;
    const part = `${model.number(model.total)} of ${model.amount(model.profile.total)} (${percent(model.total, model.profile.total)})`;
    // All of a comparison is 100 %.
    $("shown").textContent = !isAll ? part : model.comparison ? "" : model.amount(model.total);
  }

  clear() {
    this.model.set({
      range: null,
      threads: null,
      label: null,
      only: [],
      hiddenKinds: new Set(),
      hiddenModules: new Set(),
      hiddenCategories: new Set(),
      hiddenFunctions: new Set(),
    });
  }
}
