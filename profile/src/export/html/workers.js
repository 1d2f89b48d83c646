// Native workers are below the code that gave them work. Here the same stacks have each worker as a root of its own.

// `isWorker`, `isBase`: by function; a worker is moved to below the nearest base above it.
function workersApart(stacks, isWorker, isBase) {
  const { tree, lineStart, node, selves } = stacks;
  const nodes = new Nodes(tree.n);
  const place = new Int32Array(tree.n);
  const base = new Int32Array(tree.n); // by new node
  for (let i = 1; i < tree.n; i++) {
    const fn = tree.fn[i];
    const above = place[tree.parent[i]];
    const here = nodes.child(isWorker(fn) ? base[above] : above, fn);
    base[here] = isBase(fn) ? here : base[nodes.parent[here]];
    place[i] = here;
  }
  const { n } = nodes;
  const moved = { tree: { n, parent: nodes.parent.subarray(0, n), fn: nodes.fn.subarray(0, n) } };
  moved.node = node.map((at) => place[at]);
  moved.selves = selves.map((self) => {
    const sums = new Float64Array(n);
    for (let i = 0; i < tree.n; i++) sums[place[i]] += self[i];
    return sums;
  });
  moved.lineStart = new Int32Array(n + 1);
  for (let i = 0; i < tree.n; i++) moved.lineStart[place[i] + 1] += lineStart[i + 1] - lineStart[i];
  for (let i = 0; i < n; i++) moved.lineStart[i + 1] += moved.lineStart[i];
  const next = moved.lineStart.slice();
  const to = new Int32Array(stacks.lines.length);
  for (let i = 0; i < tree.n; i++) for (let k = lineStart[i]; k < lineStart[i + 1]; k++) to[k] = next[place[i]]++;
  for (const name of ["lines", "lineSamples", "lineSelf"]) {
    moved[name] = new stacks[name].constructor(to.length);
    to.forEach((at, k) => (moved[name][at] = stacks[name][k]));
  }
  return moved;
}
