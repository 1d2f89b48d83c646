// Comparison of two profiles: their amounts by node and function, which changes are more than noise, and their colors.

// Amounts are parts of this: all samples of a profile, one CPU, or a second in nanoseconds.
const WHOLE = 1e9;
// Changes of nodes that are smaller than this many standard deviations of the noise are shown as none.
const SURE = 3;
// Parts of all that are never more than noise: shares of almost everything have next to none of their own.
const MIN_CHANGE = 0.001;
// Less than this is the rounding of amounts.
const MIN_SHOWN = 100;
// Steps of a color from no change to a complete one.
const STEPS = 12;

// Takes the fields of the packed comparison.
function comparison(packed, functions) {
  const { normalize, self, confidence, sides } = packed;
  const changes = new Map(packed.changes.map(([fn, before, after, low, high, sure]) => [fn, { before, after, low, high, sure }]));
  return { normalize, self, confidence, sides, changes, functions, before: clean(packed.before), after: clean(packed.after), amounts: clean(packed.amounts) };
}

class Comparison {
  constructor(packed) {
    Object.assign(this, packed);
    const weight = this.sides[0].total + this.sides[1].total;
    this.weights = this.sides.map((side) => side.total / weight);
    const noise = (side) => side.ofSample + side.ofProcess;
    this.noise = noise(this.sides[0]) + noise(this.sides[1]);
  }

  // The amounts of both profiles in a laid-out tree, whose nodes are some of a tree with these own amounts.
  place(view, tree, selves, functions) {
    const sums = selves.map((self) => {
      const all = self.slice(0, tree.n);
      for (let i = tree.n - 1; i > 0; i--) all[tree.parent[i]] += all[i];
      return { all, self };
    });
    const take = (view, column) => Float64Array.from(view.from, (at) => column[at]);
    this.nodes = sums.map(({ all }) => take(view, all));
    // All of a new subtree is new, however few samples its ends have.
    this.parts = new Float32Array(view.n);
    for (let i = 1; i < view.n; i++) {
      const pair = this.ofNode(i);
      const above = this.parts[view.parent[i]];
      const inherits = Math.abs(above) === 1 && pair[above > 0 ? 0 : 1] === 0;
      this.parts[i] = inherits ? above : this.part(...pair);
    }
    // What only one of them has may not be in the view.
    const whole = layOut(tree, selves[0].map((n, i) => n + selves[1][i]));
    this.totals = sums.map(({ all, self }) => functionTotals({ ...whole, all: take(whole, all), self: take(whole, self) }, functions));
  }

  // Of two amounts: from -1 (gone) over 0 (the change may be noise) to 1 (new).
  part(before, after) {
    const change = after - before;
    const pooled = (before * this.weights[0] + after * this.weights[1]) / WHOLE;
    const others = this.normalize === "share" ? Math.max(0, 1 - pooled) : 1;
    const least = this.normalize === "share" ? MIN_CHANGE : 0;
    if (Math.abs(change) / WHOLE <= Math.max(least, SURE * Math.sqrt(pooled * others * this.noise))) return 0;
    return change / Math.max(before, after);
  }

  ofNode(i) {
    return [this.nodes[0][i], this.nodes[1][i]];
  }

  ofFunction(fn) {
    return [this.totals[0].all[fn], this.totals[1].all[fn]];
  }

  selfOfFunction(fn) {
    return [this.totals[0].self[fn], this.totals[1].self[fn]];
  }

  // An amount as text.
  amount(n) {
    if (this.normalize === "time") return duration(n / 1e3);
    return percent(n, WHOLE);
  }

  change(before, after) {
    const by = Math.abs(after - before) < MIN_SHOWN ? 0 : after - before;
    return `${by < 0 ? "−" : by > 0 ? "+" : ""}${this.amount(Math.abs(by))}`;
  }

  // Before, after and the change, as lines of a tooltip.
  describe([before, after], word, part = this.part(before, after)) {
    const state = part === 0 ? ", within noise" : before === 0 ? ": new" : after === 0 ? ": gone" : "";
    return `${word} ${this.amount(before)} before, ${this.amount(after)} after (${this.change(before, after)}${state})`;
  }
}

// Colors of changes in the current theme, from gone to new.
function changeColors(value, mix, rgb) {
  const none = rgb(value("--unchanged"));
  const colors = [];
  for (let step = -STEPS; step <= STEPS; step++) {
    const to = rgb(value(step < 0 ? "--shrank" : "--grew"));
    // The smallest change still differs from none.
    colors.push(mix(none, to, step === 0 ? 0 : 0.25 + (0.75 * Math.abs(step)) / STEPS));
  }
  return colors;
}

// "Whose code" and kinds do not apply to a comparison: what the colors mean instead.
function changeLegend(comparison) {
  const entry = (name, text, title) => el("span", { class: "kind legend", title }, el("i", { class: "dot " + name }), text);
  return [
    entry("gone", "gone", `Only in ${comparison.before}: outlined and marked −`),
    entry("shrank", "less", "Total amount on this stack fell"),
    entry("unchanged", "no change", "The change is not significant"),
    entry("grew", "more", "Total amount on this stack rose"),
    entry("new", "new", `Only in ${comparison.after}: outlined and marked +`),
  ];
}

// Columns of the table of functions.
function changeColumns(model) {
  const c = model.comparison;
  const by = ([before, after]) => after - before;
  const size = (pair) => Math.abs(by(pair));
  const colored = (pair) => {
    const part = c.part(...pair);
    return el("span", { class: part > 0 ? "more" : part < 0 ? "less" : "dim", text: c.change(...pair) });
  };
  return [
    { key: "total", title: "Change", num: true, sort: (a, b) => size(c.ofFunction(a)) - size(c.ofFunction(b)), cell: (fn) => colored(c.ofFunction(fn)), help: "Change of the total: with this function on the stack" },
    { key: "totaln", title: "Before", num: true, sort: (a, b) => c.ofFunction(a)[0] - c.ofFunction(b)[0], cell: (fn) => c.amount(c.ofFunction(fn)[0]) },
    { key: "after", title: "After", num: true, sort: (a, b) => c.ofFunction(a)[1] - c.ofFunction(b)[1], cell: (fn) => c.amount(c.ofFunction(fn)[1]) },
    { key: "self", title: "Self change", num: true, sort: (a, b) => size(c.selfOfFunction(a)) - size(c.selfOfFunction(b)), cell: (fn) => colored(c.selfOfFunction(fn)), help: "Change of what has this function innermost" },
  ];
}

// The facts below the title.
function comparisonFacts({ comparison }) {
  const sure = [...comparison.changes.values()].filter((row) => row.sure).length;
  return [
    el("span", { text: `Amounts: of ${comparison.amounts}` }),
    el("span", null, el("b", { text: count(sure) }), ` of ${plural(comparison.changes.size, "function")} changed significantly (${comparison.confidence} %, ${comparison.self ? "self" : "total"})`),
  ];
}

// Facts on one function for its details.
function changeFacts({ comparison }, fn) {
  const pair = ([before, after]) => `${comparison.amount(before)} → ${comparison.amount(after)} (${comparison.change(before, after)})`;
  const row = comparison.changes.get(fn);
  const signed = (n) => comparison.change(0, n * WHOLE);
  return [
    ["Total", pair(comparison.ofFunction(fn))],
    ["Self", pair(comparison.selfOfFunction(fn))],
    ["Interval", row ? `${signed(row.low)} to ${signed(row.high)} of ${comparison.self ? "self" : "total"}${row.sure ? "" : ": within noise"}` : "too few samples"],
  ];
}

// While no function is selected: what grew and what shrank.
function changeOverview(details) {
  const { model, element } = details;
  const { comparison } = model;
  const rows = [...comparison.changes].filter(([fn, row]) => row.sure && fn > 0);
  const size = ([, row]) => Math.abs(row.after - row.before);
  rows.sort((a, b) => size(b) - size(a));
  const part = (title, kept) => {
    const items = rows.filter(kept).slice(0, 12).map(([fn, row]) => [fn, comparison.change(row.before * WHOLE, row.after * WHOLE)]);
    return items.length ? [el("h3", { text: title }), details.links(items)] : [];
  };
  const word = comparison.self ? "self" : "total";
  element.replaceChildren(
    el("h2", { text: "What changed" }),
    ...part(`More (${word})`, ([, row]) => row.after > row.before),
    ...part(`Less (${word})`, ([, row]) => row.after < row.before),
    ...(rows.length ? [] : [el("p", { text: "No significant change." })]),
    el("p", { class: "hint", text: "Width: mean of both profiles. Color: change of the total on this stack; gray: not significant. The list of values can select the width of one profile instead." }),
  );
}
