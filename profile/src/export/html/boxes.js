// What a flame graph draws: boxes of a tree, or of the samples of a thread in chronological order.

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
    return comparison.part(this.view.fn[id]);
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
    const { timeline, tree } = model.profile;
    const [first, last] = model.range ?? [0, Infinity];
    const passes = model.only.map(({ matches }) => model.under(tree, matches));
    const times = new Float64Array(timeline.n);
    const nodes = new Int32Array(timeline.n);
    let kept = 0;
    for (let i = 0; i < timeline.n; i++) {
      if (timeline.thread[i] !== thread || timeline.time[i] < first || timeline.time[i] > last) continue;
      if (passes.length && !passes.every((under) => under[timeline.node[i]])) continue;
      times[kept] = timeline.time[i];
      nodes[kept++] = timeline.node[i];
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
