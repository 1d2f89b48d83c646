// Memory over time, above the activity of threads: what is resident by kind, or what was allocated and lives; and what of a
// selected range is still there.

// From the bottom.
const MEMORY_KINDS = [
  { key: "file_bytes", name: "Files", color: "file" },
  { key: "shared_bytes", name: "Shared", color: "shared" },
  { key: "anonymous_bytes", name: "Anonymous", color: "anonymous" },
  { key: "live_bytes", name: "Live", color: "live" },
];

class MemoryChart {
  constructor(timeline) {
    const { model } = timeline;
    const observed = model.profile.meta.memory_over_time;
    this.timeline = timeline;
    this.reported = null;
    this.times = observed.time_ns.map((time) => time / 1e3);
    // What there is none of has no place.
    this.kinds = MEMORY_KINDS.filter(({ key }) => observed[key]?.some((n) => n > 0)).map((kind) => ({ ...kind, amounts: observed[kind.key] }));
    this.totals = this.times.map((_, at) => this.kinds.reduce((sum, { amounts }) => sum + amounts[at], 0));
    this.most = this.totals.reduce((most, n) => Math.max(most, n), 1);
    this.isLive = this.kinds.some(({ color }) => color === "live");
    const name = this.isLive ? "Live allocations" : "Resident memory";
    const [first, last] = [this.totals[0] ?? 0, this.totals.at(-1) ?? 0];
    const text = `${byteCount(first)} at first, ${byteCount(this.most)} at most, ${byteCount(last)} in the end`;
    this.canvas = el("canvas", { role: "img", "aria-label": `${name} over time: ${text}` });
    this.plot = el("div", { class: "plot" }, this.canvas);
    const dots = this.isLive ? [] : this.kinds.toReversed().map((kind) => el("span", null, el("i", { class: `dot memory-${kind.color}` }), kind.name));
    const label = el("div", { class: "memory-label", title: text }, el("span", { class: "name", text: name }), el("span", { class: "num dim", text: `peak ${byteCount(this.most)}` }), el("span", { class: "memory-kinds dim" }, ...dots));
    $("memory").replaceChildren(el("div", { class: "tracks" }, label), this.plot);
    $("memory").hidden = false;
    timeline.select(this.canvas, (t) => this.describe(t));
  }

  // The last point at a time or before it.
  at(t) {
    let [low, high] = [0, this.times.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.times[middle] <= t) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  describe(t) {
    const lines = [`${(t / 1e6).toFixed(3)} s`];
    if (t < this.times[0] || t > this.times.at(-1)) return [...lines, "not observed"];
    const at = this.at(t);
    for (const { name, amounts } of this.kinds.toReversed()) lines.push(`${name}: ${byteCount(amounts[at])}`);
    if (this.kinds.length > 1) lines.push(`Together: ${byteCount(this.totals[at])}`);
    return lines;
  }

  paint() {
    const { timeline, times, totals, most } = this;
    const { width, palette, model } = timeline;
    const height = this.plot.clientHeight;
    if (width <= 0 || height <= 0) return;
    const c = fit(this.canvas, width, height);
    const { colors } = palette;
    c.fillStyle = colors.panel;
    c.fillRect(0, 0, width, height);
    const x = (at) => (times[at] / model.whole) * width;
    const y = (n) => height - 1 - (n / most) * (height - 6);
    const below = new Float64Array(times.length);
    for (const { color, amounts } of this.kinds) {
      c.beginPath();
      c.fillStyle = palette.memory[color];
      c.moveTo(x(0), y(below[0]));
      for (let at = 0; at < times.length; at++) c.lineTo(x(at), y(below[at] + amounts[at]));
      for (let at = times.length - 1; at >= 0; at--) c.lineTo(x(at), y(below[at]));
      c.fill();
      for (let at = 0; at < times.length; at++) below[at] += amounts[at];
    }
    c.beginPath();
    c.strokeStyle = colors.text;
    c.globalAlpha = 0.5;
    c.lineWidth = 1;
    for (let at = 0; at < times.length; at++) c.lineTo(x(at), y(totals[at]));
    c.stroke();
    c.globalAlpha = 1;
    timeline.paintRange(c, width, height);
    this.report();
  }

  // What happened in the selected range.
  report() {
    const { model } = this.timeline;
    const { range } = model;
    const place = $("memory-range");
    // It is said aloud: once.
    if (this.reported === range) return;
    this.reported = range;
    place.hidden = !range;
    if (!range) return;
    const sum = (name) => {
      const { timeline, values } = model.profile;
      const weight = values.find((value) => value.name === name)?.weight;
      let all = 0;
      for (let i = 0; weight && i < timeline.n; i++) if (timeline.time[i] >= range[0] && timeline.time[i] <= range[1]) all += weight[i];
      return byteCount(all);
    };
    const [from, to] = range.map((t) => this.totals[this.at(t)]);
    const change = `${from <= to ? "+" : "−"}${byteCount(Math.abs(to - from))}`;
    const texts = this.isLive
      ? ["live memory", "was allocated", sum("alloc_bytes"), "still lives in the end", sum("live_bytes"), ""]
      : ["resident memory", "grew", sum("rss_grown_bytes"), "is still resident in the end", sum("rss_bytes"), `; ${sum("rss_returned_bytes")} was given back`];
    const [what, grew, grown, isStill, still, returned] = texts;
    const part = (text) => el("b", { text });
    place.replaceChildren(
      `In the selected range ${what} went from ${byteCount(from)} to ${byteCount(to)} (`, part(change), `). By the samples `, part(grown), ` ${grew} in it, of which `, part(still), ` ${isStill}${returned}.`,
    );
  }
}
