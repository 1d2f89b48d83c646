// The toolbar: search, switches, dialogs and keys.

class Toolbar {
  constructor(page) {
    this.page = page;
    this.model = page.model;
    this.buildSearch();
    this.buildButtons();
    this.buildDialogs();
    document.addEventListener("keydown", (event) => this.key(event));
  }

  buildSearch() {
    const { model } = this;
    const search = $("search");
    let waiting = 0;
    search.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => model.find(search.value), model.view.n > 50000 ? 120 : 30);
    });
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        clearTimeout(waiting);
        if (model.search.text !== search.value) model.find(search.value);
        this.next(event.shiftKey ? -1 : 1);
      } else if (event.key === "Escape") {
        search.value = "";
        model.find("");
        search.blur();
      }
    });
    $("only").addEventListener("click", () => {
      const { matches, text } = model.search;
      if (matches) model.set({ only: [...model.only, { label: `/${text}/`, matches }] });
    });
  }

  buildButtons() {
    const { model, page } = this;
    const { values } = model.profile;
    $("value").hidden = values.length < 2;
    values.forEach(({ name }, at) => $("value").append(el("option", { value: at, text: shorten(name, 60) })));
    $("value").addEventListener("change", () => {
      const value = values[$("value").value];
      model.profile.total = value.self.reduce((sum, n) => sum + n, 0);
      model.set({ value });
      page.header();
    });
    if (model.comparison) {
      // Colors are changes.
      $("colors").hidden = true;
      $("kinds").hidden = true;
      $("legend").append(...changeLegend(model.comparison));
      $("legend").hidden = false;
    }
    $("interpreter").hidden = !!model.comparison || !model.profile.hasInterpreterFrames;
    $("interpreter").setAttribute("aria-pressed", String(model.profile.interpreterFrames));
    $("interpreter").addEventListener("click", () => this.showInterpreter());
    $("workers").hidden = !!model.comparison || !model.profile.hasWorkers;
    $("workers").addEventListener("click", () => this.moveWorkers());
    $("colors").addEventListener("click", () => this.recolor());
    $("direction").addEventListener("click", () => this.turn());
    $("zoom-out").addEventListener("click", () => page.active.chart?.back(true));
  }

  buildDialogs() {
    const { page } = this;
    const menu = $("modules-button");
    $("modules").addEventListener("toggle", (event) => {
      if (event.newState !== "open") return;
      const box = menu.getBoundingClientRect();
      const { style, offsetWidth } = $("modules");
      style.left = Math.max(4, Math.min(box.left, innerWidth - offsetWidth - 8)) + "px";
      style.top = box.bottom + 6 + "px";
      style.maxHeight = `calc(100vh - ${box.bottom + 14}px)`;
      page.filters.list();
      $("modules-filter").focus();
    });
    $("theme").addEventListener("click", () => theme.toggle());
    $("quality-button").addEventListener("click", () => this.about());
    $("help-button").addEventListener("click", () => $("help").showModal());
    for (const button of document.querySelectorAll("[data-close]")) button.addEventListener("click", () => button.closest("dialog").close());
    for (const dialog of document.querySelectorAll("dialog")) {
      dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    }
  }

  // Shows the interpreter's own frames (start-up and bytecode loop), or folds them into the calling functions.
  showInterpreter() {
    const { page } = this;
    const { profile } = this.model;
    if (!profile.hasInterpreterFrames || this.model.comparison) return;
    profile.use(!profile.interpreterFrames);
    $("interpreter").setAttribute("aria-pressed", String(profile.interpreterFrames));
    if (page.timeline) page.timeline.bins = null;
    this.model.set({});
    announce(`Interpreter frames ${profile.interpreterFrames ? "shown" : "folded away"}`);
  }

  // Shows native workers below the code that gave them work, or apart.
  moveWorkers() {
    const { page } = this;
    const { profile } = this.model;
    if ($("workers").hidden) return;
    profile.use(profile.interpreterFrames, !profile.workersApart);
    $("workers").textContent = profile.workersApart ? "Workers: apart" : "Workers: attributed";
    $("workers").setAttribute("aria-pressed", String(!profile.workersApart));
    if (page.timeline) page.timeline.bins = null;
    this.model.set({});
    announce(profile.workersApart ? "Native workers apart" : "Native workers below the code that gave them work");
  }

  recolor() {
    const { model, page } = this;
    if (model.comparison) return;
    model.byCategory = !model.byCategory;
    $("colors").textContent = model.byCategory ? "Color: whose code" : "Color: kind";
    $("colors").setAttribute("aria-pressed", String(model.byCategory));
    $("kinds").hidden = model.byCategory;
    $("categories").hidden = !model.byCategory;
    page.active.draw?.();
  }

  about() {
    qualityDialog(this.model, $("about"));
    $("quality").showModal();
  }

  turn() {
    const { page } = this;
    for (const chart of [page.flame, page.time]) {
      chart.upward = !chart.upward;
      chart.toRoot = true;
      chart.draw();
    }
    $("direction").textContent = page.flame.upward ? "Flame" : "Icicle";
    $("direction").setAttribute("aria-pressed", String(page.flame.upward));
    announce(page.flame.upward ? "Roots at the bottom" : "Roots at the top");
  }

  // Cycles through the functions that the search matched, most samples first.
  next(step) {
    const { model, page } = this;
    const { matches } = model.search;
    if (!matches) return;
    const list = [];
    for (let i = 1; i < matches.length; i++) if (matches[i] && model.totals.all[i] > 0) list.push(i);
    if (!list.length) return;
    list.sort((a, b) => model.totals.all[b] - model.totals.all[a]);
    const at = list.indexOf(model.selected);
    const fn = list[(at + step + list.length + (at < 0 && step < 0 ? 1 : 0)) % list.length];
    model.set({ selected: fn }, "selection");
    if (page.name === "flame") {
      const { view } = model;
      let best = -1;
      for (let i = 1; i < view.n; i++) if (view.fn[i] === fn && (best < 0 || view.all[i] > view.all[best])) best = i;
      if (best >= 0) {
        page.flame.choose(best, true);
        page.flame.reveal(best);
        if (view.x[best] + view.all[best] <= page.flame.from || view.x[best] >= page.flame.to) page.flame.zoomTo(0, model.total);
      }
    }
  }

  found() {
    const { search, total } = this.model;
    $("only").hidden = !search.matches || !search.functions;
    document.querySelector(".search").classList.toggle("wrong", !!search.error);
    $("found").textContent = search.error ? shorten(search.error, 60) : search.matches ? `${percent(search.samples, total)} · ${plural(search.functions, "function")}` : "";
    $("found").title = search.matches ? `${this.model.amount(search.samples)} of ${this.model.number(total)} have a match on the stack` : search.error;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (event.target.matches("input, select, textarea") || document.querySelector("dialog[open]")) return;
    const { page } = this;
    const names = Object.keys(page.panels);
    const { selected } = this.model;
    const actions = {
      "/": () => $("search").select(),
      n: () => this.next(1),
      N: () => this.next(-1),
      s: () => selected > 0 && page.openSandwich(selected),
      h: () => page.hideFunction(selected),
      y: () => page.overview(),
      i: () => this.turn(),
      g: () => this.showInterpreter(),
      w: () => this.moveWorkers(),
      c: () => this.recolor(),
      t: () => theme.toggle(),
      "?": () => $("help").showModal(),
      Escape: () => page.active.chart?.back(true),
    };
    const action = actions[event.key] ?? (names[event.key - 1] && (() => page.open(names[event.key - 1])));
    if (!action) return;
    action();
    event.preventDefault();
  }
}
