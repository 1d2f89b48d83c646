// Unpacks the profile that data.rs packed into typed arrays.

// Reads columns of LEB128 numbers. They may exceed 32 bits, so no shifts.
function columnReader(bytes, at) {
  return (length, Type) => {
    const out = new Type(length);
    for (let i = 0; i < length; i++) {
      let b = bytes[at++];
      let n = b & 127;
      for (let scale = 128; b >= 128; scale *= 128) {
        b = bytes[at++];
        n += (b & 127) * scale;
      }
      out[i] = n;
    }
    return out;
  };
}

// The module of a function: the file of native code, the package or script of Python code.
function moduleOf(kind, file, module) {
  if (kind !== "python") return module;
  const inside = /.*\/(?:site-packages|dist-packages|python3\.\d+t?)\/([^/]+)/.exec(file);
  return inside ? inside[1] : baseName(file);
}

// Text of a source file, or of parts of it.
class Excerpt {
  constructor(row) {
    this.row = row;
    this.length = row[1]; // lines of the file
    this.isEmpty = row.length === 2;
  }

  // [number, text] of each line. Made when it is wanted: there may be many files.
  get lines() {
    if (!this.made) {
      this.made = [];
      for (let i = 2; i < this.row.length; i += 2) this.made.push([this.row[i], clean(this.row[i + 1].replaceAll("\t", "    "))]);
    }
    return this.made;
  }
}

// The labels to choose from, spans first, each with the sets that have it; the set of each sample.
function readLabels(rows, sets) {
  const known = new Map();
  rows.forEach((row, set) => {
    for (let i = 0; i < row.length; i += 2) {
      const [key, value] = [clean(row[i]), clean(row[i + 1])];
      const text = `${key}=${value}`;
      if (!known.has(text)) known.set(text, { key, text, sets: new Set() });
      known.get(text).sets.add(set);
    }
  });
  const order = (a, b) => (b.key === "span") - (a.key === "span") || a.text.localeCompare(b.text, "en", { numeric: true });
  return { all: [...known.values()].sort(order), sets };
}

// Threads with the texts that say which one each is: `number` has its process too if there are several, `label` its name as well.
function readThreads(rows) {
  const hasProcesses = new Set(rows.map(([pid]) => pid)).size > 1;
  return rows.map(([pid, tid, name]) => {
    const thread = pid === tid && hasProcesses ? "" : `thread ${tid}`;
    const number = [hasProcesses && `process ${pid}`, thread].filter(Boolean).join(" · ");
    const known = clean(name);
    return { pid, tid, name: known, number, label: known ? `${shorten(known, 60)} (${number})` : number };
  });
}

async function readProfile(base64) {
  const bytes = await unpack(base64);
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const column = columnReader(bytes, 4 + length);

  const stacks = (n) => {
    const distance = column(Math.max(0, n - 1), Int32Array);
    const parent = new Int32Array(n);
    for (let i = 1; i < n; i++) parent[i] = i - distance[i - 1];
    const fn = column(n, Int32Array);
    const self = column(n, Float64Array);
    const lineCounts = column(n, Int32Array);
    const lineStart = new Int32Array(n + 1);
    for (let i = 0; i < n; i++) lineStart[i + 1] = lineStart[i] + lineCounts[i];
    const lines = column(lineStart[n], Int32Array);
    for (let i = 0; i < n; i++) for (let k = lineStart[i] + 1; k < lineStart[i + 1]; k++) lines[k] += lines[k - 1];
    const lineSamples = column(lineStart[n], Float64Array);
    const lineSelf = column(lineStart[n], Float64Array);
    return { tree: { n, parent, fn }, self, lineStart, lines, lineSamples, lineSelf };
  };
  const n = head.nodes;
  const full = stacks(n);

  const time = column(head.timeline, Float64Array);
  for (let i = 1; i < time.length; i++) time[i] += time[i - 1];
  const thread = column(head.timeline, Int32Array);
  const node = column(head.timeline, Int32Array);
  // The values to choose from: self amount by node, and the weight of each sample (null: 1).
  const values = head.values.map((value, at) => ({
    name: clean(value.name),
    unit: value.unit,
    self: at === 0 ? full.self : column(n, Float64Array),
    weight: value.weighted ? column(head.timeline, Float64Array) : null,
  }));
  // The same stacks without the interpreter's frames: where the samples of each node and entry of the timeline are there.
  const folded = stacks(head.folded);
  const into = column(n, Int32Array);
  full.node = node;
  full.selves = values.map((value) => value.self);
  folded.node = node.map((at) => into[at]);
  folded.selves = full.selves.map((self) => {
    const sums = new Float64Array(head.folded);
    for (let i = 0; i < n; i++) sums[into[i]] += self[i];
    return sums;
  });

  const waits = head.waits ? readWaits(head.waits, column(head.timeline, Int32Array), column(head.timeline, Float64Array)) : null;

  const labels = head.labels ? readLabels(head.labels, column(head.timeline, Int32Array)) : null;

  const { functions: f, kinds } = head;
  const files = head.files.map(clean);
  const natives = head.modules.map(clean);
  const modules = [];
  const moduleIds = new Map();
  const module = new Int32Array(f.count);
  const known = new Map();
  for (let i = 0; i < f.count; i++) {
    const key = `${f.kind[i]} ${f.file[i]} ${f.module[i]}`;
    let id = known.get(key);
    if (id === undefined) {
      const name = moduleOf(kinds[f.kind[i]], files[f.file[i]], natives[f.module[i]]);
      id = moduleIds.get(name);
      if (id === undefined) {
        id = modules.length;
        moduleIds.set(name, id);
        modules.push(name);
      }
      known.set(key, id);
    }
    module[i] = id;
  }
  const profile = {
    meta: cleanAll(head.meta),
    kinds,
    files,
    modules,
    categories: head.categories.map(clean),
    functions: {
      count: f.count,
      name: f.name.map((name) => clean(name) || "[unnamed]"),
      kind: Uint8Array.from(f.kind),
      file: Int32Array.from(f.file),
      module,
      category: Int32Array.from(f.category),
      line: Float64Array.from(f.line),
      hottest: Int32Array.from(f.hottest),
    },
    values,
    waits,
    labels,
    comparison: head.comparison ? comparison(head.comparison, f.count) : null,
    interpreterFrames: head.interpreterFrames,
    // Whether there are any to show.
    hasInterpreterFrames: head.folded !== n,
    threads: readThreads(head.threads),
    timeline: { n: head.timeline, time, thread, node },
    excerpts: new Map(head.excerpts.map((row) => [clean(row[0]), new Excerpt(row)])),
    noSource: head.noSource,
    lags: head.lags.map(([begin, length, task, place, fn, thread]) => ({ begin, length, task: clean(task), place: clean(place), fn, thread })),
    assembly: new Map(
      head.assembly.map(([fn, isChecked, ...rows]) => [
        fn,
        {
          isChecked,
          rows: rows.map(([address, length, text, samples, file, line]) => ({ address, length, text: clean(text), samples, place: file ? `${baseName(clean(file))}:${line}` : "" })),
        },
      ]),
    ),
    hasWorkers: f.kind.some((kind) => kinds[kind] === "worker"),
    workersApart: false,
    stacks(interpreterFrames) {
      const stacks = interpreterFrames ? full : folded;
      if (!this.workersApart) return stacks;
      const is = (names) => (fn) => names.includes(kinds[f.kind[fn]]);
      return (stacks.apart ??= workersApart(stacks, is(["worker"]), is(["process"])));
    },
    // The stacks that are not shown now.
    other() {
      return this.stacks(!this.interpreterFrames);
    },
    // Shows stacks with the interpreter's frames or without them, with native workers below the code that they work for, or apart.
    use(interpreterFrames, workersApart = this.workersApart) {
      this.workersApart = workersApart;
      const { tree, lineStart, lines, lineSamples, lineSelf, node, selves } = this.stacks(interpreterFrames);
      Object.assign(this, { interpreterFrames, tree, lineStart, lines, lineSamples, lineSelf });
      this.timeline.node = node;
      this.values.forEach((value, at) => (value.self = selves[at]));
    },
  };
  profile.use(profile.interpreterFrames);
  return profile;
}
