function down(left, x) {
  if (left === 0) {
    for (let i = 0; i < 2000; i++) x = (Math.imul(x, 1664525) + 1013904223) | 0;
    return x;
  }
  return down(left - 1, (x + left) | 0) ^ left;
}
const end = Date.now() + 14000;
let x = 1, text = "";
while (Date.now() < end) {
  for (let i = 0; i < 200; i++) x ^= down(40, x);
  text = JSON.stringify(Array.from({ length: 2000 }, (_, i) => ({ i, x })));
}
console.log(x, text.length);
