// State of the page: the profile, the selection and filters, and the trees that follow. Views listen for changes.

// Numbers of lines are below this.
const LINES = 2 ** 32;
// The title of the list of the user's own functions, and how many it has.
const YOURS = "Your functions";
const OWN_FUNCTIONS = 8;

class Model {
  constructor(profile) {
    this.profile = profile;
    this.listeners = [];
    this.kept = new Map(); // by tree
    this.range = null; // [first, last] in microseconds, both included, or null for all
    this.threads = null; // Set of thread numbers, or null for all
    this.label = null; // one of profile.labels.all, or null for all
    this.value = profile.values[0];
    this.comparison = profile.comparison && new Comparison(profile.comparison);
    this.hiddenKinds = new Set();
    this.hiddenModules = new Set();
    this.hiddenCategories = new Set();
    this.byCategory = false; // colors
    this.hiddenFunctions = new Set();
    this.only = []; // { label, matches: Uint8Array by function }: stacks must contain one of each
    this.selected = -1; // function
    this.search = { text: "", error: "", matches: null, functions: 0, samples: 0 };
    const f = profile.functions;
    this.texts = null;
    this.groupKind = profile.kinds.map((kind) => kind === "process" || kind === "thread" || kind === "root");
    this.isGroup = (fn) => this.groupKind[f.kind[fn]];
    // A sample lasts until the next one of its thread is expected.
    const { rate, event } = profile.meta;
    const timed = event === "" || event.includes("clock") || event.includes("cycles");
    const { n, time } = profile.timeline;
    this.first = n ? time[0] : 0;
    this.last = n ? time[n - 1] : 0;
    this.whole = Math.max(this.last, Math.round(profile.meta.duration * 1e6), 1);
    this.period = rate > 0 && timed ? 1e6 / rate : Math.max(1, (this.last - this.first) / Math.max(1, n));
    this.derive();
  }

  listen(listener) {
    this.listeners.push(listener);
  }

  // Takes changed fields; `what` is how much has changed: "tree", "search" or "selection".
  set(fields, what = "tree") {
    Object.assign(this, fields);
    if (what === "tree") this.derive();
    for (const listener of this.listeners) listener(what);
  }

  kind(fn) {
    return this.profile.kinds[this.profile.functions.kind[fn]];
  }

  // The location of a function as text.
  place(fn) {
    const { functions: f, modules } = this.profile;
    return this.kind(fn) === "python" ? this.source(fn) : modules[f.module[fn]];
  }

  // Its source file, if one is known.
  source(fn) {
    const { functions: f, files } = this.profile;
    return files[f.file[fn]] + (f.line[fn] ? ":" + f.line[fn] : "");
  }

  // The text that is searched: name, location and source file.
  text(fn) {
    if (!this.texts) {
      const { functions: f, files, modules } = this.profile;
      this.texts = f.name.map((name, i) => `${name} ${files[f.file[i]]} ${modules[f.module[i]]}`);
    }
    return this.texts[fn];
  }

  // An amount of the shown value as text.
  amount(n) {
    if (this.comparison) return this.comparison.amount(n);
    const { name, unit } = this.value;
    if (unit === "nanoseconds") return duration(n / 1e3);
    if (unit === "bytes") return byteCount(n);
    return plural(n, name.replace(/s$/, ""));
  }

  // The same without the name of the value, for a column of numbers.
  number(n) {
    return this.value.unit === "count" && !this.comparison ? count(n) : this.amount(n);
  }

  // Samples that ended at each node, within the range, the threads and the label chosen.
  weights() {
    const { tree, timeline, labels } = this.profile;
    const { label } = this;
    if (!this.range && !this.threads && !label) return this.value.self.slice();
    const { weight } = this.value;
    const self = new Float64Array(tree.n);
    const { time, thread, node, n } = timeline;
    const [first, last] = this.range ?? [0, Infinity];
    const taken = this.profile.threads.map((_, i) => !this.threads || this.threads.has(i));
    for (let i = 0; i < n; i++) {
      if (time[i] >= first && time[i] <= last && taken[thread[i]] && (!label || label.sets.has(labels.sets[i]))) self[node[i]] += weight ? weight[i] : 1;
    }
    return self;
  }

  // Nodes on whose path is a function of `matches`.
  under(tree, matches) {
    const { n, parent, fn } = tree;
    const found = new Uint8Array(n);
    for (let i = 1; i < n; i++) found[i] = found[parent[i]] | matches[fn[i]];
    return found;
  }

  hiddenMask() {
    const f = this.profile.functions;
    const { hiddenKinds, hiddenModules, hiddenCategories, hiddenFunctions } = this;
    if (hiddenKinds.size + hiddenModules.size + hiddenCategories.size + hiddenFunctions.size === 0) return null;
    const mask = new Uint8Array(f.count);
    for (let i = 1; i < f.count; i++) {
      mask[i] = hiddenKinds.has(f.kind[i]) || hiddenModules.has(f.module[i]) || hiddenCategories.has(f.category[i]) || hiddenFunctions.has(i) ? 1 : 0;
    }
    return mask;
  }

  derive() {
    const { tree, functions } = this.profile;
    const self = this.weights();
    for (const { matches } of this.only) {
      const under = this.under(tree, matches);
      for (let i = 0; i < tree.n; i++) if (!under[i]) self[i] = 0;
    }
    this.hidden = this.hiddenMask();
    const folded = this.hidden ? fold(tree, self, this.hidden) : tree;
    const isWhole = !this.hidden && !this.range && !this.threads && !this.label && !this.only.length;
    const { view, totals } = isWhole ? this.unfiltered(tree) : this.laidOut(folded, this.hidden ? folded.self : self);
    [this.view, this.totals, this.total] = [view, totals, view.all[0]];
    this.compare(folded);
    this.sandwiches = new Map();
    this.own = null;
    this.share();
  }

  laidOut(tree, self) {
    const view = layOut(tree, self);
    return { view, totals: functionTotals(view, this.profile.functions.count) };
  }

  // Without filters: kept, since people switch between the two trees.
  unfiltered(tree, self = this.value.self) {
    const kept = this.kept.get(tree);
    if (kept?.value === this.value) return kept;
    const made = { value: this.value, ...this.laidOut(tree, self) };
    this.kept.set(tree, made);
    return made;
  }

  // Lays the other tree out while nothing else is to be done, so that switching is quick.
  prepare() {
    const { tree, selves } = this.profile.other();
    if (this.profile.hasInterpreterFrames) this.unfiltered(tree, selves[this.profile.values.indexOf(this.value)]);
  }

  // Both sides of a comparison, for the tree that is shown.
  compare(folded) {
    if (!this.comparison) return;
    const { tree, values, functions } = this.profile;
    const selves = values.slice(1, 3).map(({ self }) => {
      const kept = self.slice();
      for (const { matches } of this.only) {
        const under = this.under(tree, matches);
        for (let i = 0; i < tree.n; i++) if (!under[i]) kept[i] = 0;
      }
      return this.hidden ? fold(tree, kept, this.hidden).self : kept;
    });
    this.comparison.place(this.view, folded, selves, functions.count);
  }

  sandwich(fn) {
    let made = this.sandwiches.get(fn);
    if (!made) {
      if (this.sandwiches.size > 20) this.sandwiches.clear();
      made = sandwich(this.view, this.profile.functions.count, fn);
      this.sandwiches.set(fn, made);
    }
    return made;
  }

  // A regular expression; case-sensitive only if it has capitals.
  find(text) {
    this.search = { text, error: "", matches: null, functions: 0, samples: 0 };
    if (text) {
      let expression;
      try {
        expression = new RegExp(text, /[A-Z]/.test(text) ? "u" : "iu");
      } catch (e) {
        this.search.error = String(e.message).replace(/^Invalid regular expression: /, "");
      }
      if (expression) {
        const { count: functions } = this.profile.functions;
        const matches = new Uint8Array(functions);
        for (let i = 1; i < functions; i++) matches[i] = expression.test(this.text(i)) ? 1 : 0;
        this.search.matches = matches;
      }
    }
    this.share();
    this.set({}, "search");
  }

  // How many of the shown samples the search matches.
  share() {
    const { search, view } = this;
    if (!search.matches) return;
    const under = this.under(view, search.matches);
    search.samples = 0;
    search.functions = 0;
    for (let i = 0; i < view.n; i++) if (under[i]) search.samples += view.self[i];
    for (let i = 1; i < search.matches.length; i++) if (search.matches[i] && this.totals.all[i] > 0) search.functions++;
  }

  // Samples of each line of groups of functions, in the complete recording: group * LINES + line -> [total, self]. `groupOf`
  // has the number of a function's group, -1 for none. A sample counts once where a line is on its stack repeatedly: in a
  // generator expression, in inlined functions, by recursion. Nodes do not tell which samples those are: the total is the
  // samples of a node, or those below it, whichever are more, and so at least that many.
  lineTotals(groupOf) {
    const { tree, lineStart, lines, lineSamples, lineSelf } = this.profile;
    const below = new Array(tree.n); // by node: key -> total
    const self = new Map();
    for (let i = tree.n - 1; i >= 0; i--) {
      const group = groupOf(tree.fn[i]);
      if (group >= 0) {
        const own = new Map();
        for (let k = lineStart[i]; k < lineStart[i + 1]; k++) {
          const key = group * LINES + lines[k];
          own.set(key, (own.get(key) ?? 0) + lineSamples[k]);
          self.set(key, (self.get(key) ?? 0) + lineSelf[k]);
        }
        below[i] ??= new Map();
        for (const [key, n] of own) below[i].set(key, Math.max(n, below[i].get(key) ?? 0));
      }
      if (i > 0 && below[i]) {
        const [small, large] = [below[i], below[tree.parent[i]] ?? new Map()].sort((a, b) => a.size - b.size);
        for (const [key, n] of small) large.set(key, (large.get(key) ?? 0) + n);
        below[tree.parent[i]] = large;
        below[i] = undefined;
      }
    }
    return new Map([...(below[0] ?? [])].map(([key, all]) => [key, [Math.max(all, self.get(key)), self.get(key)]]));
  }

  // The user's own functions with most samples, where each sample belongs to the innermost of them; without these, Python
  // functions: each with the line that has most of its samples in the complete recording, 0: not known.
  ownFunctions() {
    return (this.own ??= this.findOwnFunctions());
  }

  ownTitle() {
    const { categories, functions: f } = this.profile;
    const own = this.ownFunctions();
    return own.length && categories[f.category[own[0].fn]] === "your code" ? YOURS : "Python functions";
  }

  findOwnFunctions() {
    const { functions: f, categories } = this.profile;
    const yours = categories.indexOf("your code");
    const own = this.innermost((fn) => f.category[fn] === yours);
    return own.length ? own : this.innermost((fn) => this.kind(fn) === "python");
  }

  innermost(isOf) {
    const { view } = this;
    const { functions: f } = this.profile;
    const inner = new Int32Array(view.n);
    const sums = new Float64Array(f.count);
    for (let i = 1; i < view.n; i++) {
      inner[i] = isOf(view.fn[i]) ? view.fn[i] : inner[view.parent[i]];
      sums[inner[i]] += view.self[i];
    }
    const hot = [];
    for (let fn = 1; fn < f.count; fn++) if (sums[fn] > 0) hot.push(fn);
    const { all } = this.totals;
    hot.sort((a, b) => sums[b] - sums[a] || all[b] - all[a] || (f.name[a] < f.name[b] ? -1 : 1)).splice(OWN_FUNCTIONS);
    return hot.map((fn) => ({ fn, samples: sums[fn], line: f.hottest[fn] }));
  }

  // Samples of each line of a function, in the complete recording: line -> [total, self].
  lines(fn) {
    return this.lineTotals((other) => (other === fn ? 0 : -1));
  }
}
