// What the reader sees of the data: the visible time, the scroll position, what is switched on, and where each row stands.

const OVERVIEW = 12, AXIS = 22 + OVERVIEW, COMPUTE = 24, QUEUE = 11, HELD = 28, GAP = 6;
// The width of the names of rows: as wide as the widest, and none is cut.
let GUTTER = 132;

const state = {
  t0: 0, t1: MAKESPAN, y: 0, width: 0, height: 0, selected: null, hovered: null, printing: false,
  arrows: false, critical: false, bubbles: true, held: true,
  queues: BASE.ranks.length <= 8, numbers: false, why: false, range: null,
  folded: new Set(),
};

const foldKey = (k, rank) => `${k} ${rank}`;
const plotWidth = () => Math.max(1, state.width - GUTTER - 8);
const xOf = (time) => GUTTER + ((time - state.t0) / (state.t1 - state.t0)) * plotWidth();
const timeAt = (x) => state.t0 + ((x - GUTTER) / plotWidth()) * (state.t1 - state.t0);

// Rows from top to bottom, in pixels from the top of the content: {kind, k (the timeline), rank, lane, y, h}.
function rowsOf() {
  const rows = [];
  let y = AXIS;
  TIMELINES.forEach((tl, k) => {
    y += 4;
    const lanes = tl.ranks.map(() => []);
    tl.lanes.forEach(([rank, queue], lane) => lanes[rank].push({ lane, queue }));
    tl.ranks.forEach((_, rank) => {
      const isFolded = state.folded.has(foldKey(k, rank));
      const compute = lanes[rank].find(({ queue }) => queue === "compute");
      rows.push({ kind: "compute", k, rank, lane: compute ? compute.lane : -1, y, h: COMPUTE });
      y += COMPUTE + 1;
      if (state.queues && !isFolded) {
        for (const { lane, queue } of lanes[rank]) {
          if (queue === "compute") continue;
          rows.push({ kind: "queue", k, rank, lane, y, h: QUEUE });
          y += QUEUE + 1;
        }
      }
      if (state.held && !isFolded) {
        rows.push({ kind: "held", k, rank, lane: -1, y, h: HELD });
        y += HELD + 1;
      }
      y += isFolded ? 1 : GAP;
    });
  });
  return { rows, height: y };
}

let layout = rowsOf();
// By timeline: the row of a lane, and of a rank's compute queue, which represents queues that are not shown.
let rowOfLane = [], rowOfRank = [];

function relayout() {
  layout = rowsOf();
  GUTTER = gutterWidth();
  rowOfLane = TIMELINES.map(() => new Map());
  rowOfRank = TIMELINES.map(() => new Map());
  for (const row of layout.rows) {
    if (row.lane >= 0) rowOfLane[row.k].set(row.lane, row);
    if (row.kind === "compute") rowOfRank[row.k].set(row.rank, row);
  }
  clamp();
}

const rowOf = (k, i) => rowOfLane[k].get(laneOf(TIMELINES[k], i)) ?? rowOfRank[k].get(rankOf(TIMELINES[k], i));

function clamp() {
  const least = Math.min(MAKESPAN, Math.max(1e-6, MAKESPAN * 1e-7));
  const length = Math.min(MAKESPAN * 1.1, Math.max(least, state.t1 - state.t0));
  const begin = Math.min(Math.max(state.t0, -0.05 * MAKESPAN), 1.05 * MAKESPAN - length);
  state.t0 = begin;
  state.t1 = begin + length;
  state.y = Math.min(Math.max(0, state.y), Math.max(0, layout.height - state.height));
}

function zoom(factor, time) {
  const before = state.t1 - state.t0;
  const share = (time - state.t0) / before;
  const length = Math.min(MAKESPAN * 1.1, before * factor);
  state.t0 = time - share * length;
  state.t1 = state.t0 + length;
  clamp();
}

// A part of an op's lane: what runs beside or inside of something else is drawn over its lower part.
function trackBox(tl, track, row) {
  const depth = tl.tracks[track][1];
  const top = (row.h * depth) / (depth + 1);
  return { y: row.y + top, h: row.h - top };
}

// The box of a span as it is drawn now, in pixels of the canvas.
function boxOf(k, i) {
  const tl = TIMELINES[k], row = rowOf(k, i);
  const own = row.lane === laneOf(tl, i) ? trackBox(tl, tl.track[i], row) : { y: row.y, h: row.h };
  const x = xOf(tl.start[i]);
  return { x, y: own.y - state.y, w: Math.max(2, xOf(tl.end[i]) - x), h: own.h };
}
