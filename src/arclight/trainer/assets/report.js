// Read-out of a chart: the nearest point of each curve under the pointer.
const box = document.getElementById("readout");
const number = (v) => (v !== 0 && (Math.abs(v) < 1e-3 || Math.abs(v) >= 1e7) ? v.toExponential(3) : v.toLocaleString("en", { maximumSignificantDigits: 5 }));

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

for (const svg of document.querySelectorAll("svg.chart")) {
  const { t: name, x: [x0, x1, left, right], y: [y0, y1, bottom, top, log], s } = JSON.parse(svg.dataset.chart);
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (right - left);
  const share = log ? (y) => Math.log(y / y0) / Math.log(y1 / y0) : (y) => (y - y0) / (y1 - y0);
  const py = (y) => Math.max(top - 4, Math.min(bottom + 4, bottom + share(y) * (top - bottom)));
  const cross = svg.querySelector(".cross");
  const marks = s.map((series) => {
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    mark.setAttribute("r", 4);
    mark.setAttribute("class", `mark dot c${series.c}`);
    return svg.appendChild(mark);
  });
  const hide = () => {
    box.style.display = "none";
    for (const part of [cross, ...marks]) part.style.visibility = "hidden";
  };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const frame = svg.getBoundingClientRect();
    const at = ((event.clientX - frame.left) / frame.width) * svg.viewBox.baseVal.width;
    if (at < left - 8 || at > right + 8) return hide();
    const found = s.map((series) => nearest(series.p, x0 + ((at - left) / (right - left)) * (x1 - x0)));
    const step = found.reduce((a, b) => (Math.abs(px(b[0]) - at) < Math.abs(px(a[0]) - at) ? b : a))[0];
    cross.setAttribute("x1", px(step));
    cross.setAttribute("x2", px(step));
    cross.style.visibility = "visible";
    box.replaceChildren(Object.assign(document.createElement("b"), { textContent: `${name} ${number(step)}` }));
    found.forEach(([x, y], i) => {
      marks[i].setAttribute("cx", px(x));
      marks[i].setAttribute("cy", py(y));
      marks[i].style.visibility = "visible";
      const line = document.createElement("div"), dot = document.createElement("i");
      dot.style.background = `var(--c${s[i].c})`;
      line.append(dot, s.length > 1 ? `${s[i].n}  ${number(y)}` : number(y));
      box.append(line);
    });
    box.style.display = "block";
    const room = document.documentElement.clientWidth - box.offsetWidth - 12;
    box.style.left = `${Math.max(8, Math.min(event.clientX + 16, room))}px`;
    box.style.top = `${Math.max(8, event.clientY - box.offsetHeight - 14)}px`;
  });
}
