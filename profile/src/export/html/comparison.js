// Comparison of two profiles: their amounts by node and function, and the colors of significant changes. Which ones are
// significant was found when the page was written; the page only shows it.

// Amounts are parts of this: all samples of a profile, one CPU, a second in nanoseconds, or one of what is counted.
const WHOLE = 1e9;
// Less than this is the rounding of amounts.
const MIN_SHOWN = 100;
// Steps of a color from no change to a complete one.
const STEPS = 12;

// Takes the fields of the packed comparison.
function comparison(packed, functions) {
  const { normalize, self, confidence } = packed;
  const changes = new Map(packed.changes.map(([fn, before, after, low, high, sure, makesUp]) => [fn, { before, after, low, high, sure, makesUp }]));
  return { normalize, self, confidence, changes, functions, before: clean(packed.before), after: clean(packed.after), amounts: clean(packed.amounts), question: clean(packed.question) };
}

class Comparison {
  constructor(packed) {
    Object.assign(this, packed);
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
    // What only one of them has may not be in the view.
    const whole = layOut(tree, selves[0].map((n, i) => n + selves[1][i]));
    this.totals = sums.map(({ all, self }) => functionTotals({ ...whole, all: take(whole, all), self: take(whole, self) }, functions));
  }

  // Of a function: from -1 (gone) over 0 (the change is not significant) to 1 (new).
  part(fn) {
    const row = this.changes.get(fn);
    return row?.sure ? (row.after - row.before) / Math.max(row.before, row.after) : 0;
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
    if (this.normalize === "number") return count(Math.round(n / WHOLE));
    return percent(n, WHOLE);
  }

  change(before, after) {
    const by = Math.abs(after - before) < MIN_SHOWN ? 0 : after - before;
    return `${by < 0 ? "−" : by > 0 ? "+" : ""}${this.amount(Math.abs(by))}`;
  }

  // Of a function, for the end of a sentence.
  state(fn) {
    const row = this.changes.get(fn);
    if (!row) return ", not tested";
    if (!row.sure) return ", within noise";
    if (row.makesUp) return ", making up for others";
    return row.before === 0 ? ": new" : row.after === 0 ? ": gone" : "";
  }

  // Before, after and the change of a function, or of a stack with it, as a line of a tooltip.
  describe([before, after], word, fn) {
    return `${word} ${this.amount(before)} before, ${this.amount(after)} after (${this.change(before, after)}${this.state(fn)})`;
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
    entry("shrank", "less", `The function has less ${comparison.self ? "self" : "total"} in the whole profile`),
    entry("unchanged", "no change", "The change of the function is not significant, or it was not tested"),
    entry("grew", "more", `The function has more ${comparison.self ? "self" : "total"} in the whole profile`),
    entry("new", "new", `Only in ${comparison.after}: outlined and marked +`),
  ];
}

// Columns of the table of functions.
function changeColumns(model) {
  const c = model.comparison;
  const by = ([before, after]) => after - before;
  const size = (pair) => Math.abs(by(pair));
  // Only what was tested has a color.
  const colored = (pair, fn, self) => {
    const part = self === c.self ? c.part(fn) : 0;
    return el("span", { class: part > 0 ? "more" : part < 0 ? "less" : "dim", text: c.change(...pair) });
  };
  return [
    { key: "total", title: "Change", num: true, sort: (a, b) => size(c.ofFunction(a)) - size(c.ofFunction(b)), cell: (fn) => colored(c.ofFunction(fn), fn, false), help: "Change of the total: with this function on the stack" },
    { key: "totaln", title: "Before", num: true, sort: (a, b) => c.ofFunction(a)[0] - c.ofFunction(b)[0], cell: (fn) => c.amount(c.ofFunction(fn)[0]) },
    { key: "after", title: "After", num: true, sort: (a, b) => c.ofFunction(a)[1] - c.ofFunction(b)[1], cell: (fn) => c.amount(c.ofFunction(fn)[1]) },
    { key: "self", title: "Self change", num: true, sort: (a, b) => size(c.selfOfFunction(a)) - size(c.selfOfFunction(b)), cell: (fn) => colored(c.selfOfFunction(fn), fn, true), help: "Change of what has this function innermost" },
  ];
}

// The facts below the title.
function comparisonFacts({ comparison }) {
  const sure = [...comparison.changes.values()].filter((row) => row.sure).length;
  return [
    el("span", { text: comparison.question.split(":")[0], title: comparison.question }),
    el("span", { text: `Amounts: of ${comparison.amounts}` }),
    el("span", null, el("b", { text: count(sure) }), ` of ${plural(comparison.changes.size, "function")} changed significantly (${comparison.normalize === "number" ? "" : `${comparison.confidence} %, `}${comparison.self ? "self" : "total"})`),
  ];
}

// Facts on one function for its details.
function changeFacts({ comparison }, fn) {
  const pair = ([before, after]) => `${comparison.amount(before)} → ${comparison.amount(after)} (${comparison.change(before, after)})`;
  const row = comparison.changes.get(fn);
  const signed = (n) => comparison.change(0, n * WHOLE);
  const interval = ({ low, high }) => (low === null ? "exact number" : `${signed(low)} to ${signed(high)}`);
  return [
    ["Total", pair(comparison.ofFunction(fn))],
    ["Self", pair(comparison.selfOfFunction(fn))],
    ["Interval", row ? `${interval(row)} of ${comparison.self ? "self" : "total"}${comparison.state(fn)}` : "not tested"],
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
    el("p", { class: "hint", text: "Width: mean of both profiles. Color: change of the function in the whole profile; gray: not significant. The list of values can select the width of one profile instead." }),
  );
}
