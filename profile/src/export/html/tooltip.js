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
