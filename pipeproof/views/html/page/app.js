// What the reader does: wheel, drag, hover, click, keys, buttons, search, print.

const status = document.getElementById("status"), tip = document.getElementById("tip"), help = document.getElementById("help");
const search = document.getElementById("search");
let waiting = false;

function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function resize() {
  if (state.printing) return;
  state.width = canvas.clientWidth;
  state.height = canvas.clientHeight;
  relayout();
  redraw();
}

function recolour() {
  readPalette();
  shades.clear();
  showLegend();
  redraw();
}

// --- what is where ---

// What stands at a point of the canvas: {k, rank, i} with an op, or {k, rank, text} without one.
function thingAt(x, y) {
  const row = layout.rows.find((one) => y >= AXIS && y >= one.y - state.y && y < one.y - state.y + one.h);
  if (!row) return null;
  const tl = TIMELINES[row.k], place = { k: row.k, rank: row.rank };
  if (x < GUTTER) return { ...place, i: -1, fold: row.kind === "compute", text: rankText(row.k, row.rank) };
  const time = timeAt(x);
  if (row.kind === "held") return { ...place, i: -1, text: heldText(row.k, row.rank, time) };
  const i = row.lane < 0 ? -1 : opAt(tl, row, x, y);
  if (i >= 0) return { ...place, i, text: opText(row.k, i) };
  if (row.kind === "compute" && state.bubbles) {
    const stop = tl.idle.offsets[row.rank + 1], at = lowerBound(tl.idle.end, tl.idle.offsets[row.rank], stop, time);
    if (at < stop && tl.idle.start[at] <= time) return { ...place, i: -1, text: idleText(row.k, row.rank, at) };
  }
  return null;
}

// The op at a point, the topmost of several, or the nearest within three pixels.
function opAt(tl, row, x, y) {
  const near = ((state.t1 - state.t0) / plotWidth()) * 3, time = timeAt(x);
  let best = -1, least = near;
  for (const track of [...tl.tracksOf[row.lane]].reverse()) {
    const box = trackBox(tl, track, row), within = y + state.y - box.y;
    if (within < 0) continue;
    const stop = tl.offsets[track + 1];
    for (let i = lowerBound(tl.end, tl.offsets[track], stop, time - near); i < stop && tl.start[i] <= time + near; i++) {
      if (isStrip(tl, i) && within < box.h - 5) continue;
      const far = Math.max(0, tl.start[i] - time, time - tl.end[i]);
      if (far < least || (far === 0 && best < 0)) { best = i; least = far; }
      if (far === 0) return i;
    }
  }
  return best;
}

// --- choosing ---

function select(k, i) {
  state.selected = { k, i };
  status.textContent = opText(k, i).replaceAll("\n", "; ");
  showCauses();
  redraw();
}

function show(k, i) {
  const tl = TIMELINES[k], length = state.t1 - state.t0, middle = (tl.start[i] + tl.end[i]) / 2;
  if (tl.start[i] < state.t0 || tl.end[i] > state.t1) { state.t0 = middle - length / 2; state.t1 = state.t0 + length; }
  const row = rowOf(k, i);
  if (row.y - state.y < AXIS || row.y + row.h - state.y > state.height) state.y = row.y - state.height / 2;
  clamp();
  select(k, i);
}

// The next or previous op of the lane, or the first that is visible where none is chosen yet.
function step(direction) {
  if (!state.selected) {
    const row = layout.rows.find((one) => one.lane >= 0 && one.y - state.y >= AXIS);
    if (!row) return;
    const tl = TIMELINES[row.k], track = tl.tracksOf[row.lane][0];
    show(row.k, Math.min(tl.offsets[track + 1] - 1, lowerBound(tl.end, tl.offsets[track], tl.offsets[track + 1], state.t0)));
    return;
  }
  const { k, i } = state.selected, tl = TIMELINES[k], track = tl.track[i];
  show(k, Math.min(tl.offsets[track + 1] - 1, Math.max(tl.offsets[track], i + direction)));
}

// The op on a lane above or below that runs at the time of the chosen one.
function stepLane(direction) {
  if (!state.selected) return step(0);
  const { k, i } = state.selected, rows = layout.rows.filter((row) => row.lane >= 0);
  const row = rows[rows.indexOf(rowOf(k, i)) + direction];
  if (!row) return;
  const tl = TIMELINES[row.k], track = tl.tracksOf[row.lane][0], stop = tl.offsets[track + 1];
  show(row.k, Math.min(stop - 1, lowerBound(tl.end, tl.offsets[track], stop, TIMELINES[k].start[i] + 1e-9)));
}

function find(text, direction) {
  const wanted = text.trim().toUpperCase();
  if (!wanted) return;
  const all = [];
  TIMELINES.forEach((tl, k) => {
    const fits = tl.names.map((name) => name.toUpperCase() === wanted);
    const exact = fits.includes(true) ? fits : tl.names.map((name) => name.toUpperCase().includes(wanted));
    for (let i = 0; i < tl.size; i++) if (exact[tl.name[i]]) all.push({ k, i });
  });
  if (!all.length) { status.textContent = `there is no operation ${text.trim()}`; return; }
  const at = all.findIndex((one) => state.selected && one.k === state.selected.k && one.i === state.selected.i);
  const next = all[at < 0 ? 0 : (at + direction + all.length) % all.length];
  show(next.k, next.i);
}

function unselect(text) {
  state.selected = null;
  status.textContent = text;
  showCauses();
}

function setRange(range) {
  state.range = range;
  showBreakdown();
}

// Begin or end the range at the selected operation, or at the edge of the view.
function limitRange(side) {
  const tl = state.selected && TIMELINES[state.selected.k];
  const edge = tl ? (side ? tl.end : tl.start)[state.selected.i] : side ? state.t1 : state.t0;
  const range = [...(state.range ?? [0, MAKESPAN])];
  range[side] = Math.min(MAKESPAN, Math.max(0, edge));
  if (range[0] < range[1]) setRange(range);
  else status.textContent = "the range would end before it begins";
}

// --- switches and keys ---

const length = () => state.t1 - state.t0;
const centre = () => (state.t0 + state.t1) / 2;
const pan = (share) => { const by = share * length(); state.t0 += by; state.t1 += by; clamp(); };
const fit = () => { state.t0 = 0; state.t1 = MAKESPAN; state.y = 0; clamp(); };
const theme = () => {
  const root = document.documentElement;
  root.dataset.theme = getComputedStyle(root).colorScheme === "dark" ? "light" : "dark";
  recolour();
};

const SWITCHES = [["a", "arrows", "All messages"], ["c", "critical", "Critical path"], ["b", "bubbles", "Bubbles"],
  ["q", "queues", "Queues"], ["n", "numbers", "Numbers by rank"], ["w", "why", "Causes"], ["m", "held", TIMELINES.some((tl) => tl.inBytes) ? "Memory" : "Activations"]];
const ACTIONS = [["f", "Fold ranks", foldAll], ["+", "Zoom in", () => zoom(0.7, centre())], ["-", "Zoom out", () => zoom(1 / 0.7, centre())],
  ["0", "Fit", fit], ["t", "Light or dark", theme], ["?", "Keys", () => help.showModal()]];
const MOVES = [["ArrowLeft", "\u2190", "earlier", () => pan(-0.15)], ["ArrowRight", "\u2192", "later", () => pan(0.15)],
  ["ArrowUp", "\u2191", "up", () => { state.y -= 60; clamp(); }], ["ArrowDown", "\u2193", "down", () => { state.y += 60; clamp(); }],
  ["PageUp", "PgUp", "a page up", () => { state.y -= state.height; clamp(); }],
  ["PageDown", "PgDn", "a page down", () => { state.y += state.height; clamp(); }],
  ["Home", "Home", "to the beginning", () => { const by = state.t0; state.t0 = 0; state.t1 -= by; clamp(); }],
  ["End", "End", "to the end", () => { const by = MAKESPAN - state.t1; state.t1 = MAKESPAN; state.t0 += by; clamp(); }],
  [".", ".", "next operation of the lane", () => step(1)], [",", ",", "previous operation of the lane", () => step(-1)],
  ["<", "<", "operation of the lane above", () => stepLane(-1)], [">", ">", "operation of the lane below", () => stepLane(1)],
  ["=", "=", "zoom in", () => zoom(0.7, centre())], ["/", "/", "find an operation; Enter for the next, Shift+Enter for the one before", () => search.focus()],
  ["[", "[", "the range begins with the selected operation", () => limitRange(0)],
  ["]", "]", "the range ends with the selected operation", () => limitRange(1)],
  ["Escape", "Esc", "choose nothing, no operation and no range", () => { unselect(""); setRange(null); }]];

function fold(k, rank) {
  const key = foldKey(k, rank);
  if (!state.folded.delete(key)) state.folded.add(key);
  relayout();
}

// Fold all ranks to their computations, or unfold them if all are folded.
function foldAll() {
  const keys = TIMELINES.flatMap((tl, k) => tl.ranks.map((_, rank) => foldKey(k, rank)));
  state.folded = new Set(keys.every((key) => state.folded.has(key)) ? [] : keys);
  relayout();
}

function toggle(name) {
  state[name] = !state[name];
  document.querySelector(`[data-switch="${name}"]`).setAttribute("aria-pressed", String(state[name]));
  relayout();
  showLegend();
  showBreakdown();
  showCauses();
  if (name === "why" && state.why && !state.selected) status.textContent = "Select an operation: its causes are listed and drawn.";
  redraw();
}

function buildTools() {
  const tools = document.getElementById("tools");
  const button = (text, key, action) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.title = `key: ${key}`;
    made.addEventListener("click", () => { action(); redraw(); });
    tools.append(made);
    return made;
  };
  for (const [key, name, text] of SWITCHES) {
    const made = button(text, key, () => toggle(name));
    made.dataset.switch = name;
    made.setAttribute("aria-pressed", String(state[name]));
  }
  for (const [key, text, action] of ACTIONS) button(text, key, action);
  const rows = [...MOVES.map(([, key, text]) => [key, text]), ...SWITCHES.map(([key, , text]) => [key, `${text} on or off`]),
    ...ACTIONS.map(([key, text]) => [key, text]), ["wheel", "zoom at the pointer; with Shift pan"], ["drag", "pan; on the time axis, or with Shift, select a range"],
    ["double click", "zoom to the operation"], ["click on a rank", "fold or unfold it"], ["click on the strip at the top", "show that time"]];
  const list = document.createElement("ul");
  for (const [key, text] of rows) {
    const line = document.createElement("li"), mark = document.createElement("kbd");
    mark.textContent = key;
    line.append(mark, text);
    list.append(line);
  }
  const form = document.createElement("form");
  form.method = "dialog";
  const close = document.createElement("button");
  close.textContent = "Close";
  form.append(close);
  help.append(list, form);
}

// The colours of the idle times that occur.
function idleColours() {
  return new Set(TIMELINES.flatMap((tl) => tl.ranks.flatMap((_, rank) =>
    Array.from({ length: tl.idle.offsets[rank + 1] - tl.idle.offsets[rank] }, (_, place) => idleColour(tl, tl.idle.offsets[rank] + place, rank)))));
}

function showLegend() {
  const used = new Set(TIMELINES.flatMap((tl) => [...new Set(tl.category)]));
  const chunks = Math.max(...TIMELINES.flatMap((tl) => tl.ranks.map((rank) => rank.stages.length)));
  const entries = [...used].sort((a, b) => a - b).map((at) => [DATA.categories[at], KIND_WORDS[DATA.categories[at]]]);
  entries.push([null, "F0: of micro-batch 0; in texts 0F0, of stage 0"]);
  if (chunks > 1) entries.push([null, "paler: later chunks"]);
  if (state.bubbles) {
    const shown = idleColours();
    entries.push(...[["warm-up", "idle: warm-up"], ["from-lower", "idle: waits for a lower rank"],
      ["from-higher", "idle: waits for a higher rank"], ["in-collective", "idle: in a collective"],
      ["cool-down", "idle: cool-down"], ["held-up", "idle: held up"]].filter(([name]) => shown.has(palette[name])));
  }
  if (state.held) entries.push(["held", TIMELINES.some((tl) => tl.inBytes) ? "memory held" : "activations held"]);
  if (state.critical) entries.push(["mark", "critical path"]);
  if (state.why) entries.push(["cause", "causes of the selected operation"]);
  document.getElementById("legend").replaceChildren(...entries.map(([name, text]) => {
    const entry = document.createElement("span");
    if (name) {
      const swatch = document.createElement("i");
      swatch.style.background = `var(--${name})`;
      entry.append(swatch);
    }
    entry.append(text);
    return entry;
  }));
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open || event.target === search) return;
  const onButton = event.target instanceof HTMLButtonElement && (event.key === "Enter" || event.key === " ");
  if (onButton) return;
  const switched = SWITCHES.find(([key]) => key === event.key);
  const action = ACTIONS.find(([key]) => key === event.key)?.[2] ?? MOVES.find(([key]) => key === event.key)?.[3];
  if (!switched && !action) return;
  event.preventDefault();
  if (switched) toggle(switched[1]);
  else action();
  redraw();
});

search.addEventListener("keydown", (event) => {
  if (event.key === "Enter") find(search.value, event.shiftKey ? -1 : 1);
  else if (event.key === "Escape") canvas.focus();
});

// --- the pointer ---

let drag = null;

canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 20 : 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(((event.deltaX || event.deltaY) * unit) / plotWidth());
  else zoom(Math.exp(event.deltaY * unit * 0.0015), timeAt(Math.max(GUTTER, event.offsetX)));
  redraw();
}, { passive: false });

canvas.addEventListener("pointerdown", (event) => {
  if (event.button !== 0) return;
  canvas.setPointerCapture(event.pointerId);
  drag = { x: event.offsetX, y: event.offsetY, t0: state.t0, t1: state.t1, top: state.y, moved: false,
    seeks: event.offsetX > GUTTER && event.offsetY < OVERVIEW,
    selects: event.offsetX > GUTTER && event.offsetY >= OVERVIEW && (event.shiftKey || event.offsetY < AXIS) };
  if (drag.seeks) seek(event.offsetX);
});

// Show the time at a place of the overview, in the middle.
function seek(x) {
  const half = length() / 2, middle = ((x - GUTTER) / plotWidth()) * MAKESPAN;
  Object.assign(state, { t0: middle - half, t1: middle + half });
  clamp();
  redraw();
}

canvas.addEventListener("pointermove", (event) => {
  if (drag?.seeks) seek(event.offsetX);
  else if (drag) {
    const dx = event.offsetX - drag.x, dy = event.offsetY - drag.y;
    drag.moved ||= Math.hypot(dx, dy) > 3;
    if (!drag.moved) return;
    if (drag.selects) {
      const times = [drag.x, event.offsetX].map((x) => Math.min(MAKESPAN, Math.max(0, timeAt(Math.max(GUTTER, x))))).sort((a, b) => a - b);
      setRange(times[0] < times[1] ? times : null);
      redraw();
      return;
    }
    canvas.classList.add("dragging");
    const by = (dx / plotWidth()) * (drag.t1 - drag.t0);
    Object.assign(state, { t0: drag.t0 - by, t1: drag.t1 - by, y: drag.top - dy });
    clamp();
    tip.hidden = true;
  } else hover(event);
  redraw();
});

canvas.addEventListener("pointerup", (event) => {
  canvas.classList.remove("dragging");
  const clicked = drag && !drag.moved && !drag.seeks, selects = drag?.selects;
  drag = null;
  if (!clicked) return;
  if (selects) { setRange(null); redraw(); return; }
  const thing = thingAt(event.offsetX, event.offsetY);
  if (thing?.fold) fold(thing.k, thing.rank);
  if (thing && thing.i >= 0) select(thing.k, thing.i);
  else unselect(thing ? thing.text.replaceAll("\n", "; ") : "");
  redraw();
});

canvas.addEventListener("dblclick", (event) => {
  const thing = thingAt(event.offsetX, event.offsetY);
  if (!thing || thing.i < 0) return;
  const tl = TIMELINES[thing.k], wide = Math.max(tl.end[thing.i] - tl.start[thing.i], MAKESPAN * 1e-4);
  state.t0 = tl.start[thing.i] - wide * 2;
  state.t1 = tl.start[thing.i] + wide * 3;
  clamp();
  redraw();
});

canvas.addEventListener("pointerleave", () => { tip.hidden = true; state.hovered = null; redraw(); });

function hover(event) {
  const thing = thingAt(event.offsetX, event.offsetY);
  state.hovered = thing;
  tip.hidden = !thing;
  if (!thing) return;
  tip.textContent = thing.text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
  const below = event.clientY + 16;
  tip.style.top = `${below + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : below}px`;
}

// --- paper: light colours, the whole height, at the time that is shown ---

function beginPrint() {
  state.printing = true;
  state.before = { theme: document.documentElement.dataset.theme, y: state.y };
  document.documentElement.dataset.theme = "light";
  Object.assign(state, { width: 1400, height: layout.height, y: 0 });
  readPalette();
  shades.clear();
  draw();
}

function endPrint() {
  if (!state.printing) return;
  const { theme: shown, y } = state.before;
  if (shown === undefined) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = shown;
  state.printing = false;
  state.y = y;
  resize();
  recolour();
}

window.addEventListener("beforeprint", beginPrint);
window.addEventListener("afterprint", endPrint);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
new ResizeObserver(resize).observe(canvas);

buildTools();
showFigures();
showBreakdown();
recolour();
resize();

// For scripts that drive the page: what is shown, and where an op stands.
window.pipeproof = {
  state,
  size: TIMELINES.reduce((sum, tl) => sum + tl.size, 0),
  place(text, rank, k = 0) {
    const tl = TIMELINES[k];
    for (let i = 0; i < tl.size; i++) if (nameOf(tl, i) === text && rankOf(tl, i) === rank) return { ...boxOf(k, i), i };
    return null;
  },
  draw,
  timeAt,
  rows: () => layout.rows,
  gutter: () => [GUTTER, layout.rows.map((row) => {
    const [text, size, indent] = nameOfRow(row);
    pen.font = fontOf(size);
    return widthOf(text) + indent;
  })],
  breakdown: (rank, t0, t1, k = 0) => breakdown(TIMELINES[k], rank, t0, t1),
  times: (first, last, k = 0) => [TIMELINES[k].start[first], TIMELINES[k].end[last]],
  causes: (text, rank, k = 0) => chainOf(k, window.pipeproof.place(text, rank, k).i).map(({ i }) => nameOf(TIMELINES[k], i)),
};
