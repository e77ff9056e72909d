// Numbers: the figures of each timeline, how each rank spends a range of time, and the chain of causes of an operation.

const COMPUTE_KINDS = ["F", "B", "I", "W"];

// By rank: when a message to it is under way and its receive is posted, as [begin, end].
function flightsOf(tl) {
  const flights = tl.ranks.map(() => []);
  for (let a = 0; a < tl.arrows.from.length; a++) {
    const send = tl.arrows.from[a], recv = tl.arrows.to[a];
    flights[rankOf(tl, recv)].push([Math.max(tl.start[send], tl.start[recv]), tl.end[recv]]);
  }
  return flights;
}

for (const tl of TIMELINES) tl.flights = flightsOf(tl);

// How a rank spends the time from t0 to t1, in microseconds. `computes`, `collectives`, `other` and the causes of `idle`
// add up to the range: of what is under way at once, idle time comes first, then collectives, then computations.
// `messages` is the part of the idle time in which a message to the rank is under way.
function breakdown(tl, rank, t0, t1) {
  const marks = [];
  const add = (start, end, kind) => {
    if (end > t0 && start < t1 && end > start) marks.push([Math.max(start, t0), 1, kind], [Math.min(end, t1), -1, kind]);
  };
  tl.lanes.forEach(([owner, queue], lane) => {
    if (owner !== rank || queue !== "compute") return;
    for (const track of tl.tracksOf[lane]) {
      const stop = tl.offsets[track + 1];
      for (let i = lowerBound(tl.end, tl.offsets[track], stop, t0); i < stop && tl.start[i] < t1; i++) {
        const kind = DATA.categories[tl.category[i]];
        if (kind === "collective" || kind === "other" || COMPUTE_KINDS.includes(kind)) add(tl.start[i], tl.end[i], kind);
      }
    }
  });
  const { offsets, start, end, cause } = tl.idle;
  for (let at = lowerBound(end, offsets[rank], offsets[rank + 1], t0); at < offsets[rank + 1] && start[at] < t1; at++) {
    add(start[at], end[at], CAUSES[cause[at]]);
  }
  for (const [from, to] of tl.flights[rank]) add(from, to, "flight");
  marks.sort((a, b) => a[0] - b[0]);
  const open = {}, spent = { computes: 0, collectives: 0, other: 0, messages: 0, idle: Object.fromEntries(CAUSES.map((name) => [name, 0])) };
  marks.forEach(([time, change, kind], at) => {
    open[kind] = (open[kind] ?? 0) + change;
    const length = at + 1 < marks.length ? marks[at + 1][0] - time : 0;
    const idle = CAUSES.find((name) => open[name] > 0);
    if (idle) {
      spent.idle[idle] += length;
      if (open.flight > 0) spent.messages += length;
    } else if (open.collective > 0) spent.collectives += length;
    else if (COMPUTE_KINDS.some((name) => open[name] > 0)) spent.computes += length;
    else if (open.other > 0) spent.other += length;
  });
  return spent;
}

// The most that a rank holds in a range.
function peakIn(tl, rank, t0, t1) {
  const { time, count } = tl.held[rank];
  let most = 0;
  for (let at = Math.max(0, lowerBound(time, 0, time.length, t0) - 1); at < time.length && time[at] < t1; at++) most = Math.max(most, count[at]);
  return most;
}

const percent = (share) => `${trimmed(100 * share, 1)} %`;

// Terms, values and notes of a timeline.
function figuresOf(k) {
  const tl = TIMELINES[k], ranks = tl.ranks.length, whole = Math.max(tl.makespan, 1e-6);
  const spent = tl.ranks.map((_, rank) => breakdown(tl, rank, 0, tl.makespan));
  const busy = tl.ranks.reduce((sum, rank) => sum + rank.busy, 0) / ranks;
  const exposed = spent.reduce((sum, { messages, collectives }) => sum + messages + collectives, 0) / ranks;
  const busiest = tl.peaks.indexOf(Math.max(...tl.peaks));
  return [
    ["Step time", duration(tl.makespan), tl.clock],
    ["Bubble", percent(1 - busy / whole), "time without a computation, mean of the ranks"],
    ["Exposed communication", `${duration(exposed)}, ${percent(exposed / whole)}`, "collectives, and idle time with a message under way; mean of the ranks"],
    [tl.inBytes ? "Peak memory" : "Peak activations", heldAmount(tl, tl.peaks[busiest]), `of ${tl.ranks[busiest].name}`],
    ...(tl.mfu === null ? [] : [["MFU", percent(tl.mfu), "FLOPs of the model over the peak of its devices"]]),
  ];
}

function cells(row, tag, texts) {
  for (const text of texts) {
    const cell = document.createElement(tag);
    cell.textContent = text;
    if (tag === "th") cell.scope = "col";
    row.append(cell);
  }
  return row;
}

function showFigures() {
  document.getElementById("figures").replaceChildren(...TIMELINES.map((tl, k) => {
    const group = document.createElement("div");
    for (const [term, value, note] of figuresOf(k)) {
      const box = document.createElement("div"), name = document.createElement("dt"), amount = document.createElement("dd");
      name.textContent = term !== "Step time" ? term : `Step time, ${tl.clock}`;
      amount.textContent = value;
      box.title = note;
      box.append(name, amount);
      group.append(box);
    }
    return group;
  }));
}

// The table of a range, or of the whole step: a row for each rank of each timeline.
function showBreakdown() {
  const box = document.getElementById("breakdown");
  box.hidden = !state.numbers && !state.range;
  if (box.hidden) return;
  const [t0, t1] = state.range ?? [0, MAKESPAN], table = document.createElement("table");
  const used = new Set();
  const rows = TIMELINES.flatMap((tl, k) => tl.ranks.map((rank, at) => {
    const spent = breakdown(tl, at, t0, Math.min(t1, tl.makespan));
    CAUSES.filter((cause) => spent.idle[cause] > 0).forEach((cause) => used.add(cause));
    ["collectives", "other"].filter((part) => spent[part] > 0).forEach((part) => used.add(part));
    return { name: TIMELINES.length > 1 ? `${k + 1}. ${rank.name}` : rank.name, spent, peak: heldAmount(tl, peakIn(tl, at, t0, t1)) };
  }));
  const causes = CAUSES.filter((cause) => used.has(cause)), parts = ["computes", ...["collectives", "other"].filter((part) => used.has(part))];
  const titles = { message: "waits for messages", collective: "waits in collectives" };
  table.createCaption().textContent = `${duration(t0)} to ${duration(t1)}: ${duration(t1 - t0)}${state.range ? "" : ", the whole step"}`;
  cells(table.createTHead().insertRow(), "th", ["rank", ...parts, ...causes.map((cause) => titles[cause] ?? cause), "of it with a message under way", TIMELINES.some((tl) => tl.inBytes) ? "memory, at most" : "activations, at most"]);
  const body = table.createTBody();
  for (const { name, spent, peak } of rows) {
    cells(body.insertRow(), "td", [name, ...parts.map((part) => duration(spent[part])), ...causes.map((cause) => duration(spent.idle[cause])), duration(spent.messages), peak]);
  }
  box.replaceChildren(table);
}

// The operations that one waited for, from itself back to the beginning of the step; `isEnd`: the other end of a message.
function chainOf(k, i) {
  const { source, before } = TIMELINES[k].causes, chain = [], seen = new Set();
  for (let at = i; at >= 0 && !seen.has(at); at = before[at] - 1) {
    seen.add(at);
    chain.push({ i: at, isEnd: false });
    const end = source[at] - 1;
    if (end >= 0 && !seen.has(end)) {
      seen.add(end);
      chain.push({ i: end, isEnd: true });
    }
  }
  return chain;
}

const MOST_CAUSES = 60;

function showCauses() {
  const box = document.getElementById("causes");
  box.hidden = !state.why || !state.selected;
  if (box.hidden) return;
  const { k, i } = state.selected, tl = TIMELINES[k], chain = chainOf(k, i), list = document.createElement("ol");
  const title = document.createElement("h2");
  title.textContent = `Causes of ${nameOf(tl, i)}, ${chain.length} operations back to the beginning`;
  for (const { i: at, isEnd } of chain.slice(0, MOST_CAUSES)) {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.textContent = nameOf(tl, at);
    button.addEventListener("click", () => { show(k, at); canvas.focus(); });
    item.append(button, ` ${isEnd ? "the other end, " : ""}${tl.ranks[rankOf(tl, at)].name}, ${duration(tl.start[at])} to ${duration(tl.end[at])}`);
    list.append(item);
  }
  if (chain.length > MOST_CAUSES) {
    const item = document.createElement("li");
    item.textContent = `and ${chain.length - MOST_CAUSES} more`;
    list.append(item);
  }
  box.replaceChildren(title, list);
}

// The chain of causes as a line from operation to operation.
function drawCauses() {
  if (!state.why || !state.selected) return;
  const { k, i } = state.selected, tl = TIMELINES[k], chain = chainOf(k, i);
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, AXIS, state.width - GUTTER, state.height);
  pen.clip();
  pen.strokeStyle = palette.cause;
  pen.lineWidth = 2;
  pen.beginPath();
  chain.forEach(({ i: at, isEnd }, place) => {
    const row = rowOf(k, at), y = row.y + row.h - 2 - state.y, next = chain[place + 1];
    const till = next ? (next.isEnd ? tl.end[at] : Math.min(tl.end[at], Math.max(tl.start[at], tl.end[next.i]))) : tl.start[at];
    if (place === 0) pen.moveTo(xOf(tl.end[at]), y);
    else pen.lineTo(xOf(isEnd ? tl.start[at] : tl.end[at]), y);
    if (!isEnd) pen.lineTo(xOf(till), y);
  });
  pen.stroke();
  pen.restore();
}

function drawRange() {
  if (!state.range) return;
  const [left, right] = state.range.map((time) => Math.max(GUTTER, Math.min(state.width, xOf(time))));
  pen.globalAlpha = 0.12;
  pen.fillStyle = palette.cause;
  pen.fillRect(left, AXIS, right - left, state.height);
  pen.globalAlpha = 1;
  pen.fillRect(left, 0, 1, state.height);
  pen.fillRect(right - 1, 0, 1, state.height);
}
