// The timeline: activity of each thread by kind of the innermost function, and the selected range.

const TRACK = 26;
const MAX_TRACKS = 300;

class Timeline {
  constructor(model, palette) {
    Object.assign(this, { model, palette });
    const { threads, timeline } = model.profile;
    const samples = new Float64Array(threads.length);
    for (let i = 0; i < timeline.n; i++) samples[timeline.thread[i]]++;
    // Threads of a process follow each other, those with most samples first.
    const ofProcess = new Map();
    threads.forEach(({ pid }, t) => ofProcess.set(pid, (ofProcess.get(pid) ?? 0) + samples[t]));
    const process = (t) => threads[t].pid;
    const rank = (a, b) => ofProcess.get(process(b)) - ofProcess.get(process(a)) || process(a) - process(b) || samples[b] - samples[a];
    this.order = [...samples.keys()].sort(rank);
    this.tracks = this.order.slice(0, MAX_TRACKS);
    this.samples = samples;

    this.canvas = el("canvas", {
      tabindex: 0,
      role: "slider",
      "aria-label": "Time range. Drag to select; arrow keys move it, Shift extends it, Escape clears it",
      "aria-valuemin": 0,
      "aria-valuemax": (model.whole / 1e6).toFixed(3),
      "aria-valuenow": 0,
    });
    this.axis = el("canvas", { "aria-hidden": true });
    this.labels = el("div", { class: "tracks", role: "group", "aria-label": "Threads" }, ...this.tracks.map((t) => this.track(t)));
    if (this.order.length > this.tracks.length) {
      const left = this.order.length - this.tracks.length;
      this.labels.append(el("div", { class: "track dim", text: `${plural(left, "more thread")}, not drawn` }));
    }
    this.plot = el("div", { class: "plot" }, this.canvas);
    this.element = el("div", { class: "lanes" }, this.labels, this.plot);
    $("axis").append(this.axis);
    $("timeline").classList.toggle("processes", ofProcess.size > 1);
    $("states").hidden = !model.profile.waits;
    if (model.profile.waits) $("states").append(...stateLegend());
    this.fields = [$("range-from"), $("range-to")];
    for (const field of this.fields) {
      field.max = (model.whole / 1e6).toFixed(3);
      // A redraw must not overwrite text being typed.
      field.addEventListener("input", () => (this.typing = field));
      field.addEventListener("blur", () => (this.typing = null));
      field.addEventListener("change", () => this.typed());
    }
    this.listen();
    const { memory_over_time: observed } = model.profile.meta;
    this.memory = observed?.time_ns.length > 1 ? new MemoryChart(this) : null;
    new ResizeObserver(() => this.redraw()).observe(this.plot);
  }

  track(t) {
    const { name, tid, pid, number } = this.model.profile.threads[t];
    const title = `${name || "thread"} · thread ${tid} of process ${pid} · ${plural(this.samples[t], "sample")}`;
    const box = el("input", { type: "checkbox", checked: true, "aria-label": `Show ${title}` });
    box.addEventListener("change", () => this.toggle(t, box.checked));
    const only = el("button", { class: "bare only", text: "only", title: `Only ${title}`, onclick: () => this.toggleOnly(t) });
    const label = el(
      "label",
      { class: "track", title },
      box,
      el("span", { class: "name", text: name || number }),
      name ? el("span", { class: "dim num", text: number }) : null,
    );
    return el("div", { class: "lane" }, label, only);
  }

  toggle(t, on) {
    const threads = new Set(this.model.threads ?? this.model.profile.threads.keys());
    if (on) threads.add(t);
    else threads.delete(t);
    this.model.set({ threads: threads.size === this.model.profile.threads.length ? null : threads });
  }

  toggleOnly(t) {
    const { threads } = this.model;
    this.model.set({ threads: threads?.size === 1 && threads.has(t) ? null : new Set([t]) });
  }

  typed() {
    this.typing = null;
    const [from, to] = this.fields.map((field) => Math.round(parseFloat(field.value) * 1e6));
    this.choose(Number.isFinite(from) ? from : 0, Number.isFinite(to) ? to : this.model.whole);
  }

  // Selects a range in microseconds, both ends included.
  choose(from, to) {
    const { whole } = this.model;
    [from, to] = [Math.min(from, to), Math.max(from, to)].map((t) => Math.round(Math.min(Math.max(0, t), whole)));
    const all = from <= 0 && to >= whole;
    this.model.set({ range: all ? null : [from, to] });
    announce(all ? "Whole recording" : `${(from / 1e6).toFixed(2)} to ${(to / 1e6).toFixed(2)} seconds, ${this.model.amount(this.model.total)}`);
  }

  get width() {
    return this.plot.clientWidth;
  }

  // What tracks consist of, from the bottom: states where time off the CPU is known, else kinds; and their colors.
  parts() {
    const { kinds, waits } = this.model.profile;
    if (waits) return STATES.map((name, at) => ({ at, name: STATE_NAMES[name], color: this.palette.states[at] }));
    const order = ["python", "native", "inlined", "unknown", "truncated", "kernel", "state", "task", "worker", "thread", "process", "root"];
    return order.map((name) => ({ at: kinds.indexOf(name), name: KIND_NAMES[name], color: this.palette.kinds[kinds.indexOf(name)].base }));
  }

  // Samples by track, column and kind; or microseconds by track, column and state.
  binned(columns) {
    if (this.bins?.columns === columns) return this.bins;
    const { timeline, tree, functions, kinds, waits } = this.model.profile;
    const lane = new Int32Array(this.order.length).fill(-1);
    this.tracks.forEach((t, i) => (lane[t] = i));
    if (waits) {
      const { whole } = this.model;
      this.bins = { columns, size: STATES.length, full: whole / columns, data: stateTimes(this.model.profile, lane, this.tracks.length, columns, whole) };
      return this.bins;
    }
    const data = new Uint32Array(this.tracks.length * columns * kinds.length);
    const scale = columns / this.model.whole;
    for (let i = 0; i < timeline.n; i++) {
      const t = lane[timeline.thread[i]];
      if (t < 0) continue;
      const column = Math.min(columns - 1, Math.floor(timeline.time[i] * scale));
      data[(t * columns + column) * kinds.length + functions.kind[tree.fn[timeline.node[i]]]]++;
    }
    // The busiest column of all threads has full height.
    let full = 1;
    for (let i = 0; i < data.length; i += kinds.length) {
      let sum = 0;
      for (let k = 0; k < kinds.length; k++) sum += data[i + k];
      full = Math.max(full, sum);
    }
    this.bins = { columns, data, size: kinds.length, full };
    return this.bins;
  }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.paint();
      this.sync();
    });
  }

  paint() {
    const { width, tracks, palette, model } = this;
    if (width <= 0) return;
    const height = Math.max(1, tracks.length) * TRACK;
    const c = fit(this.canvas, width, height);
    const { colors } = palette;
    c.fillStyle = colors.panel;
    c.fillRect(0, 0, width, height);
    // Columns wide enough for several samples each, or a busy thread would look like a comb.
    const columns = Math.max(1, Math.floor(Math.min(width / 3, model.whole / model.period / 6)));
    const { data, size, full } = this.binned(columns);
    const parts = this.parts();
    tracks.forEach((t, lane) => {
      const bottom = (lane + 1) * TRACK - 3;
      const on = !model.threads || model.threads.has(t);
      c.globalAlpha = on ? 1 : 0.25;
      for (let column = 0; column < columns; column++) {
        const at = (lane * columns + column) * size;
        let y = bottom;
        let room = TRACK - 6;
        for (const { at: k, color } of parts) {
          const h = Math.min(room, (data[at + k] / full) * (TRACK - 6));
          if (h <= 0) continue;
          c.fillStyle = color;
          c.fillRect((column * width) / columns, y - h, width / columns - (width / columns > 8 ? 1 : 0), h);
          y -= h;
          room -= h;
        }
      }
      c.globalAlpha = 1;
      c.fillStyle = colors.line;
      c.fillRect(0, (lane + 1) * TRACK - 1, width, 1);
    });
    this.paintRange(c, width, height);
    this.memory?.paint();
    this.paintAxis();
  }

  // What is selected, and the place of the mouse.
  paintRange(c, width, height) {
    const { model } = this;
    const { colors } = this.palette;
    const range = this.drag ?? model.range;
    if (range) {
      const [left, right] = range.map((t) => (t / model.whole) * width);
      c.fillStyle = colors.panel;
      c.globalAlpha = 0.68;
      c.fillRect(0, 0, left, height);
      c.fillRect(right, 0, width - right, height);
      c.globalAlpha = 0.08;
      c.fillStyle = colors.accent;
      c.fillRect(left, 0, right - left, height);
      c.globalAlpha = 1;
      c.fillRect(left - 1, 0, 2, height);
      c.fillRect(right - 1, 0, 2, height);
    }
    if (this.hover !== undefined) {
      c.fillStyle = colors.dim;
      c.fillRect(Math.round(this.hover), 0, 1, height);
    }
  }

  paintAxis() {
    const { width, model, palette } = this;
    const c = fit(this.axis, width, 18);
    c.clearRect(0, 0, width, 18);
    c.font = palette.font.replace("12px", "11px");
    c.textBaseline = "middle";
    c.fillStyle = palette.colors.dim;
    const seconds = model.whole / 1e6;
    const wish = seconds / Math.max(2, width / 90);
    const power = 10 ** Math.floor(Math.log10(wish));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= wish) ?? power;
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let s = 0; s <= seconds; s += step) {
      const x = (s / seconds) * width;
      const text = s.toFixed(digits) + " s";
      const w = c.measureText(text).width;
      if (x + w + 6 > width) break;
      c.fillRect(x, 12, 1, 6);
      c.fillText(text, x + 4, 9);
    }
  }

  // Updates the input fields.
  sync() {
    const { model } = this;
    const [from, to] = model.range ?? [0, model.whole];
    [from, to].forEach((t, i) => {
      if (this.fields[i] !== this.typing) this.fields[i].value = (t / 1e6).toFixed(3);
    });
    this.canvas.setAttribute("aria-valuenow", (from / 1e6).toFixed(3));
    this.canvas.setAttribute("aria-valuetext", `${(from / 1e6).toFixed(3)} to ${(to / 1e6).toFixed(3)} seconds`);
    $("range-clear").disabled = !model.range;
    [...this.labels.querySelectorAll("input")].forEach((box, i) => (box.checked = !model.threads || model.threads.has(this.tracks[i])));
  }

  // Lets the mouse select a range on a canvas, and say what is there.
  select(canvas, describe) {
    const { model } = this;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return Math.min(1, Math.max(0, (event.clientX - box.left) / this.width)) * model.whole;
    };
    let start = null;
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !model.profile.timeline.n) return;
      const t = at(event);
      const near = (6 / this.width) * model.whole;
      start = t;
      // A handle is dragged relative to the other one.
      if (model.range && Math.abs(t - model.range[0]) < near) start = model.range[1];
      else if (model.range && Math.abs(t - model.range[1]) < near) start = model.range[0];
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const t = at(event);
      const box = canvas.getBoundingClientRect();
      this.hover = event.clientX - box.left;
      if (start !== null) {
        this.drag = [Math.min(start, t), Math.max(start, t)];
        tooltip.show([`${duration(this.drag[1] - this.drag[0])}`, `${(this.drag[0] / 1e6).toFixed(3)} s to ${(this.drag[1] / 1e6).toFixed(3)} s`], event.clientX, event.clientY);
      } else tooltip.show(describe(t, event.clientY - box.top), event.clientX, event.clientY);
      this.redraw();
    });
    canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      start = null;
      this.drag = null;
      if (!drag) return;
      if (((drag[1] - drag[0]) / model.whole) * this.width > 3) this.choose(...drag);
      else this.redraw();
    });
    canvas.addEventListener("pointerleave", () => {
      this.hover = undefined;
      tooltip.hide();
      this.redraw();
    });
    canvas.addEventListener("dblclick", () => this.choose(0, model.whole));
  }

  listen() {
    const { canvas, model } = this;
    this.select(canvas, (t, y) => this.describe(t, y));
    canvas.addEventListener("keydown", (event) => {
      const [from, to] = model.range ?? [0, model.whole];
      const step = model.whole / 50;
      if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
        const by = event.key === "ArrowRight" ? step : -step;
        if (event.shiftKey) this.choose(from, Math.max(from + step, to + by));
        else if (!model.range) this.choose(by > 0 ? 0 : model.whole - step * 5, by > 0 ? step * 5 : model.whole);
        else {
          const shift = Math.min(Math.max(by, -from), model.whole - to);
          this.choose(from + shift, to + shift);
        }
      } else if (event.key === "Escape" && model.range) this.choose(0, model.whole);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }

  describe(t, y) {
    const { model, tracks } = this;
    const thread = tracks[Math.floor(y / TRACK)];
    const lines = [`${(t / 1e6).toFixed(3)} s`];
    if (thread === undefined) return lines;
    lines.push(model.profile.threads[thread].label);
    const { columns, data, size, full } = this.bins;
    const { waits } = model.profile;
    const column = Math.min(columns - 1, Math.floor((t / model.whole) * columns));
    const at = (tracks.indexOf(thread) * columns + column) * size;
    for (const { at: k, name } of this.parts()) {
      const n = data[at + k];
      if (n) lines.push(`${name}: ${waits ? `${duration(n)} (${percent(n, full)})` : plural(n, "sample")}`);
    }
    return lines;
  }
}
