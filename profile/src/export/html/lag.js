// What kept event loops for long, of a recording with --lag.

class LagPanel {
  constructor(model, options) {
    this.model = model;
    const { threads } = model.profile;
    const text = (key) => (a, b) => (a[key] < b[key] ? -1 : a[key] > b[key] ? 1 : 0);
    const number = (key) => (a, b) => a[key] - b[key];
    this.rows = new Rows({
      id: "lag-row",
      label: "Callbacks and task steps that blocked an event loop for long",
      role: "grid",
      columns: [
        { key: "time", title: "Took", num: true, sort: number("length"), cell: (lag) => duration(lag.length) },
        { key: "at", title: "At", num: true, sort: number("begin"), cell: (lag) => `${(lag.begin / 1e6).toFixed(3)} s` },
        { key: "task", title: "Task", sort: text("task"), cell: (lag) => el("bdi", { text: lag.task || "-", title: shorten(lag.task, 600) }) },
        { key: "function", title: "Where", sort: text("place"), cell: (lag) => placeText(lag.place) },
        { key: "thread", title: "Thread", sort: number("thread"), cell: (lag) => (lag.thread < 0 ? "-" : threads[lag.thread].label) },
      ],
      onpick: options.onpick,
      onopen: options.onopen,
      onsort: () => this.refresh(),
    });
    this.rows.sorted = "time";
    this.rows.descending = true;
    this.element = [el("p", { class: "hint", text: "While one of these ran, no other task of its event loop could. Click one to choose the samples of its time, twice to see their stacks." }), this.rows.element];
  }

  // Always all of them: a click chooses a range of time.
  refresh() {
    const { rows, model } = this;
    const column = rows.options.columns.find((c) => c.key === rows.sorted);
    const sign = rows.descending ? -1 : 1;
    const list = [...model.profile.lags].sort((a, b) => sign * column.sort(a, b) || b.length - a.length);
    const at = list.indexOf(rows.rows[rows.at]);
    rows.mark();
    rows.show(list, true);
    rows.at = at;
    rows.draw();
  }
}
