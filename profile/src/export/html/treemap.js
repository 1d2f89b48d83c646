// Lays out a treemap: rectangles with areas in proportion to amounts, as square as can be.

// The rectangle of each amount, which must descend, in { x, y, w, h }.
function squarify(amounts, { x, y, w, h }) {
  const out = [];
  let left = amounts.reduce((sum, n) => sum + n, 0);
  let at = 0;
  while (at < amounts.length && left > 0) {
    const side = Math.max(1e-9, Math.min(w, h));
    const scale = (w * h) / left;
    // How far from square the worst rectangle of a strip is: more of them make it thicker, until they are too long.
    const worst = (sum, first, last) => {
      const thick = (sum * scale) / side;
      const long = [first, last].map((n) => (n * scale) / thick);
      return Math.max(...long.map((length) => Math.max(thick / length, length / thick)));
    };
    let [end, sum] = [at + 1, amounts[at]];
    let shape = worst(sum, amounts[at], amounts[at]);
    while (end < amounts.length && amounts[end] > 0) {
      const next = worst(sum + amounts[end], amounts[at], amounts[end]);
      if (next > shape) break;
      shape = next;
      sum += amounts[end++];
    }
    const thick = (sum * scale) / side;
    let along = 0;
    for (; at < end; at++) {
      const length = (amounts[at] * scale) / Math.max(1e-9, thick);
      out.push(w >= h ? { x, y: y + along, w: thick, h: length } : { x: x + along, y, w: length, h: thick });
      along += length;
    }
    left -= sum;
    if (w >= h) [x, w] = [x + thick, w - thick];
    else [y, h] = [y + thick, h - thick];
  }
  while (out.length < amounts.length) out.push({ x, y, w: 0, h: 0 });
  return out;
}

// The index of the nearest rectangle in a direction, -1 for none. Rectangles that lie further to the side count less.
function neighbor(rectangles, from, key) {
  const middle = ({ x, y, w, h }) => [x + w / 2, y + h / 2];
  const [fromX, fromY] = middle(rectangles[from]);
  const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[key];
  let [best, least] = [-1, Infinity];
  rectangles.forEach((rectangle, at) => {
    const [toX, toY] = middle(rectangle);
    const ahead = (toX - fromX) * dx + (toY - fromY) * dy;
    if (at === from || ahead <= 0.5) return;
    const aside = Math.abs((toX - fromX) * dy) + Math.abs((toY - fromY) * dx);
    const distance = ahead + 2 * aside;
    if (distance < least) [best, least] = [at, distance];
  });
  return best;
}
