// Tables of any length: only the rows in view are in the document.

const ROW_HEIGHT = 24;

class Rows {
  // options: label, role ("grid" or "treegrid"), columns [{ key, title, cell(row) -> node or text, num, sort }]; a title is text, or
  // a function that makes it from the rows shown;
  // onpick(row), onopen(row), onkey(event, index), why() -> what to say where there may be no row
  constructor(options) {
    this.options = options;
    this.rows = [];
    this.at = -1;
    this.made = new Map(); // the elements of the rows in view, by number
    this.head = el("div", { class: "row head", role: "row" });
    for (const column of options.columns) {
      const cell = el("div", { role: "columnheader", class: `cell ${column.key} ${column.num ? "num" : ""}` });
      column.head = cell;
      column.heading = cell;
      if (column.sort) {
        column.heading = el("button", { class: "bare", onclick: () => this.sort(column.key), title: column.help });
        cell.append(column.heading);
      } else if (column.help) cell.title = column.help;
      this.head.append(cell);
    }
    this.body = el("div", { class: "rows-body", role: "rowgroup" });
    this.scroller = el("div", { class: "rows-scroll", tabindex: 0, role: options.role, "aria-label": options.label }, el("div", { role: "rowgroup", class: "rows-head" }, this.head), this.body);
    this.nothing = el("p", { class: "nothing hint", hidden: true });
    this.element = el("div", { class: "rows" }, this.scroller, this.nothing);
    this.scroller.addEventListener("scroll", () => this.draw());
    this.scroller.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.scroller);
    this.name();
  }

  // Writes the titles of the columns.
  name() {
    for (const { heading, title } of this.options.columns) heading.textContent = typeof title === "function" ? title() : title;
  }

  show(rows, keep = false) {
    this.rows = rows;
    this.name();
    if (!keep) {
      this.at = -1;
      this.scroller.scrollTop = 0;
    }
    this.scroller.setAttribute("aria-rowcount", rows.length + 1);
    this.body.style.height = rows.length * ROW_HEIGHT + "px";
    this.made.clear();
    this.body.replaceChildren();
    this.nothing.hidden = rows.length > 0;
    this.nothing.textContent = rows.length ? "" : (this.options.why?.() ?? "");
    this.draw();
  }

  // Sorts by another column, or reverses the order.
  sort(key) {
    if (this.sorted === key) this.descending = !this.descending;
    else {
      this.sorted = key;
      this.descending = !!this.options.columns.find((c) => c.key === key).num;
    }
    this.options.onsort();
  }

  mark() {
    for (const column of this.options.columns) {
      if (!column.sort) continue;
      const on = column.key === this.sorted;
      column.head.setAttribute("aria-sort", on ? (this.descending ? "descending" : "ascending") : "none");
    }
  }

  draw() {
    const height = this.scroller.clientHeight;
    if (!height) return;
    const first = Math.max(0, Math.floor(this.scroller.scrollTop / ROW_HEIGHT) - 8);
    const last = Math.min(this.rows.length, Math.ceil((this.scroller.scrollTop + height) / ROW_HEIGHT) + 8);
    // Visible rows keep their elements: a row pressed while the list moves must still exist when released.
    for (const [i, element] of this.made) {
      if (i >= first && i < last) continue;
      element.remove();
      this.made.delete(i);
    }
    let next = null;
    for (let i = last - 1; i >= first; i--) {
      if (!this.made.has(i)) {
        this.made.set(i, this.row(i));
        this.body.insertBefore(this.made.get(i), next);
      }
      next = this.made.get(i);
      next.classList.toggle("at", i === this.at);
      next.setAttribute("aria-selected", String(i === this.at));
    }
    const id = `${this.options.id}-${this.at}`;
    if (this.at >= first && this.at < last) this.scroller.setAttribute("aria-activedescendant", id);
    else this.scroller.removeAttribute("aria-activedescendant");
  }

  row(i) {
    const row = this.rows[i];
    const element = el("div", {
      class: "row",
      role: "row",
      id: `${this.options.id}-${i}`,
      "aria-rowindex": i + 2,
    });
    element.style.top = i * ROW_HEIGHT + "px";
    for (const [key, value] of Object.entries(this.options.attributes?.(row) ?? {})) element.setAttribute(key, value);
    for (const column of this.options.columns) {
      element.append(el("div", { role: "gridcell", class: `cell ${column.key} ${column.num ? "num" : ""}` }, column.cell(row)));
    }
    // Buttons in a row handle their own clicks; they may rebuild the rows, so they must not be removed before that.
    const own = (event) => event.target.closest("input, button") !== null;
    element.addEventListener("click", (event) => own(event) || this.pick(i));
    element.addEventListener("dblclick", (event) => own(event) || this.options.onopen?.(row));
    return element;
  }

  pick(i) {
    this.at = i;
    this.options.onpick?.(this.rows[i], i);
    this.draw();
  }

  // Scrolls to a row.
  reveal(i) {
    const top = i * ROW_HEIGHT;
    const room = this.scroller.clientHeight - ROW_HEIGHT - 4;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    if (top + ROW_HEIGHT > this.scroller.scrollTop + room) this.scroller.scrollTop = top + ROW_HEIGHT - room;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== this.scroller) return;
    if (this.options.onkey?.(event, this.at)) {
      event.preventDefault();
      event.stopPropagation();
      return;
    }
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / ROW_HEIGHT) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps && this.rows.length) {
      const to = Math.min(this.rows.length - 1, Math.max(0, (this.at < 0 && steps[event.key] > 0 ? -1 : this.at) + steps[event.key]));
      this.reveal(to);
      this.pick(to);
    } else if (event.key === "Enter" && this.at >= 0) this.options.onopen?.(this.rows[this.at]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

// A share as a number on a bar.
function share(n, all) {
  const bar = el("span", { class: "bar" });
  bar.style.width = (all ? Math.min(100, (100 * n) / all) : 0) + "%";
  return el("span", { class: "share" }, bar, el("span", { text: percent(n, all) }));
}

// Heading of a column of amounts of the selected value.
function amountTitle({ comparison, value }) {
  if (comparison) return "Amount";
  const { name, unit } = value;
  return { nanoseconds: "Time", bytes: "Bytes" }[unit] ?? name.charAt(0).toUpperCase() + name.slice(1);
}

function functionName(model, fn) {
  const kind = model.kind(fn);
  const name = el("bdi", { class: "name", text: model.profile.functions.name[fn], title: shorten(model.profile.functions.name[fn], 600) });
  return el("span", { class: "function" + (model.search.matches?.[fn] ? " found" : "") }, el("i", { class: "dot " + kind, title: KIND_NAMES[kind] }), name);
}

// Functions with samples: the data of the canvas, for sorting, searching and screen readers.
class FunctionTable {
  constructor(model, options) {
    this.model = model;
    const { functions: f, modules } = model.profile;
    const columns = [
      { key: "self", title: "Self", num: true, sort: (a, b) => model.totals.self[a] - model.totals.self[b], cell: (fn) => share(model.totals.self[fn], model.total), help: "Samples with this function innermost" },
      { key: "selfn", title: () => amountTitle(model), num: true, sort: (a, b) => model.totals.self[a] - model.totals.self[b], cell: (fn) => model.number(model.totals.self[fn]) },
      { key: "total", title: "Total", num: true, sort: (a, b) => model.totals.all[a] - model.totals.all[b], cell: (fn) => share(model.totals.all[fn], model.total), help: "Samples with this function on the stack" },
      { key: "totaln", title: () => amountTitle(model), num: true, sort: (a, b) => model.totals.all[a] - model.totals.all[b], cell: (fn) => model.number(model.totals.all[fn]) },
      { key: "function", title: "Function", sort: (a, b) => (f.name[a] < f.name[b] ? -1 : f.name[a] > f.name[b] ? 1 : 0), cell: (fn) => functionName(model, fn) },
      { key: "kind", title: "Kind", sort: (a, b) => f.kind[a] - f.kind[b], cell: (fn) => KIND_NAMES[model.kind(fn)] },
      { key: "module", title: "Module", sort: (a, b) => (modules[f.module[a]] < modules[f.module[b]] ? -1 : 1), cell: (fn) => el("bdi", { text: shortModule(modules[f.module[fn]]), title: shorten(modules[f.module[fn]], 600) }) },
      { key: "place", title: "Source", cell: (fn) => sourceText(model.source(fn)) },
    ].filter((c) => options.columns.includes(c.key));
    if (model.comparison && options.columns.length > 3) {
      columns.splice(0, columns.findIndex((c) => c.key === "function"), ...changeColumns(model));
    }
    this.rows = new Rows({
      id: options.id,
      label: options.label,
      role: "grid",
      columns,
      onpick: options.onpick,
      onopen: options.onopen,
      onsort: () => this.refresh(),
      why: () => (model.search.matches ? `No function that is shown matches /${shorten(model.search.text, 100)}/.` : "No functions: no samples are shown."),
    });
    this.rows.sorted = options.sorted;
    this.rows.descending = true;
    this.element = this.rows.element;
  }

  refresh(keep = false) {
    const { model, rows } = this;
    const { search, totals } = model;
    const list = [];
    for (let i = 1; i < totals.all.length; i++) {
      if (totals.all[i] > 0 && !model.isGroup(i) && (!search.matches || search.matches[i])) list.push(i);
    }
    const column = rows.options.columns.find((c) => c.key === rows.sorted);
    const sign = rows.descending ? -1 : 1;
    list.sort((a, b) => sign * column.sort(a, b) || totals.all[b] - totals.all[a] || a - b);
    rows.mark();
    rows.show(list, keep);
    rows.at = list.indexOf(model.selected);
    rows.draw();
  }
}

// The name of a file with a line, which stays where there is not enough room.
function sourceText(source) {
  const text = baseName(source);
  return pathText(text, text.lastIndexOf(":"), source);
}

// The tree as expandable rows: the data of the flame graph, for keyboards and screen readers.
class CallTree {
  constructor(model, options) {
    this.model = model;
    this.open = new Set([0]);
    const columns = [
      { key: "total", title: "Total", num: true, cell: (i) => share(model.view.all[i], model.total) },
      { key: "totaln", title: () => amountTitle(model), num: true, cell: (i) => model.number(model.view.all[i]) },
      { key: "self", title: "Self", num: true, cell: (i) => model.number(model.view.self[i]) },
      { key: "function", title: "Function", cell: (i) => this.name(i) },
      { key: "place", title: "Where", cell: (i) => (i ? pathText(model.place(model.view.fn[i])) : "") },
    ];
    this.rows = new Rows({
      id: "tree-row",
      label: "Call tree. Right and left expand and collapse, star expands the hottest path",
      role: "treegrid",
      columns,
      onpick: (i) => options.onpick(model.view.fn[i]),
      onopen: (i) => this.toggle(i),
      onkey: (event, at) => this.key(event, at),
      attributes: (i) => ({
        "aria-level": model.view.depth[i] + 1,
        ...(this.isLeaf(i) ? {} : { "aria-expanded": String(this.open.has(i)) }),
      }),
    });
    this.element = this.rows.element;
  }

  isLeaf(i) {
    return this.model.view.end[i] <= i + 1;
  }

  name(i) {
    const { view } = this.model;
    const box = el("span", { class: "tree-name" });
    box.style.paddingLeft = Math.min(view.depth[i], 60) * 12 + "px";
    const arrow = el("button", { class: "bare arrow", tabindex: -1, "aria-hidden": true, text: this.isLeaf(i) ? "" : this.open.has(i) ? "▾" : "▸" });
    arrow.addEventListener("click", (event) => {
      event.stopPropagation();
      this.toggle(i);
    });
    box.append(arrow, functionName(this.model, view.fn[i]));
    return box;
  }

  toggle(i, on = !this.open.has(i)) {
    if (on) this.open.add(i);
    else this.open.delete(i);
    this.list(true);
  }

  key(event, at) {
    const i = this.rows.rows[at];
    if (i === undefined) return false;
    const { view } = this.model;
    if (event.key === "ArrowRight") {
      if (this.isLeaf(i)) return true;
      if (this.open.has(i)) this.rows.pick(at + 1);
      else this.toggle(i, true);
    } else if (event.key === "ArrowLeft") {
      if (this.open.has(i) && !this.isLeaf(i)) this.toggle(i, false);
      else {
        const up = this.rows.rows.indexOf(view.parent[i]);
        this.rows.reveal(up);
        this.rows.pick(up);
      }
    } else if (event.key === "*") {
      this.openPath(i);
      this.list(true);
    } else return false;
    return true;
  }

  // Expands the largest child repeatedly, while it has most of the samples.
  openPath(i) {
    const { view } = this.model;
    for (let k = 0; k < 200 && !this.isLeaf(i); k++) {
      this.open.add(i);
      if (view.all[i + 1] < view.all[i] * 0.5) break;
      i++;
    }
  }

  refresh() {
    this.open = new Set([0]);
    this.openPath(0);
    this.list(false);
  }

  list(keep) {
    const { view } = this.model;
    const rows = [];
    for (let i = 0; i < view.n; ) {
      rows.push(i);
      i = this.open.has(i) ? i + 1 : view.end[i];
    }
    this.rows.show(rows, keep);
  }
}
