// Flame graphs on a canvas; only visible boxes are drawn. A source supplies boxes; the chart scrolls, zooms and selects.

const ROW = 20;

// Boxes of a laid-out tree, without the first `skip` levels.
class TreeSource {
  constructor(view, skip = 0) {
    this.view = view;
    this.skip = skip;
    this.rows = Math.max(0, view.depths - skip);
    this.width = Math.max(view.all[0], 1e-9);
  }

  // Calls box(id, function, x, width, crowd) for the boxes of a row between two positions. Adjacent boxes narrower than
  // `least` are combined: one call with `crowd` set.
  row(row, from, to, least, box) {
    const { level, levels, x, all, fn } = this.view;
    const depth = row + this.skip;
    const stop = level[depth + 1];
    let k = this.after(depth, from);
    while (k < stop) {
      const i = levels[k];
      if (x[i] >= to) break;
      if (all[i] >= least) {
        box(i, fn[i], x[i], all[i], false);
        k++;
      } else {
        const next = this.after(depth, x[i] + least);
        const last = levels[Math.max(k, next - 1)];
        box(i, fn[i], x[i], Math.min(least, x[last] + all[last] - x[i]), true);
        k = Math.max(k + 1, next);
      }
    }
  }

  // The first box of a level that ends after x.
  after(depth, at) {
    const { level, levels, x, all } = this.view;
    let low = level[depth];
    let high = level[depth + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      const i = levels[middle];
      if (x[i] + all[i] > at) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  at(row, x) {
    const depth = row + this.skip;
    if (row < 0 || row >= this.rows) return -1;
    const k = this.after(depth, x);
    if (k >= this.view.level[depth + 1]) return -1;
    const i = this.view.levels[k];
    return this.view.x[i] <= x ? i : -1;
  }

  fn(id) {
    return this.view.fn[id];
  }

  box(id) {
    return { x: this.view.x[id], width: this.view.all[id], row: this.view.depth[id] - this.skip };
  }

  samples(id) {
    return { all: this.view.all[id], self: this.view.self[id] };
  }

  // The change of a box, as `Comparison.part` has it.
  part(id, comparison) {
    return this.skip ? comparison.part(...this.sides(id, comparison)) : comparison.parts[id];
  }

  // The amounts of a box in both profiles: in the graphs of callers and callees, those of its function.
  sides(id, comparison) {
    return this.skip ? comparison.ofFunction(this.view.fn[id]) : comparison.ofNode(id);
  }

  move(id, key) {
    const { view } = this;
    if (key === "out") return view.depth[id] > this.skip ? view.parent[id] : id;
    if (key === "in") return view.end[id] > id + 1 ? id + 1 : id;
    const d = view.depth[id];
    let low = view.level[d];
    let high = view.level[d + 1];
    while (view.levels[low] !== id && low < high) {
      const middle = (low + high) >> 1;
      if (view.levels[middle] <= id) low = middle;
      else high = middle;
    }
    const next = low + (key === "right" ? 1 : -1);
    return next >= view.level[d] && next < view.level[d + 1] ? view.levels[next] : id;
  }

  first() {
    return this.rows > 0 && this.view.n > this.skip ? this.view.levels[this.view.level[this.skip]] : -1;
  }
}

// Stacks of one thread in chronological order. Each pixel column shows one sample; with fewer samples than pixels all are
// shown. Adjacent boxes of the same function are combined.
class TimeSource {
  constructor(model, thread) {
    this.model = model;
    const { ticks, tree } = model.profile;
    const [first, last] = model.range ?? [0, Infinity];
    const passes = model.only.map(({ matches }) => model.under(tree, matches));
    const times = new Float64Array(ticks.n);
    const nodes = new Int32Array(ticks.n);
    let kept = 0;
    for (let i = 0; i < ticks.n; i++) {
      if (ticks.thread[i] !== thread || ticks.time[i] < first || ticks.time[i] > last) continue;
      if (passes.length && !passes.every((under) => under[ticks.node[i]])) continue;
      times[kept] = ticks.time[i];
      nodes[kept++] = ticks.node[i];
    }
    this.time = times.subarray(0, kept);
    this.node = nodes.subarray(0, kept);
    this.origin = model.range ? model.range[0] : 0;
    this.width = Math.max(1, (model.range ? Math.min(model.range[1], model.whole) : model.whole) - this.origin);
    this.depth = new Int32Array(tree.n);
    for (let i = 1; i < tree.n; i++) {
      this.depth[i] = this.depth[tree.parent[i]] + (model.hidden?.[tree.fn[i]] ? 0 : 1);
    }
    this.rows = 0;
    for (const node of this.node) if (this.depth[node] > this.rows) this.rows = this.depth[node];
    // Longer times without a sample are drawn as gaps. The short gaps of a thread that got part of a core are not.
    const { time } = this;
    const steps = new Float64Array(Math.min(10000, Math.max(0, time.length - 1)));
    const stride = Math.max(1, Math.floor((time.length - 1) / Math.max(1, steps.length)));
    for (let k = 0; k < steps.length; k++) steps[k] = time[k * stride + 1] - time[k * stride];
    steps.sort();
    this.rest = Math.max(model.period * 1.5, 4 * (steps[steps.length >> 1] ?? 0));
    this.boxes = [];
  }

  // The boxes of all rows between two positions, for columns of this width.
  prepare(from, to, step, firstRow, lastRow) {
    const wanted = [from, to, step, firstRow, lastRow].join();
    if (wanted === this.prepared) return;
    this.prepared = wanted;
    const { tree } = this.model.profile;
    const { time, node, depth, origin } = this;
    const period = this.model.period;
    const rows = Array.from({ length: Math.max(0, lastRow - firstRow + 1) }, () => []);
    const open = rows.map(() => null);
    const find = (at) => {
      let low = 0;
      let high = time.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (time[middle] - origin >= at) high = middle;
        else low = middle + 1;
      }
      return low;
    };
    let k = Math.max(0, find(from) - 1);
    const path = new Int32Array(rows.length);
    while (k < time.length) {
      const start = time[k] - origin;
      if (start >= to) break;
      const next = Math.max(k + 1, find(start + step));
      const due = Math.max(step * 3, this.rest);
      const gap = next < time.length ? time[next] - origin - start : period;
      const end = start + (gap > due ? Math.min(gap, Math.max(period, step)) : gap);
      let leaf = node[k];
      const reach = Math.min(depth[leaf] - firstRow, rows.length);
      for (; leaf !== 0; leaf = tree.parent[leaf]) {
        const row = depth[leaf] - 1 - firstRow;
        if (row < rows.length && row >= 0 && depth[leaf] > depth[tree.parent[leaf]]) path[row] = tree.fn[leaf];
        if (row < 0) break;
      }
      let same = true;
      for (let row = 0; row < rows.length; row++) {
        const last = open[row];
        if (row >= reach) {
          open[row] = null;
          continue;
        }
        same = same && last !== null && last.fn === path[row] && start - last.end <= step * 0.01;
        if (same) {
          last.end = end;
          last.samples += next - k;
        } else {
          open[row] = { fn: path[row], start, end, samples: next - k, row: row + firstRow };
          rows[row].push(open[row]);
        }
      }
      k = next;
    }
    this.boxes = [];
    this.starts = rows.map((row) => {
      const at = this.boxes.length;
      this.boxes.push(...row);
      return [at, this.boxes.length];
    });
    this.firstRow = firstRow;
  }

  row(row, from, to, least, box) {
    const [start, stop] = this.starts[row - this.firstRow] ?? [0, 0];
    for (let k = start; k < stop; k++) {
      const b = this.boxes[k];
      if (b.end > from && b.start < to) box(k, b.fn, b.start, b.end - b.start, false);
    }
  }

  at(row, x) {
    const [start, stop] = this.starts?.[row - this.firstRow] ?? [0, 0];
    for (let k = start; k < stop; k++) if (this.boxes[k].start <= x && this.boxes[k].end > x) return k;
    return -1;
  }

  fn(id) {
    return this.boxes[id]?.fn ?? 0;
  }

  box(id) {
    const b = this.boxes[id] ?? { start: 0, end: this.width, row: 0 };
    return { x: b.start, width: b.end - b.start, row: b.row };
  }

  samples(id) {
    const b = this.boxes[id];
    return b ? { span: b.end - b.start, seen: b.samples, from: b.start + this.origin } : {};
  }

  // Boxes exist only for the visible part, so keys move between those.
  move(id, key) {
    const b = this.boxes[id];
    if (!b) return this.first();
    const middle = (b.start + b.end) / 2;
    let next = -1;
    if (key === "out") next = this.at(b.row - 1, middle);
    if (key === "in") for (let k = 0; k < 20 && next < 0; k++) next = this.at(b.row + 1, b.start + ((b.end - b.start) * (k + 0.5)) / 20);
    if (key === "left" && this.boxes[id - 1]?.row === b.row) next = id - 1;
    if (key === "right" && this.boxes[id + 1]?.row === b.row) next = id + 1;
    return next < 0 ? id : next;
  }

  first() {
    return this.boxes.length ? 0 : -1;
  }
}

class Chart {
  // options: label, upward (root at the bottom), onselect(function, id), describe(source, id) -> lines of text
  constructor(model, palette, options) {
    Object.assign(this, { model, palette, options });
    this.letters = new Letters();
    this.upward = !!options.upward;
    this.canvas = el("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": options.role ?? "flame graph",
      "aria-label": options.label,
      "aria-describedby": "chart-keys",
    });
    this.spacer = el("div", { class: "spacer" });
    this.scroller = el("div", { class: "scroller", tabindex: -1 }, this.canvas, this.spacer);
    this.element = this.scroller;
    this.source = null;
    this.from = 0;
    this.to = 1;
    this.hover = -1;
    this.chosen = -1;
    this.painted = 0; // height of the window when it was last painted
    this.toRoot = false; // scroll to the roots when the content has its height
    this.history = [];
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.scroller);
  }

  show(source, keep = false) {
    const old = this.source;
    this.source = source;
    this.hover = -1;
    this.chosen = -1;
    this.anchor = null;
    this.zoomed = -1;
    this.history = [];
    this.moving = null;
    if (!keep || !old || old.width !== source.width) {
      this.from = 0;
      this.to = source.width;
    }
    this.toRoot ||= !keep;
    this.draw();
  }

  get width() {
    return this.scroller.clientWidth;
  }

  get height() {
    return this.scroller.clientHeight;
  }

  y(row) {
    const content = Math.max(this.source.rows * ROW, this.height);
    return (this.upward ? content - (row + 1) * ROW : row * ROW) - this.scroller.scrollTop;
  }

  rowAt(y) {
    const content = Math.max(this.source.rows * ROW, this.height);
    const at = y + this.scroller.scrollTop;
    return Math.floor((this.upward ? content - at : at) / ROW);
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.paint();
    });
  }

  paint() {
    const { source, width, height, palette, model } = this;
    if (!source || width <= 0 || height <= 0) return;
    this.spacer.style.height = Math.max(0, source.rows * ROW - height) + "px";
    const c = fit(this.canvas, width, height);
    // Only now the content has its height: before, there may be nowhere to scroll to.
    if (this.toRoot) this.scroller.scrollTop = this.upward ? this.scroller.scrollHeight : 0;
    // Roots that are at the bottom stay there when the window gets lower.
    else if (this.upward && this.painted) this.scroller.scrollTop += this.painted - height;
    this.toRoot = false;
    this.painted = height;
    c.fillStyle = palette.colors.panel;
    c.fillRect(0, 0, width, height);
    this.letters.use(c, palette.font);
    const scale = width / (this.to - this.from);
    const least = 1 / scale;
    const rows = [this.rowAt(0), this.rowAt(height - 1)].sort((a, b) => a - b);
    const firstRow = Math.max(0, rows[0]);
    const lastRow = Math.min(source.rows - 1, rows[1]);
    if (source.prepare) {
      source.prepare(this.from, this.to, least, firstRow, lastRow);
      if (this.anchor) this.chosen = source.at(this.anchor.row, this.anchor.x);
    }
    const found = model.search.matches;
    const selected = model.selected;
    const zoom = this.zoomed >= 0 && !source.prepare ? source.box(this.zoomed) : null;
    for (let row = firstRow; row <= lastRow; row++) {
      const y = this.y(row);
      // Boxes too narrow to distinguish are drawn together while they have the same color.
      let run = null;
      const flush = () => {
        if (!run) return;
        c.fillStyle = run.fill;
        c.fillRect(run.left, y, Math.max(run.right - run.left, 0.7), ROW - 1);
        run = null;
      };
      source.row(row, this.from, this.to, least, (id, fn, x, w, crowd) => {
        const left = Math.max(0, (x - this.from) * scale);
        const right = Math.min(width, (x + w - this.from) * scale);
        const room = right - left;
        const dimmed = found && !found[fn];
        const gap = room > 8 ? 1 : room > 4 ? 0.5 : 0;
        const part = model.comparison ? source.part(id, model.comparison) : 0;
        const how = dimmed ? "dimmed" : crowd ? "crowd" : "tints";
        const fill = found && found[fn] ? palette.colors.found : model.comparison && !dimmed ? palette.change(part) : palette.fill(fn, how);
        if (crowd) {
          if (run && run.fill === fill && left - run.right < 0.5) run.right = right;
          else {
            flush();
            run = { fill, left, right };
          }
          return;
        }
        c.fillStyle = fill;
        if (zoom && row < zoom.row) c.globalAlpha = 0.55;
        c.fillRect(left, y, Math.max(room - gap, 0.7), ROW - 1);
        // New and vanished subtrees: not by color alone.
        const mark = part === 1 ? "+ " : part === -1 ? "− " : "";
        if (mark && room > 4) {
          c.strokeStyle = palette.colors["frame-text"];
          c.lineWidth = 1;
          c.setLineDash(part < 0 ? [3, 2] : []);
          c.strokeRect(left + 0.5, y + 0.5, room - gap - 1, ROW - 2);
          c.setLineDash([]);
        }
        if (fn === selected) {
          c.strokeStyle = palette.colors.accent;
          c.lineWidth = 1;
          if (room > 4) c.strokeRect(left + 0.5, y + 0.5, room - gap - 1, ROW - 2);
        }
        if (id === this.hover) {
          c.fillStyle = "rgba(255,255,255,0.28)";
          c.fillRect(left, y, room - gap, ROW - 1);
        }
        if (room > 22) this.label(c, fn, left + 5, y + ROW / 2, room - 10, dimmed, mark);
        c.globalAlpha = 1;
      });
      flush();
    }
    if (this.chosen >= 0 && document.activeElement === this.canvas) this.ring(c, scale);
    this.options.onview?.(this);
  }

  label(c, fn, x, y, room, dimmed, mark) {
    const { name } = this.model.profile.functions;
    c.fillStyle = dimmed ? this.palette.colors.faint : this.palette.colors["frame-text"];
    const used = this.letters.draw(c, mark + name[fn], x, y, room);
    const known = !this.model.isGroup(fn) && this.model.kind(fn) !== "unknown";
    const place = known && used + 60 < room ? baseName(this.model.place(fn)) : "";
    if (place) {
      c.globalAlpha *= 0.6;
      this.letters.draw(c, place, x + used + 8, y, room - used - 8);
      c.globalAlpha = 1;
    }
  }

  // The box with the keyboard focus.
  ring(c, scale) {
    const { x, width, row } = this.source.box(this.chosen);
    const left = Math.max(1, (x - this.from) * scale);
    const right = Math.min(this.width - 1, (x + width - this.from) * scale);
    if (right < 0 || left > this.width) return;
    c.strokeStyle = this.palette.colors.accent;
    c.lineWidth = 2;
    c.strokeRect(left, this.y(row), Math.max(2, right - left - 1), ROW - 1);
  }

  // Zooms to a part of the width, animated unless the user prefers reduced motion.
  zoomTo(from, to) {
    const width = this.source.width;
    const least = Math.min(width, this.source.prepare ? 10 : 0.5);
    const span = Math.min(width, Math.max(least, to - from));
    from = Math.min(Math.max(0, from), width - span);
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const [from0, to0, start] = [this.from, this.to, performance.now()];
    const step = () => {
      const t = still ? 1 : Math.min(1, (performance.now() - start) / 140);
      const eased = 1 - (1 - t) ** 3;
      this.from = from0 + (from - from0) * eased;
      this.to = t === 1 ? from + span : to0 + (from + span - to0) * eased;
      this.paint();
      if (t < 1 && this.moving === step) requestAnimationFrame(step);
    };
    this.moving = step;
    step();
  }

  zoom(id) {
    const { x, width } = this.source.box(id);
    this.history.push([this.from, this.to, this.zoomed]);
    this.zoomed = this.source.prepare ? -1 : id;
    this.zoomTo(x, x + width);
  }

  back(all = false) {
    const last = all ? [0, this.source.width, -1] : (this.history.pop() ?? [0, this.source.width, -1]);
    if (all) this.history = [];
    this.zoomed = last[2];
    this.zoomTo(last[0], last[1]);
  }

  get isZoomed() {
    return this.from > 0 || this.to < this.source.width;
  }

  pick(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = this.from + ((event.clientX - box.left) / this.width) * (this.to - this.from);
    return this.source ? this.source.at(this.rowAt(event.clientY - box.top), x) : -1;
  }

  choose(id, say = false) {
    this.chosen = id;
    if (id < 0) return;
    const { x, width, row } = this.source.box(id);
    this.anchor = { row, x: x + width / 2 };
    const lines = this.options.describe(this.source, id);
    if (say) announce(lines.join(", "));
    this.options.onselect(this.source.fn(id), id);
    this.draw();
  }

  // Scrolls a box into view.
  reveal(id) {
    const { row } = this.source.box(id);
    const y = this.y(row);
    if (y < 0) this.scroller.scrollTop += y - ROW;
    if (y > this.height - ROW) this.scroller.scrollTop += y - this.height + 2 * ROW;
  }

  listen() {
    const { canvas, scroller } = this;
    let drag = null;
    scroller.addEventListener("scroll", () => this.paint());
    canvas.addEventListener("pointermove", (event) => {
      if (drag) {
        const dx = event.clientX - drag.x;
        if (Math.abs(dx) > 4 || Math.abs(event.clientY - drag.y) > 4) drag.moved = true;
        if (drag.moved) {
          const shift = (dx / this.width) * (this.to - this.from);
          const from = Math.min(Math.max(0, drag.from - shift), this.source.width - (this.to - this.from));
          this.to += from - this.from;
          this.from = from;
          scroller.scrollTop = drag.top - (event.clientY - drag.y);
          tooltip.hide();
          this.paint();
        }
        return;
      }
      const id = this.pick(event);
      if (id !== this.hover) {
        this.hover = id;
        canvas.style.cursor = id >= 0 ? "pointer" : "default";
        this.draw();
      }
      if (id >= 0) tooltip.show(this.options.describe(this.source, id), event.clientX, event.clientY);
      else tooltip.hide();
    });
    canvas.addEventListener("pointerleave", () => {
      this.hover = -1;
      tooltip.hide();
      this.draw();
    });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      drag = { x: event.clientX, y: event.clientY, from: this.from, top: scroller.scrollTop, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointercancel", () => (drag = null));
    canvas.addEventListener("pointerup", (event) => {
      if (!drag) return;
      const moved = drag.moved;
      drag = null;
      if (moved) return;
      const id = this.pick(event);
      if (id < 0) return;
      this.choose(id);
      if (!this.isWide(id)) this.zoom(id);
    });
    canvas.addEventListener("dblclick", (event) => {
      const id = this.pick(event);
      if (id >= 0) this.options.onopen?.(this.source.fn(id));
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (event.ctrlKey || event.metaKey) {
          event.preventDefault();
          const box = canvas.getBoundingClientRect();
          const part = (event.clientX - box.left) / this.width;
          const at = this.from + part * (this.to - this.from);
          const span = Math.min(this.source.width, (this.to - this.from) * Math.exp(event.deltaY * 0.01));
          this.moving = null;
          this.setSpan(at - part * span, span);
        } else if (event.deltaX || event.shiftKey) {
          event.preventDefault();
          const by = ((event.deltaX || event.deltaY) / this.width) * (this.to - this.from);
          this.moving = null;
          this.setSpan(this.from + by, this.to - this.from);
        }
      },
      { passive: false },
    );
    canvas.addEventListener("focus", () => {
      if (this.chosen < 0 && this.source && canvas.matches(":focus-visible")) this.choose(this.source.first(), true);
      this.draw();
    });
    canvas.addEventListener("blur", () => this.draw());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  setSpan(from, span) {
    const { width } = this.source;
    span = Math.max(Math.min(width, span), Math.min(width, this.source.prepare ? 10 : 0.5));
    this.from = Math.min(Math.max(0, from), width - span);
    this.to = this.from + span;
    this.zoomed = -1;
    this.paint();
  }

  isWide(id) {
    const { x, width } = this.source.box(id);
    return Math.abs(x - this.from) < 1e-9 && Math.abs(x + width - this.to) < 1e-9;
  }

  key(event) {
    if (!this.source || event.ctrlKey || event.metaKey || event.altKey) return;
    const moves = {
      ArrowUp: this.upward ? "in" : "out",
      ArrowDown: this.upward ? "out" : "in",
      ArrowLeft: "left",
      ArrowRight: "right",
    };
    const span = this.to - this.from;
    if (moves[event.key]) {
      const id = this.chosen < 0 ? this.source.first() : this.source.move(this.chosen, moves[event.key]);
      if (id >= 0) {
        this.choose(id, true);
        this.reveal(id);
        const { x, width } = this.source.box(id);
        if (x + width <= this.from || x >= this.to) this.zoomTo(x, x + Math.max(span, width));
      }
    } else if (event.key === "Enter" && this.chosen >= 0) this.zoom(this.chosen);
    else if (event.key === "Backspace") this.back();
    else if (event.key === "Escape" && this.isZoomed) this.back(true);
    else if (event.key === "+" || event.key === "=") this.setSpan(this.from + span / 4, span / 2);
    else if (event.key === "-") this.setSpan(this.from - span / 2, span * 2);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

// The tooltip of the page; its first line is the name.
const tooltip = {
  show(lines, x, y) {
    const box = $("tooltip");
    box.replaceChildren(...lines.map((line, i) => el(i ? "div" : "strong", { text: shorten(line, 300) })));
    box.hidden = false;
    const { offsetWidth: w, offsetHeight: h } = box;
    const left = x + 14 + w > innerWidth ? x - w - 10 : x + 14;
    const top = y + 18 + h > innerHeight ? y - h - 10 : y + 18;
    box.style.left = Math.max(4, left) + "px";
    box.style.top = Math.max(4, top) + "px";
  },
  hide() {
    $("tooltip").hidden = true;
  },
};
