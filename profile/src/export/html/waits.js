// Time off the CPU: states of threads over time, where they waited, and the interpreter lock.

// What a thread does, in the order of the tracks from the bottom.
const STATES = ["running", "runnable", "gil", "lock", "io", "sleep", "idle", "other"];
const STATE_NAMES = { running: "Running", runnable: "Runnable", gil: "GIL", lock: "Lock", io: "I/O", sleep: "Sleep", idle: "Idle pool", other: "Other wait" };
const STATE_OF = {
  runnable: "runnable",
  throttled: "runnable",
  gil: "gil",
  lock: "lock",
  condition: "lock",
  futex: "lock",
  read: "io",
  write: "io",
  connect: "io",
  accept: "io",
  poll: "io",
  disk: "io",
  "page fault": "io",
  sleep: "sleep",
};
// Of suspended tasks, while their event loop waits for events; all others wait for I/O.
const STATE_OF_AWAITING = { sleep: "sleep", lock: "lock", semaphore: "lock", condition: "lock", event: "lock", queue: "lock", loop: "runnable" };
const AWAITING = "awaiting ";

function stateOf(kind) {
  if (kind.startsWith(AWAITING)) return STATE_OF_AWAITING[kind.slice(AWAITING.length)] ?? "io";
  return /^idle\b/.test(kind) ? "idle" : (STATE_OF[kind] ?? "other");
}

// `site`: by entry of the timeline, from 1, 0 where the thread ran; `length`: ns of its interval.
function readWaits(packed, site, length) {
  const sites = packed.sites.map(([kind, object, place]) => ({ kind: clean(kind), object: clean(object), place: clean(place) }));
  const state = Uint8Array.from([0, ...sites.map(({ kind }) => STATES.indexOf(stateOf(kind)))]);
  const isAwait = Uint8Array.from([0, ...sites.map(({ kind }) => (kind.startsWith(AWAITING) ? 1 : 0))]);
  return { value: packed.value, sites, site, length, state, isAwait, gil: cleanAll(packed.gil) };
}

// Time of each track, column and state, in microseconds. A sample represents the time before it: that of its interval, or where
// intervals are short, for several of them. Suspended tasks are counted from time to time: then their samples represent the time
// since the last count.
function stateTimes(profile, lane, tracks, columns, whole) {
  const { timeline, waits, values } = profile;
  const { weight } = values[waits.value];
  const data = new Float64Array(tracks * columns * STATES.length);
  const scale = columns / whole;
  const counts = profile.threads.map(() => ({ last: 0, before: 0 }));
  for (let i = 0; i < timeline.n; i++) {
    const t = lane[timeline.thread[i]];
    if (t < 0 || !weight) continue;
    const state = waits.state[waits.site[i]];
    const time = weight[i] / 1e3;
    let from = timeline.time[i] - Math.max(time, waits.length[i] / 1e3);
    if (waits.isAwait[waits.site[i]]) {
      const count = counts[timeline.thread[i]];
      if (count.last !== timeline.time[i]) [count.before, count.last] = [count.last, timeline.time[i]];
      from = Math.min(from, count.before);
    }
    const end = Math.min(columns, timeline.time[i] * scale);
    const start = Math.max(0, Math.min(end - 1e-6, from * scale));
    const per = time / (end - start);
    for (let column = Math.floor(start); column < end; column++) {
      const part = Math.min(end, column + 1) - Math.max(start, column);
      data[(t * columns + column) * STATES.length + state] += per * part;
    }
  }
  return data;
}

function stateLegend() {
  const entry = (state) => el("span", { class: "kind legend" }, el("i", { class: "dot state-" + state }), STATE_NAMES[state]);
  return STATES.map(entry);
}

// What a state frame represents: `[waiting: read socket]` is `read socket`.
const stateLabel = (name) => name.replace(/^\[(waiting: )?/, "").replace(/\]$/, "");

// How much of the time of a function, with all that it calls, its threads ran and how much they waited, and for what.
function timeByState(model, fn) {
  const { view, profile } = model;
  const sums = new Map();
  let all = 0;
  const inside = new Uint8Array(view.n);
  const states = new Int32Array(view.n); // by node, the function that is the state it is in
  for (let i = 1; i < view.n; i++) {
    const up = view.parent[i];
    inside[i] = inside[up] || view.fn[i] === fn ? 1 : 0;
    if (!inside[i]) continue;
    states[i] = states[up] || (model.kind(view.fn[i]) === "state" ? view.fn[i] : 0);
    if (!view.self[i]) continue;
    const label = states[i] ? stateLabel(profile.functions.name[states[i]]) : "running";
    sums.set(label, (sums.get(label) ?? 0) + view.self[i]);
    all += view.self[i];
  }
  if (sums.size < 2) return null;
  const bar = el("div", { class: "quality-bar", role: "img", "aria-label": "Shares of running and waiting" });
  const list = el("dl", { class: "by-kind" });
  const rank = (label) => STATES.indexOf(label === "running" ? label : stateOf(label.replace(/^(read|write|connect|accept|lock|condition|futex) .*/, "$1")));
  for (const [label, sum] of [...sums].sort((a, b) => rank(a[0]) - rank(b[0]) || b[1] - a[1])) {
    const dot = "dot state-" + STATES[rank(label)];
    const piece = el("span", { class: dot, title: label });
    piece.style.flexGrow = String(sum / all);
    bar.append(piece);
    if (sum / all < 0.001) continue;
    list.append(el("dt", null, el("i", { class: dot }), el("bdi", { text: STATE_NAMES[label] ?? label })), el("dd", { class: "num", text: percent(sum, all) }));
  }
  return el("section", { class: "states" }, el("h3", { text: "Running and waiting" }), bar, list);
}

class WaitsPanel {
  constructor(model) {
    this.model = model;
    const by = (key) => (a, b) => this.sums[key][a] - this.sums[key][b];
    const { sites } = model.profile.waits;
    const text = (key) => (a, b) => (sites[a][key] < sites[b][key] ? -1 : sites[a][key] > sites[b][key] ? 1 : 0);
    const label = (i) => `${sites[i].kind} ${sites[i].object}`.trim();
    this.rows = new Rows({
      id: "wait-row",
      label: "Where threads waited",
      role: "grid",
      columns: [
        { key: "total", title: "Total", num: true, sort: by("total"), cell: (i) => share(this.sums.total[i], this.sum), help: "Share of all time off the CPU" },
        { key: "time", title: "Time", num: true, sort: by("total"), cell: (i) => duration(this.sums.total[i] / 1e3) },
        { key: "count", title: "Count", num: true, sort: by("count"), cell: (i) => (this.sums.count[i] ? count(Math.round(this.sums.count[i])) : "-"), help: "An estimate: intervals shorter than the sampling period are sampled" },
        { key: "longest", title: "Longest", num: true, sort: by("longest"), cell: (i) => (this.sums.longest[i] ? duration(this.sums.longest[i] / 1e3) : "-") },
        { key: "waitkind", title: "Kind", sort: (a, b) => (label(a) < label(b) ? -1 : label(a) > label(b) ? 1 : 0), cell: (i) => el("span", { class: "function" }, el("i", { class: "dot state-" + STATES[model.profile.waits.state[i + 1]] }), el("bdi", { class: "name", text: label(i) })) },
        { key: "function", title: "Where", sort: text("place"), cell: (i) => placeText(sites[i].place) },
      ],
      why: () => `No thread ${model.threads ? "that is shown " : ""}waited${model.range ? " in this time" : ""}.`,
      onsort: () => this.refresh(),
    });
    this.rows.sorted = "total";
    this.rows.descending = true;
    this.gil = el("div", { class: "gil", tabindex: 0, role: "region", "aria-label": "The interpreter lock" });
    this.element = [this.rows.element, this.gil];
    this.drawGil();
  }

  // Of the samples in the range and of the threads that are shown.
  refresh() {
    const { model } = this;
    const { timeline, waits, values, threads } = model.profile;
    const n = waits.sites.length;
    this.sums = { total: new Float64Array(n), count: new Float64Array(n), longest: new Float64Array(n) };
    const { weight } = values[waits.value];
    const [first, last] = model.range ?? [0, Infinity];
    const taken = threads.map((_, i) => !model.threads || model.threads.has(i));
    this.sum = 0;
    for (let i = 0; i < timeline.n; i++) {
      const site = waits.site[i] - 1;
      if (site < 0 || timeline.time[i] < first || timeline.time[i] > last || !taken[timeline.thread[i]]) continue;
      const length = waits.length[i];
      const time = weight ? weight[i] : 0;
      this.sum += time;
      this.sums.total[site] += time;
      if (length) this.sums.count[site] += time / length;
      this.sums.longest[site] = Math.max(this.sums.longest[site], length);
    }
    const list = waits.sites.map((_, i) => i).filter((i) => this.sums.total[i] > 0);
    const column = this.rows.options.columns.find((c) => c.key === this.rows.sorted);
    const sign = this.rows.descending ? -1 : 1;
    list.sort((a, b) => sign * column.sort(a, b) || this.sums.total[b] - this.sums.total[a]);
    this.rows.mark();
    this.rows.show(list, true);
  }

  // Who waited for the interpreter lock, and who held it: of the whole recording.
  drawGil() {
    const { threads, pairs, functions } = this.model.profile.waits.gil;
    this.gil.hidden = threads.length === 0;
    const time = (ns) => (ns ? duration(ns / 1e3) : "-");
    const often = (n) => (n ? count(Math.round(n)) : "-");
    const table = (title, heads, rows) => {
      const head = el("thead", null, el("tr", null, ...heads.map((text) => el("th", { text, scope: "col" }))));
      const body = rows.slice(0, 50).map((cells) => el("tr", null, ...cells.map((text, at) => el(at ? "td" : "th", at ? { text } : { scope: "row" }, at ? null : el("bdi", { text: shortPlaces(text), title: shorten(text, 1000) })))));
      return el("section", null, el("h2", { text: title }), el("table", null, head, el("tbody", null, ...body)));
    };
    this.gil.replaceChildren(
      table("GIL: threads (whole recording)", ["Thread", "Waited", "Count", "Longest", "Held (estimate)"], threads.map(([name, waited, n, longest, held]) => [name, time(waited), often(n), time(longest), time(held)])),
      ...(pairs.length ? [table("GIL: which thread waited for which", ["Waiter", "Holder", "Waited", "Count", "Longest"], pairs.map(([waiter, holder, waited, n, longest]) => [waiter, holder, time(waited), often(n), time(longest)]))] : []),
      ...(functions.length ? [table("GIL: functions that held it", ["Function", "Held (estimate)", "Others waited for it"], functions.map(([name, held, waited]) => [name, time(held), time(waited)]))] : []),
    );
  }
}
