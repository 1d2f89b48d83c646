// Flame graphs on a canvas; only visible boxes are drawn. A source supplies boxes; the chart scrolls, zooms and selects.

const ROW = 20;

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
    const place = known && used + 60 < room ? shortModule(baseName(this.model.place(fn))) : "";
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
