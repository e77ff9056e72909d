// Draws the visible part. Work is by pixel, not by op: what is narrower than a pixel is one mark with its neighbours.

const canvas = document.getElementById("canvas");
const pen = canvas.getContext("2d");
const MOST_ARROWS = 1500;
const CAUSES = ["warm-up", "message", "collective", "cool-down", "held up"];

let palette = {};

function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  palette = Object.fromEntries(["paper", "panel", "lane", "line", "text", "faint", "mark", "select", "held", "message", "warm-up",
    "cool-down", "from-lower", "from-higher", "in-collective", "held-up", "cause"]
    .map((name) => [name, get(name)]));
  palette.kinds = DATA.categories.map((name) => [get(name), get(`${name}-pale`)]);
}

const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

function mixed(one, other, share) {
  const b = channels(other);
  return "#" + channels(one).map((v, at) => Math.round(v + (b[at] - v) * share).toString(16).padStart(2, "0")).join("");
}

const isDark = (colour) => { const [r, g, b] = channels(colour); return 0.3 * r + 0.59 * g + 0.11 * b < 140; };

// By kind and chunk: the first chunk of a rank has the full colour, the last the pale one.
const shades = new Map();
function shade(category, chunk, numChunks) {
  const key = (category * 4096 + chunk) * 4096 + numChunks;
  if (!shades.has(key)) {
    const [full, pale] = palette.kinds[category];
    const fill = pale && numChunks > 1 ? mixed(full, pale, chunk / (numChunks - 1)) : full;
    shades.set(key, { fill, ink: isDark(fill) ? "#ffffff" : "#111111" });
  }
  return shades.get(key);
}

// Waits and collectives stand as a strip at the foot of their lane: their time is shown as a bubble, or is part of an op.
const isStrip = (tl, i) => tl.category[i] === CATEGORY.wait || tl.category[i] === CATEGORY.collective;

function drawTrack(tl, track, row) {
  const box = trackBox(tl, track, row), y = box.y - state.y, { h } = box;
  const stop = tl.offsets[track + 1], numChunks = tl.ranks[row.rank].stages.length;
  const perPixel = (state.t1 - state.t0) / plotWidth();
  let i = lowerBound(tl.end, tl.offsets[track], stop, state.t0);
  while (i < stop && tl.start[i] <= state.t1) {
    const x = Math.max(GUTTER, xOf(tl.start[i])), right = Math.min(state.width, xOf(tl.end[i]));
    let shown = i, next = i + 1, width = right - x;
    if (tl.end[i] - tl.start[i] < perPixel) {
      next = lowerBound(tl.start, next, stop, tl.start[i] + perPixel);
      // the last one that begins within this pixel may extend beyond it
      if (next - 1 > i && tl.end[next - 1] - tl.start[next - 1] >= perPixel) next--;
      for (let j = i + 1; j < Math.min(next, i + 16); j++) if (tl.end[j] - tl.start[j] > tl.end[shown] - tl.start[shown]) shown = j;
      width = next - i > 1 ? 1 : Math.max(1, Math.min(2, width));
    }
    const { fill, ink } = shade(tl.category[shown], tl.chunk[shown], numChunks);
    pen.fillStyle = fill;
    if (isStrip(tl, shown)) pen.fillRect(x, y + h - 4, width, 4);
    else pen.fillRect(x, y, width > 4 ? width - 0.5 : width, h);
    const free = tl.covered[shown] ? h / 2 : h;
    if (width > 6 && free >= 11 && !isStrip(tl, shown)) drawLabel(nameOf(tl, shown), x, y, width, free, ink);
    i = next;
  }
}

const fontOf = (size) => `${size}px ui-sans-serif, system-ui, sans-serif`;

// The width of a text in the pen's font; measured once.
const widths = new Map();
function widthOf(text) {
  const key = `${pen.font} ${text}`;
  if (!widths.has(key)) widths.set(key, pen.measureText(text).width);
  return widths.get(key);
}

// A computation as F0, without its stage, which the row shows (a paler colour is a later chunk); else as its letter.
function drawLabel(name, x, y, width, h, ink) {
  const full = h >= 18 ? 11 : 9, isTransfer = name.includes("_");
  const letter = (name.match(/[A-Z]/) || [""])[0];
  const texts = isTransfer ? [[name, full, 4]] : [[name.replace(/^\d+/, ""), full, 4], [letter, full, 4], [letter, 8, 1]];
  const fits = texts.find(([text, size, room]) => { pen.font = fontOf(size); return widthOf(text) + room <= width; });
  if (!fits) return;
  const [text, size] = fits;
  pen.fillStyle = ink;
  pen.textAlign = "center";
  pen.fillText(text, x + width / 2, y + h / 2 + size * 0.36);
}

function idleColour(tl, at, rank) {
  const cause = CAUSES[tl.idle.cause[at]];
  if (cause === "message") {
    const peer = tl.idle.peer[at] - 1;
    return peer < 0 ? palette["held-up"] : palette[peer < rank ? "from-lower" : "from-higher"];
  }
  return palette[cause === "collective" ? "in-collective" : cause === "held up" ? "held-up" : cause];
}

function drawIdle(tl, row) {
  const stop = tl.idle.offsets[row.rank + 1], y = row.y - state.y;
  const perPixel = (state.t1 - state.t0) / plotWidth();
  for (let at = lowerBound(tl.idle.end, tl.idle.offsets[row.rank], stop, state.t0); at < stop && tl.idle.start[at] <= state.t1;) {
    const x = Math.max(GUTTER, xOf(tl.idle.start[at])), width = Math.min(state.width, xOf(tl.idle.end[at])) - x;
    pen.fillStyle = idleColour(tl, at, row.rank);
    pen.fillRect(x, y, Math.max(1, width), row.h);
    const peer = tl.idle.peer[at] - 1;
    const texts = peer >= 0 ? [`waits for rank ${peer}`, `rank ${peer}`] : [CAUSES[tl.idle.cause[at]]];
    pen.font = "italic 10px ui-sans-serif, system-ui, sans-serif";
    const text = width > 10 && texts.find((one) => widthOf(one) + 6 <= width);
    if (text) {
      pen.fillStyle = palette.faint;
      pen.textAlign = "center";
      pen.fillText(text, x + width / 2, y + row.h / 2 + 3);
    }
    at = width < 1 ? Math.max(at + 1, lowerBound(tl.idle.start, at + 1, stop, tl.idle.start[at] + perPixel)) : at + 1;
  }
}

// The work of the critical path, as a line along the top of its rows; its messages are arrows.
function drawPath(k) {
  const { span, start, end } = TIMELINES[k].path;
  pen.fillStyle = palette.mark;
  for (let at = lowerBound(end, 0, end.length, state.t0); at < span.length && start[at] <= state.t1; at++) {
    const row = rowOf(k, span[at]), x = Math.max(GUTTER, xOf(start[at]));
    pen.fillRect(x, row.y - state.y - 1, Math.max(1, Math.min(state.width, xOf(end[at])) - x), 3);
  }
}

// What a rank holds, as steps; the height of the row is the most that any rank of any timeline holds.
function drawHeld(tl, row) {
  const { time, count } = tl.held[row.rank], floor = row.y - state.y + row.h;
  const perPixel = (state.t1 - state.t0) / plotWidth();
  const yOf = (held) => floor - (held / peakOf(tl)) * (row.h - 3);
  let at = Math.max(0, lowerBound(time, 0, time.length, state.t0) - 1);
  let last = GUTTER, level = floor;
  pen.beginPath();
  pen.moveTo(GUTTER, floor);
  while (at < time.length && time[at] <= state.t1) {
    let most = count[at], next = at + 1;
    for (; next < time.length && time[next] < time[at] + perPixel; next++) most = Math.max(most, count[next]);
    const x = Math.max(GUTTER, xOf(time[at]));
    last = Math.min(state.width, Math.max(x, xOf(next < time.length ? time[next] : tl.makespan)));
    pen.lineTo(x, level);
    pen.lineTo(x, yOf(most));
    pen.lineTo(last, yOf(most));
    level = yOf(count[next - 1]);
    pen.lineTo(last, level);
    at = next;
  }
  pen.lineTo(last, floor);
  pen.globalAlpha = 0.45;
  pen.fillStyle = palette.held;
  pen.fill();
  pen.globalAlpha = 1;
}

function drawArrow(k, from, to, colour, weight) {
  const tl = TIMELINES[k], a = rowOf(k, from), b = rowOf(k, to);
  const x0 = xOf(tl.start[from]), x1 = xOf(tl.end[to]);
  const y0 = a.y + a.h / 2 - state.y, y1 = b.y + b.h / 2 - state.y;
  const bend = Math.max(8, (x1 - x0) / 2), head = y1 > y0 ? -1 : 1;
  pen.strokeStyle = pen.fillStyle = colour;
  pen.lineWidth = weight;
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.bezierCurveTo(x0 + bend, y0, x1 - bend, y1 + head * 12, x1, y1);
  pen.stroke();
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x1 - 6, y1 + head * 1);
  pen.lineTo(x1 - 2, y1 + head * 6);
  pen.fill();
}

// True for a message at whose arrival an idle time of its rank ends.
function endsIdle(tl, to) {
  const { offsets, end, cause } = tl.idle, rank = rankOf(tl, to), near = 1e-9 * MAKESPAN, at = tl.end[to];
  const place = lowerBound(end, offsets[rank], offsets[rank + 1], at - near);
  return place < offsets[rank + 1] && end[place] <= at + near && CAUSES[cause[place]] !== "cool-down";
}

// The messages that end an idle time, or all, if they are few enough to follow; and always the messages of the path and
// of the selection.
function drawArrows(k) {
  const tl = TIMELINES[k], { from, to, critical } = tl.arrows;
  const focus = [state.selected, state.hovered].filter((one) => one && one.k === k && one.i >= 0).map((one) => one.i);
  const visible = [];
  for (let a = 0; a < from.length; a++) {
    if (tl.start[from[a]] > state.t1 || tl.end[to[a]] < state.t0) continue;
    const top = rowOf(k, from[a]).y - state.y, foot = rowOf(k, to[a]).y - state.y;
    if (Math.max(top, foot) < AXIS || Math.min(top, foot) > state.height) continue;
    visible.push(a);
  }
  const few = visible.length <= MOST_ARROWS && visible.length * 6 <= plotWidth() * 4;
  for (const a of visible) {
    if (focus.includes(from[a]) || focus.includes(to[a])) drawArrow(k, from[a], to[a], palette.select, 2);
    else if (state.critical && critical[a]) drawArrow(k, from[a], to[a], palette.mark, 2);
    else if (few && (state.arrows || (state.bubbles && endsIdle(tl, to[a])))) drawArrow(k, from[a], to[a], palette.message, 0.7);
  }
}

// How busy the ranks are, all of them together, in each part of the whole time; computed once.
const OVERVIEW_PARTS = 300;
function busyParts(tl) {
  const parts = new Float64Array(OVERVIEW_PARTS), unit = MAKESPAN / OVERVIEW_PARTS;
  for (let i = 0; i < tl.size; i++) {
    if (!COMPUTE_KINDS.includes(DATA.categories[tl.category[i]])) continue;
    const last = Math.min(OVERVIEW_PARTS - 1, Math.floor(tl.end[i] / unit));
    for (let part = Math.floor(tl.start[i] / unit); part <= last; part++) {
      parts[part] += Math.max(0, Math.min(tl.end[i], (part + 1) * unit) - Math.max(tl.start[i], part * unit));
    }
  }
  return parts.map((busy) => Math.min(1, busy / (unit * tl.ranks.length)));
}

// The whole time as one strip above the axis: the share of ranks that compute, and the part that is shown below.
let overview = null;
function drawOverview() {
  overview ??= busyParts(BASE);
  const wide = plotWidth() / OVERVIEW_PARTS, at = (time) => GUTTER + (time / MAKESPAN) * plotWidth();
  pen.fillStyle = palette.lane;
  pen.fillRect(GUTTER, 1, plotWidth(), OVERVIEW - 2);
  pen.fillStyle = palette.kinds[CATEGORY.F][0];
  overview.forEach((busy, part) => pen.fillRect(GUTTER + part * wide, 1 + (1 - busy) * (OVERVIEW - 2), wide, busy * (OVERVIEW - 2)));
  if (state.t0 <= 0 && state.t1 >= MAKESPAN) return;
  pen.strokeStyle = palette.mark;
  pen.lineWidth = 2;
  const left = at(Math.max(0, state.t0));
  pen.strokeRect(left, 1, Math.max(3, at(Math.min(MAKESPAN, state.t1)) - left), OVERVIEW - 2);
}

function drawAxis() {
  pen.fillStyle = palette.panel;
  pen.fillRect(0, 0, state.width, AXIS);
  drawOverview();
  const unit = 10 ** Math.floor(Math.log10(((state.t1 - state.t0) * 90) / plotWidth()));
  const step = unit * [1, 2, 5, 10].find((n) => (n * unit * plotWidth()) / (state.t1 - state.t0) >= 90);
  pen.font = "10px ui-sans-serif, system-ui, sans-serif";
  pen.textAlign = "center";
  for (let n = Math.ceil(state.t0 / step); n * step <= state.t1; n++) {
    const x = xOf(n * step);
    pen.globalAlpha = 0.5;
    pen.fillStyle = palette.line;
    pen.fillRect(x, AXIS - 4, 1, state.height);
    pen.globalAlpha = 1;
    pen.fillStyle = palette.text;
    const text = tickText(n * step, step), half = widthOf(text) / 2;
    if (x - half > GUTTER - 8 && x - half < state.width - 2 * half - 2) pen.fillText(text, x, OVERVIEW + 13);
    else if (x - half > GUTTER) pen.fillText(text, state.width - half - 2, OVERVIEW + 13);
  }
  pen.textAlign = "left";
  pen.fillText("time", 8, OVERVIEW + 13);
}

// The name of a row, its size of letters, its indentation and its base line.
function nameOfRow(row) {
  const tl = TIMELINES[row.k];
  if (row.kind === "compute") return [`${state.folded.has(foldKey(row.k, row.rank)) ? "\u25b8" : "\u25be"} ${tl.ranks[row.rank].name}`, 12, 8, 16];
  if (row.kind === "queue") return [tl.lanes[row.lane][1], 9, 22, 9];
  return [`${tl.inBytes ? "memory, peak" : "activations, at most"} ${heldAmount(tl, tl.peaks[row.rank])}`, 9, 22, 16];
}

// The width that no name of a row exceeds, of the first thousand rows.
function gutterWidth() {
  const names = layout.rows.slice(0, 1000).map(nameOfRow);
  return Math.ceil(Math.max(80, ...names.map(([text, size, indent]) => { pen.font = fontOf(size); return widthOf(text) + indent + 10; })));
}

function drawGutter() {
  pen.fillStyle = palette.panel;
  pen.fillRect(0, AXIS, GUTTER, state.height);
  pen.textAlign = "left";
  for (const row of layout.rows) {
    const y = row.y - state.y;
    if (y + row.h < AXIS || y > state.height) continue;
    pen.save();
    pen.beginPath();
    pen.rect(0, Math.max(AXIS, y), GUTTER - 4, row.h);
    pen.clip();
    pen.fillStyle = row.kind === "compute" ? palette.text : palette.faint;
    const [text, size, indent, base] = nameOfRow(row);
    pen.font = fontOf(size);
    pen.fillText(text, indent, y + base);
    pen.restore();
  }
}

function draw() {
  const scale = state.printing ? 2 : window.devicePixelRatio || 1;
  canvas.width = Math.round(state.width * scale);
  canvas.height = Math.round(state.height * scale);
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.fillStyle = palette.paper;
  pen.fillRect(0, 0, state.width, state.height);
  for (const row of layout.rows) {
    const y = row.y - state.y;
    if (y + row.h < AXIS || y > state.height) continue;
    const tl = TIMELINES[row.k];
    pen.fillStyle = palette.lane;
    pen.fillRect(GUTTER, y, plotWidth(), row.h);
    if (row.kind === "compute" && state.bubbles) drawIdle(tl, row);
    if (row.kind === "held") drawHeld(tl, row);
    if (row.lane >= 0) for (const track of tl.tracksOf[row.lane]) drawTrack(tl, track, row);
  }
  TIMELINES.forEach((_, k) => {
    if (state.critical) drawPath(k);
    drawArrows(k);
  });
  for (const [one, colour] of [[state.hovered, palette.faint], [state.selected, palette.select]]) {
    if (!one || one.i < 0) continue;
    const box = boxOf(one.k, one.i);
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.strokeRect(box.x - 1, box.y - 1, box.w + 2, box.h + 2);
  }
  drawCauses();
  drawAxis();
  drawRange();
  drawGutter();
}
