// Lanes of processes on one canvas, what is pointed at on a second one above it. steps.js comes before.

const chart = document.getElementById("chart"), readout = document.getElementById("readout");
const base = document.getElementById("base"), over = document.getElementById("over");
const showMemory = document.getElementById("memory");

const LEFT = 104, RIGHT = 14, TOP = 34, BOTTOM = 10;

const steps = data.traces.map((trace) => new Step(trace));
const measured = steps[steps.length - 1], ranks = measured.lanes.length;
const whole = { from: 0, to: Math.max(...steps.map((step) => step.microseconds)) * 1.004 };
const view = { ...whole };
const mostBytes = measured.mostBytes && Math.max(...steps.map((step) => step.mostBytes));
if (!mostBytes) { showMemory.checked = false; showMemory.parentElement.hidden = true; }
if (ranks > 16) showMemory.checked = false;

// -- where things are ----------------------------------------------------------------------------------------------

let width = 0, height = 0, rows = [], colours = {}, pointed = null, dragged = null;

function layout() {
  const tall = Math.max(9, Math.min(30, Math.round(560 / ranks))), low = steps.length > 1 ? Math.max(4, Math.round(tall * 0.56)) : 0;
  const memory = showMemory.checked ? Math.max(12, Math.min(26, Math.round(420 / ranks))) : 0;
  const gap = Math.max(4, Math.min(14, Math.round(200 / ranks)));
  let y = TOP;
  rows = measured.lanes.map(() => {
    const row = { top: y, lanes: [] };
    if (low) { row.lanes.push({ y, height: low }); y += low + (low > 8 ? 2 : 1); }
    row.lanes.push({ y, height: tall }); y += tall;
    if (memory) { y += 2; row.memory = { y, height: memory }; y += memory; }
    row.bottom = y;
    y += gap;
    return row;
  });
  width = chart.clientWidth; height = y - gap + BOTTOM;
  const ratio = window.devicePixelRatio || 1;
  for (const canvas of [base, over]) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
    canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  }
}

const toX = (time) => LEFT + (time - view.from) / (view.to - view.from) * (width - LEFT - RIGHT);
const toTime = (x) => view.from + (x - LEFT) / (width - LEFT - RIGHT) * (view.to - view.from);

function milliseconds(us, step = 0) {
  const digits = step ? Math.max(0, Math.min(4, -Math.floor(Math.log10(step / 1000) + 1e-9))) : us >= 1e6 ? 0 : us >= 1e5 ? 1 : us >= 1e4 ? 2 : 3;
  return (us / 1000).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function bytes(size) {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(1, size)) / 10));
  return `${(size / 1024 ** power).toLocaleString("en", { maximumFractionDigits: power ? 1 : 0 })} ${["bytes", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

// -- colours -------------------------------------------------------------------------------------------------------

function readColours() {
  const probe = document.body.appendChild(document.createElement("i"));
  const of = (value) => { probe.style.color = value; return getComputedStyle(probe).color; };
  for (const name of ["page", "card", "ink", "muted", "line", "grid", "lane", "accent", "schedule", "communication", "hatch"]) colours[name] = of(`var(--${name})`);
  const most = Math.max(...measured.lanes.map(({ stages }) => stages.length));
  colours.kinds = data.letters.map((letter) => Array.from({ length: most }, (_, i) => of(`color-mix(in oklab, var(--${letter}), var(--deep${letter}) ${most > 1 ? 100 * i / (most - 1) : 0}%)`)));
  colours.on = data.letters.map((letter) => of(`var(--on${letter})`));
  probe.remove();
  const tile = document.createElement("canvas"), ratio = window.devicePixelRatio || 1;
  tile.width = tile.height = Math.round(6 * ratio);
  const g = tile.getContext("2d");
  g.scale(tile.width / 6, tile.width / 6);
  g.strokeStyle = colours.hatch; g.lineWidth = 1.1;
  for (const d of [-6, 0, 6]) { g.beginPath(); g.moveTo(d - 1, 7); g.lineTo(d + 7, -1); g.stroke(); }
  colours.pattern = base.getContext("2d").createPattern(tile, "repeat");
  colours.pattern.setTransform(new DOMMatrix().scale(1 / ratio));
}

// -- drawing -------------------------------------------------------------------------------------------------------

function ticks() {
  const rough = (view.to - view.from) / Math.max(2, (width - LEFT) / 110), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  return { step, values: Array.from({ length: Math.floor(view.to / step) - Math.ceil(view.from / step) + 1 }, (_, i) => (Math.ceil(view.from / step) + i) * step) };
}

function drawBox(g, step, lane, span, alone = false) {
  const x = toX(span.start), w = Math.max(toX(span.end) - x, 0.6), gap = w > 4 ? 0.6 : 0;
  const chunk = step.lanes[span.rank].stages.indexOf(span.stage);
  g.fillStyle = colours.kinds[span.kind][chunk];
  const round = w > 7 && lane.height > 8 ? 2.5 : 0;
  const box = () => { if (round) { g.beginPath(); g.roundRect(x, lane.y, w - gap, lane.height, round); g.fill(); } else g.fillRect(x, lane.y, w - gap, lane.height); };
  box();
  if (span.kind === W && w > 2) { g.fillStyle = colours.pattern; box(); }
  if (lane.height < 10 || w < 11) return;
  const letter = data.letters[span.kind], number = `${span.microBatch}`, most = Math.min(12, lane.height - 3);
  const stage = alone && step.lanes[span.rank].stages.length > 1 ? span.stage : "";
  const fits = (text, size) => (text.length + text.includes("W") * 0.8) * size * 0.62 + 2 <= w;
  const text = fits(`${stage}${letter}${number}`, most) ? `${stage}${letter}${number}` : number;
  const size = [most, most - 1.5, most - 3].find((size) => size >= 8 && fits(text, size));
  if (!size) return;
  g.font = `600 ${size}px system-ui, sans-serif`; g.textAlign = "center"; g.textBaseline = "middle";
  if (span.kind === W) { g.lineWidth = 3; g.strokeStyle = colours.kinds[W][chunk]; g.lineJoin = "round"; g.strokeText(text, x + (w - gap) / 2, lane.y + lane.height / 2 + 0.5); }
  g.fillStyle = colours.on[span.kind];
  g.fillText(text, x + (w - gap) / 2, lane.y + lane.height / 2 + 0.5);
}

function drawLane(g, step, rank, lane) {
  const from = toX(0), to = toX(step.microseconds);
  g.fillStyle = colours.lane;
  g.fillRect(from, lane.y, to - from, lane.height);
  const { spans, count, stages } = step.lanes[rank];
  let covered = -1;
  for (let i = Math.max(0, step.before(rank, view.from)); i < count; i++) {
    const o = i * FIELDS;
    if (spans[o + START] > view.to) break;
    const right = toX(spans[o + END]);
    if (right < covered + 0.5) continue;  // thinner than a pixel that has a colour already
    covered = right;
    const left = toX(spans[o + START]);
    if (right - left < 4) {
      g.fillStyle = colours.kinds[spans[o + KIND]][stages.indexOf(spans[o + STAGE])];
      g.fillRect(left, lane.y, Math.max(0.6, right - left), lane.height);
    } else drawBox(g, step, lane, step.get({ rank, i }));
    if (lane.height > 9) drawWait(g, step, lane, step.get({ rank, i }));
  }
}

function drawWait(g, step, lane, span) {
  const wait = step.wait(span), thick = lane.height >= 20 ? 3 : 2, y = lane.y + lane.height - thick;
  if (!wait) return;
  g.fillStyle = colours.schedule; g.fillRect(toX(wait.last), y, toX(wait.made) - toX(wait.last), thick);
  g.fillStyle = colours.communication; g.fillRect(toX(wait.made), y, toX(span.start) - toX(wait.made), thick);
}

// What a process holds, over time; of a prediction as a dashed line without the area below it.
function drawMemory(g, step, rank, { y, height: tall }) {
  const { spans, count } = step.lanes[rank], bottom = y + tall, levels = [];
  let most = 0;
  for (let i = 0; i < count; i++) {  // of actions that end within one pixel the largest
    const x = Math.min(Math.max(toX(spans[i * FIELDS + END]), LEFT - 8), width + 8), size = spans[i * FIELDS + BYTES], last = levels[levels.length - 1];
    most = Math.max(most, size);
    if (last && x - last.x < 0.7 && i < count - 1) last.size = x === last.x ? size : Math.max(last.size, size);
    else levels.push({ x, size });
  }
  let at = bottom;
  const end = Math.max(toX(0), toX(step.microseconds));
  g.beginPath();
  g.moveTo(toX(0), bottom);
  for (const { x, size } of levels) { g.lineTo(x, at); at = bottom - size / mostBytes * (tall - 1); g.lineTo(x, at); }
  g.lineTo(end, at);
  g.strokeStyle = g.fillStyle = colours.accent; g.lineWidth = 1.1; g.globalAlpha = 0.9;
  if (step !== measured) { g.strokeStyle = colours.muted; g.setLineDash([3, 2]); }
  g.stroke();
  g.setLineDash([]);
  if (step === measured) { g.lineTo(end, bottom); g.closePath(); g.globalAlpha = 0.16; g.fill(); }
  g.globalAlpha = 1;
  return most;
}

function drawBase() {
  const g = base.getContext("2d");
  g.clearRect(0, 0, width, height);
  const { step: distance, values } = ticks();
  g.font = "11.5px system-ui, sans-serif"; g.textBaseline = "middle"; g.textAlign = "center";
  for (const value of values) {
    const x = Math.round(toX(value)) + 0.5;
    g.strokeStyle = colours.grid; g.lineWidth = 1;
    g.beginPath(); g.moveTo(x, TOP - 8); g.lineTo(x, height - 2); g.stroke();
    g.fillStyle = colours.muted;
    g.fillText(milliseconds(value, distance), x, 14);
  }
  g.textAlign = "left"; g.fillStyle = colours.muted; g.fillText("ms", 16, 14);
  g.save();
  g.beginPath(); g.rect(LEFT - 1, 0, width - LEFT + 1, height); g.clip();
  const most = rows.map((row, rank) => {
    row.lanes.forEach((lane, n) => { g.globalAlpha = steps.length > 1 && n === 0 ? 0.72 : 1; drawLane(g, steps[n], rank, lane); g.globalAlpha = 1; });
    return row.memory ? steps.filter((step) => step.mostBytes).map((step) => drawMemory(g, step, rank, row.memory)).pop() || 0 : 0;
  });
  if (steps.length > 1) {
    const x = Math.round(toX(steps[0].microseconds)) + 0.5;
    g.setLineDash([4, 3]); g.strokeStyle = colours.muted; g.beginPath(); g.moveTo(x, TOP - 8); g.lineTo(x, height - 2); g.stroke(); g.setLineDash([]);
  }
  g.restore();
  rows.forEach((row, rank) => labels(g, row, rank, most[rank]));
}

function labels(g, row, rank, most) {
  const lane = row.lanes[row.lanes.length - 1], middle = (row.lanes[0].y + lane.y + lane.height) / 2, { place } = measured.lanes[rank];
  g.textBaseline = "middle"; g.textAlign = "left";
  const roomy = lane.y + lane.height - row.lanes[0].y >= 26;
  g.fillStyle = colours.ink; g.font = `650 ${roomy ? 13 : Math.min(12, lane.height + 2)}px system-ui, sans-serif`;
  g.fillText(roomy ? `process ${rank}` : `${rank}`, 16, middle - (roomy ? 7.5 : 0));
  g.fillStyle = colours.muted; g.font = `${roomy ? 11.5 : Math.min(10.5, lane.height)}px system-ui, sans-serif`;
  g.fillText(place, roomy ? 16 : 40, middle + (roomy ? 8 : 0), LEFT - (roomy ? 22 : 46));
  if (row.memory) g.fillText(bytes(most), 16, row.memory.y + row.memory.height / 2 + 1, LEFT - 22);
}

// -- what is pointed at --------------------------------------------------------------------------------------------

function drawOver() {
  const g = over.getContext("2d");
  g.clearRect(0, 0, width, height);
  g.save();
  g.beginPath(); g.rect(LEFT - 1, 0, width - LEFT + 1, height); g.clip();
  if (dragged && Math.abs(dragged.to - dragged.from) > 3) {
    g.fillStyle = colours.accent; g.globalAlpha = 0.18;
    g.fillRect(Math.min(dragged.from, dragged.to), TOP - 8, Math.abs(dragged.to - dragged.from), height);
  } else if (pointed) {
    const { n, span } = pointed, step = steps[n];
    g.globalAlpha = 0.66; g.fillStyle = colours.card;
    for (const row of rows) g.fillRect(LEFT - 1, row.lanes[0].y, width, row.lanes[row.lanes.length - 1].y + row.lanes[row.lanes.length - 1].height - row.lanes[0].y);
    g.globalAlpha = 1;
    const family = step.ofMicroBatch[span.microBatch].map((at) => step.get(at));
    for (const one of family) drawBox(g, step, rows[one.rank].lanes[n], one, true);
    for (const one of family) drawArrow(g, step, n, one);
    const lane = rows[span.rank].lanes[n], x = toX(span.start);
    g.strokeStyle = colours.ink; g.lineWidth = 2;
    g.strokeRect(x - 1, lane.y - 1, Math.max(toX(span.end) - x, 1) + 2, lane.height + 2);
  }
  g.restore();
}

function drawArrow(g, step, n, span) {
  const source = step.source(span);
  if (!source || source.rank === span.rank) return;
  const from = rows[source.rank].lanes[n], to = rows[span.rank].lanes[n], down = to.y > from.y;
  const x0 = toX(source.end), x1 = toX(span.start), y0 = down ? from.y + from.height : from.y, y1 = down ? to.y : to.y + to.height;
  const bend = (y1 - y0) * 0.5;
  g.strokeStyle = g.fillStyle = colours.ink; g.lineWidth = 1.3;
  g.beginPath(); g.moveTo(x0, y0); g.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1); g.stroke();
  const tip = down ? -5 : 5;
  g.beginPath(); g.moveTo(x1, y1); g.lineTo(x1 - 3, y1 + tip); g.lineTo(x1 + 3, y1 + tip); g.closePath(); g.fill();
}

function line(...parts) {
  const p = document.createElement("p");
  for (const part of parts) {
    if (typeof part === "string") p.append(part);
    else { const b = document.createElement("b"); b.textContent = part[0]; p.append(b); }
  }
  return p;
}

function describe({ n, span }) {
  const step = steps[n], letter = data.letters[span.kind], heading = document.createElement("h3"), box = document.createElement("i");
  const written = (s) => `${s.stage}${data.letters[s.kind]}${s.microBatch}`;
  box.className = `box k${letter}`; box.textContent = letter;
  const name = data.kinds[span.kind];
  heading.append(box, `${name[0].toUpperCase()}${name.slice(1)}${step.name ? `, ${step.name}` : ""}`);
  const lines = [heading, line("stage ", [`${span.stage}`], "  ·  micro-batch ", [`${span.microBatch}`], "  ·  process ", [`${span.rank}`], `  ·  ${written(span)}`)];
  const other = steps.length > 1 && steps[1 - n].find(span.kind, span.stage, span.microBatch);
  lines.push(line("began ", [`${milliseconds(span.start)} ms`], "  ·  took ", [`${milliseconds(span.end - span.start)} ms`],
    other ? ` (${steps[1 - n].name} ${milliseconds(other.end - other.start)} ms)` : ""));
  const wait = step.wait(span);
  if (wait) {
    lines.push(line("waited ", [`${milliseconds(wait.seconds)} ms`], ` for ${written(wait.source)} of process ${wait.source.rank}`));
    lines.push(line(`${milliseconds(wait.made - wait.last)} ms until it was computed, ${milliseconds(span.start - wait.made)} ms more until here`));
  }
  if (span.bytes) lines.push(line("holds ", [bytes(span.bytes)], " of activations then"));
  readout.replaceChildren(...lines);
}

function show(found, x, y) {
  pointed = found;
  drawOver();
  readout.style.display = found ? "block" : "none";
  if (!found) return;
  describe(found);
  const { width: w, height: h } = readout.getBoundingClientRect();
  readout.style.left = `${Math.max(8, x + 18 + w > innerWidth ? x - w - 14 : x + 18)}px`;
  readout.style.top = `${Math.max(8, y + 18 + h > innerHeight ? y - h - 14 : y + 18)}px`;
}

function at(x, y) {
  for (let rank = 0; rank < ranks; rank++) {
    for (let n = 0; n < steps.length; n++) {
      const lane = rows[rank].lanes[n];
      if (y < lane.y || y > lane.y + lane.height || x < LEFT) continue;
      const i = steps[n].before(rank, toTime(x)), slack = toTime(x + 1) - toTime(x);
      if (i < 0) return null;
      const span = steps[n].get({ rank, i });
      return toTime(x) <= span.end + slack ? { n, span } : null;
    }
  }
  return null;
}

// -- moving about --------------------------------------------------------------------------------------------------

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; drawBase(); drawOver(); });
}

function look(from, to) {
  const size = Math.min(Math.max(to - from, 1), whole.to - whole.from);
  view.from = Math.min(Math.max(from, whole.from), whole.to - size);
  view.to = view.from + size;
  redraw();
}

function zoom(factor, x = (LEFT + width - RIGHT) / 2) {
  const time = toTime(x);
  look(time - (time - view.from) * factor, time + (view.to - time) * factor);
}

function step(key) {
  if (!pointed) {
    const n = steps.length - 1;
    return { n, span: steps[n].get({ rank: 0, i: Math.max(0, steps[n].before(0, view.from)) }) };
  }
  const { n, span } = pointed, lanes = steps[n].lanes;
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const i = span.i + (key === "ArrowRight" ? 1 : -1);
    return i >= 0 && i < lanes[span.rank].count ? { n, span: steps[n].get({ rank: span.rank, i }) } : pointed;
  }
  const place = span.rank * steps.length + n + (key === "ArrowDown" ? 1 : -1);
  if (place < 0 || place >= ranks * steps.length) return pointed;
  const rank = Math.floor(place / steps.length), other = place % steps.length;
  return { n: other, span: steps[other].get({ rank, i: Math.max(0, steps[other].before(rank, (span.start + span.end) / 2)) }) };
}

chart.addEventListener("pointermove", (event) => {
  const { left, top } = chart.getBoundingClientRect(), x = event.clientX - left, y = event.clientY - top;
  if (dragged) { dragged.to = x; show(null); return; }
  const found = at(x, y);
  if (found || pointed) show(found, event.clientX, event.clientY);
});
chart.addEventListener("pointerleave", () => { if (!dragged) show(null); });
chart.addEventListener("pointerdown", (event) => {
  if (event.button || event.pointerType === "touch") return;
  const x = event.clientX - chart.getBoundingClientRect().left;
  dragged = { from: x, to: x };
  chart.setPointerCapture(event.pointerId);
});
chart.addEventListener("pointerup", () => {
  const drag = dragged;
  dragged = null;
  if (drag && Math.abs(drag.to - drag.from) > 3) look(...[toTime(drag.from), toTime(drag.to)].sort((a, b) => a - b));
  drawOver();
});
chart.addEventListener("pointercancel", () => { dragged = null; drawOver(); });
chart.addEventListener("dblclick", () => look(whole.from, whole.to));
chart.addEventListener("wheel", (event) => {
  const across = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.ctrlKey || event.metaKey) zoom(Math.exp(Math.sign(event.deltaY) * Math.min(0.4, Math.abs(event.deltaY) / 250)), event.clientX - chart.getBoundingClientRect().left);
  else if (Math.abs(across) > 0 && view.to - view.from < whole.to - whole.from) look(view.from + toTime(across) - toTime(0), view.to + toTime(across) - toTime(0));
  else return;
  event.preventDefault();
}, { passive: false });
chart.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key.startsWith("Arrow")) {
    const found = step(event.key), { left, top } = chart.getBoundingClientRect(), { span } = found;
    const size = view.to - view.from;
    if (span.start < view.from || span.end > view.to) look(span.start - size / 3, span.start + size * 2 / 3);
    show(found, left + Math.max(LEFT, toX((span.start + span.end) / 2)), top + rows[span.rank].bottom);
  } else if (event.key === "Escape") show(null);
  else return;
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
  const about = pointed ? toX((pointed.span.start + pointed.span.end) / 2) : undefined;
  if (event.key === "+" || event.key === "=") zoom(0.6, about);
  else if (event.key === "-") zoom(1 / 0.6, about);
  else if (event.key === "0") look(whole.from, whole.to);
  else if (event.key === "t") theme();
});
document.getElementById("in").addEventListener("click", () => zoom(0.6));
document.getElementById("out").addEventListener("click", () => zoom(1 / 0.6));
document.getElementById("reset").addEventListener("click", () => look(whole.from, whole.to));

function theme() {
  const dark = getComputedStyle(document.documentElement).colorScheme === "light dark" ? matchMedia("(prefers-color-scheme: dark)").matches : document.documentElement.dataset.theme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  fresh();
}
document.getElementById("theme").addEventListener("click", theme);

function fresh() { layout(); readColours(); drawBase(); drawOver(); }
showMemory.addEventListener("change", fresh);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", fresh);
new ResizeObserver(() => { if (chart.clientWidth !== width) fresh(); }).observe(chart);
fresh();
