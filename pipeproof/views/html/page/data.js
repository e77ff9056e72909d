"use strict";
// The data of the page: columns from base64 to typed arrays, and the searches in them.

const ARRAYS = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, f64: Float64Array };

function column({ type, data }) {
  const text = atob(data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return new ARRAYS[type](bytes.buffer);
}

// The first place in [from, to) whose value is at least `least`; `to` if there is none. Values ascend.
function lowerBound(values, from, to, least) {
  while (from < to) {
    const middle = (from + to) >>> 1;
    if (values[middle] < least) from = middle + 1;
    else to = middle;
  }
  return from;
}

function decoded(raw) {
  const tl = { ...raw };
  for (const key of ["offsets", "start", "end", "category", "chunk", "name", "step", "bytes", "critical"]) tl[key] = column(raw[key]);
  tl.size = tl.start.length;
  for (const key of ["arrows", "idle", "path", "causes"]) {
    tl[key] = Object.fromEntries(Object.entries(raw[key]).map(([name, value]) => [name, column(value)]));
  }
  tl.held = raw.held.map(({ time, count }) => ({ time: column(time), count: column(count) }));
  tl.peaks = tl.held.map(({ count }) => count.reduce((most, value) => Math.max(most, value), 0));
  tl.peak = Math.max(1, ...tl.peaks);
  tl.inBytes = raw.held_unit === "bytes";
  tl.tracksOf = raw.lanes.map(() => []);
  raw.tracks.forEach(([lane], track) => tl.tracksOf[lane].push(track));
  tl.track = new Uint32Array(tl.size);
  raw.tracks.forEach((_, track) => tl.track.fill(track, tl.offsets[track], tl.offsets[track + 1]));
  tl.covered = coveredOf(tl);
  tl.partner = new Int32Array(tl.size).fill(-1);
  for (let a = 0; a < tl.arrows.from.length; a++) {
    tl.partner[tl.arrows.from[a]] = tl.arrows.to[a];
    tl.partner[tl.arrows.to[a]] = tl.arrows.from[a];
  }
  return tl;
}

// The most that any rank holds, of all timelines with the same unit: one height is one amount on the whole page.
function peakOf(tl) {
  return Math.max(...TIMELINES.filter((other) => other.inBytes === tl.inBytes).map((other) => other.peak));
}

// Which spans have another one beside or inside of them on a deeper track of their lane, drawn over their lower half.
function coveredOf(tl) {
  const covered = new Uint8Array(tl.size);
  for (const [first, ...deeper] of tl.tracksOf) {
    for (const track of deeper) {
      let i = tl.offsets[first];
      for (let j = tl.offsets[track]; j < tl.offsets[track + 1]; j++) {
        i = lowerBound(tl.end, i, tl.offsets[first + 1], tl.start[j]);
        if (i < tl.offsets[first + 1] && tl.end[i] === tl.start[j] && tl.end[j] > tl.start[j]) i++;
        if (i < tl.offsets[first + 1] && tl.start[i] <= tl.start[j]) covered[i] = 1;
      }
    }
  }
  return covered;
}

const laneOf = (tl, i) => tl.tracks[tl.track[i]][0];
const rankOf = (tl, i) => tl.lanes[laneOf(tl, i)][0];
const nameOf = (tl, i) => tl.names[tl.name[i]];

const DATA = JSON.parse(document.getElementById("data").textContent);
const TIMELINES = DATA.timelines.map(decoded);
const CATEGORY = Object.fromEntries(DATA.categories.map((name, at) => [name, at]));
const BASE = TIMELINES[0];
const MAKESPAN = Math.max(...TIMELINES.map((tl) => tl.makespan), 1e-6);
