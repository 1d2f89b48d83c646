// Trees of functions as typed arrays: parents before children, node 0 the root. Nothing recurses: stacks may be tens of
// thousands of frames deep.

// Finds or makes the node of a function below a parent.
class Nodes {
  constructor(room) {
    this.n = 1;
    this.parent = new Int32Array(room);
    this.fn = new Int32Array(room);
    this.self = new Float64Array(room);
    this.mask = 1;
    while (this.mask < room * 2) this.mask *= 2;
    this.slots = new Int32Array(this.mask--);
  }

  child(parent, fn) {
    let slot = (Math.imul(parent, 0x9e3779b1) ^ Math.imul(fn, 0x85ebca6b)) >>> 0;
    slot = (slot ^ (slot >>> 15)) & this.mask;
    for (;;) {
      const node = this.slots[slot];
      if (node === 0) break;
      if (this.parent[node] === parent && this.fn[node] === fn) return node;
      slot = (slot + 1) & this.mask;
    }
    const node = this.n++;
    this.slots[slot] = node;
    this.parent[node] = parent;
    this.fn[node] = fn;
    return node;
  }
}

// The tree without hidden functions; their samples go to their callers.
function fold(tree, self, hidden) {
  const { n, parent, fn } = tree;
  const nodes = new Nodes(n);
  const place = new Int32Array(n);
  nodes.self[0] = self[0];
  for (let i = 1; i < n; i++) {
    const above = place[parent[i]];
    const here = hidden[fn[i]] ? above : nodes.child(above, fn[i]);
    place[i] = here;
    nodes.self[here] += self[i];
  }
  return nodes;
}

// Largest first, else in input order. There are usually few.
function sortByCount(nodes, all) {
  if (nodes.length > 16) {
    nodes.sort((a, b) => all[b] - all[a] || a - b);
    return;
  }
  for (let k = 1; k < nodes.length; k++) {
    const node = nodes[k];
    let at = k;
    for (; at > 0 && all[nodes[at - 1]] < all[node]; at--) nodes[at] = nodes[at - 1];
    nodes[at] = node;
  }
}

// A tree ready to draw: only nodes with samples, in order from the root down, the largest child first.
// from: the node's number in the tree; x: samples left of it; end: the first node that is not below it; levels[d]: nodes at depth d from left to right.
function layOut(tree, self) {
  const { n, parent } = tree;
  const all = self.slice(0, n);
  for (let i = n - 1; i > 0; i--) all[parent[i]] += all[i];

  let live = 0;
  const start = new Int32Array(n + 1);
  for (let i = 1; i < n; i++) {
    if (all[i] > 0) {
      start[parent[i] + 1]++;
      live++;
    }
  }
  for (let i = 0; i < n; i++) start[i + 1] += start[i];
  const next = start.slice(0, n);
  const children = new Int32Array(live);
  for (let i = 1; i < n; i++) if (all[i] > 0) children[next[parent[i]]++] = i;
  for (let i = 0; i < n; i++) {
    if (start[i + 1] - start[i] > 1) sortByCount(children.subarray(start[i], start[i + 1]), all);
  }

  const size = live + 1;
  const out = {
    n: size,
    from: new Int32Array(size),
    parent: new Int32Array(size),
    fn: new Int32Array(size),
    self: new Float64Array(size),
    all: new Float64Array(size),
    x: new Float64Array(size),
    depth: new Int32Array(size),
    end: new Int32Array(size),
    depths: 1,
  };
  // Children are laid from the last to the first, so that the first is taken from the stack next.
  const stack = new Int32Array(size);
  const place = new Int32Array(n);
  const offset = new Float64Array(size);
  let top = 0;
  let made = 0;
  stack[top++] = 0;
  while (top > 0) {
    const i = stack[--top];
    const at = made++;
    place[i] = at;
    const up = i === 0 ? 0 : place[parent[i]];
    out.from[at] = i;
    out.parent[at] = up;
    out.fn[at] = tree.fn[i];
    out.self[at] = self[i];
    out.all[at] = all[i];
    if (i !== 0) {
      out.depth[at] = out.depth[up] + 1;
      if (out.depth[at] >= out.depths) out.depths = out.depth[at] + 1;
      out.x[at] = out.x[up] + offset[up];
      offset[up] += all[i];
    }
    for (let k = start[i + 1] - 1; k >= start[i]; k--) stack[top++] = children[k];
  }
  for (let i = size - 1; i >= 0; i--) {
    if (out.end[i] < i + 1) out.end[i] = i + 1;
    if (out.end[i] > out.end[out.parent[i]]) out.end[out.parent[i]] = out.end[i];
  }
  const perDepth = new Int32Array(out.depths + 1);
  for (let i = 0; i < size; i++) perDepth[out.depth[i] + 1]++;
  for (let d = 0; d < out.depths; d++) perDepth[d + 1] += perDepth[d];
  const free = perDepth.slice();
  out.levels = new Int32Array(size);
  out.level = perDepth;
  for (let i = 0; i < size; i++) out.levels[free[out.depth[i]]++] = i;
  return out;
}

// Calls visit(node, outermost) from the root down; outermost: no node above it is of the same function.
function walkOutermost(view, functions, visit) {
  const open = new Int32Array(functions);
  const path = new Int32Array(view.depths);
  let depth = -1;
  for (let i = 0; i < view.n; i++) {
    while (depth >= view.depth[i]) open[view.fn[path[depth--]]]--;
    const fn = view.fn[i];
    visit(i, open[fn] === 0);
    open[fn]++;
    path[++depth] = i;
  }
}

// Of the nearest callers of a function for which `isWanted`, the one with most of its samples; 0 if there is none.
function nearestCaller(view, functions, target, isWanted) {
  const sums = new Map();
  walkOutermost(view, functions, (i, outermost) => {
    if (!outermost || view.fn[i] !== target) return;
    let up = view.parent[i];
    while (up > 0 && !isWanted(view.fn[up])) up = view.parent[up];
    if (up > 0) sums.set(view.fn[up], (sums.get(view.fn[up]) ?? 0) + view.all[i]);
  });
  let best = 0;
  for (const [fn, n] of sums) if (n > (sums.get(best) ?? 0)) best = fn;
  return best;
}

// Samples of each function: total and self.
function functionTotals(view, functions) {
  const self = new Float64Array(functions);
  const all = new Float64Array(functions);
  walkOutermost(view, functions, (i, outermost) => {
    const fn = view.fn[i];
    self[fn] += view.self[i];
    if (outermost) all[fn] += view.all[i];
  });
  return { self, all };
}

// Callers and callees of a function, over all nodes where its caller is another function.
const MAX_CALLERS = 600;
const MAX_STEPS = 2e6;

function sandwich(view, functions, target) {
  const outer = [];
  walkOutermost(view, functions, (i, outermost) => {
    if (outermost && view.fn[i] === target) outer.push(i);
  });
  let below = 1;
  for (const i of outer) below += view.end[i] - i;
  const callees = new Nodes(below + 1);
  const place = new Int32Array(view.n);
  const top = callees.child(0, target);
  for (const i of outer) {
    place[i] = top;
    callees.self[top] += view.self[i];
    for (let k = i + 1; k < view.end[i]; k++) {
      place[k] = callees.child(place[view.parent[k]], view.fn[k]);
      callees.self[place[k]] += view.self[k];
    }
  }
  // Towards the root each node has one path, so the work is bounded.
  let steps = 0;
  for (const i of outer) steps += Math.min(view.depth[i], MAX_CALLERS);
  const most = steps > MAX_STEPS ? Math.max(8, Math.floor(MAX_STEPS / outer.length)) : MAX_CALLERS;
  const callers = new Nodes(Math.min(steps, most * outer.length) + 2);
  const self = callers.child(0, target);
  for (const i of outer) {
    let node = self;
    let up = view.parent[i];
    for (let k = 0; up > 0 && k < most; k++) {
      node = callers.child(node, view.fn[up]);
      up = view.parent[up];
    }
    callers.self[node] += view.all[i];
  }
  return { callers: layOut(callers, callers.self), callees: layOut(callees, callees.self) };
}
