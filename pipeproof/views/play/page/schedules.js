// Orders of computations by rank: pipeproof/schedule/generators, written again for a browser. Tests compare both.
//
// An operation is {kind, stage, microBatch}; the first of two that overlap also has `pair: true`, and the second follows.

const compute = (kind, stage, microBatch) => ({kind, stage, microBatch});
const range = (count, from = 0) => Array.from({length: count}, (_, index) => from + index);
const allOf = (kind, stage, m) => range(m).map((k) => compute(kind, stage, k));

// The sizes for which a schedule exists, in words and as a test; schedules that are not listed exist for all sizes.
const inRounds = {text: "m a multiple of the rounds, which are m / p rounded down", holds: (p, m) => m % Math.max(1, Math.floor(m / p)) === 0};
const SIZES = {
  "interleaved torch": inRounds,
  "interleaved megatron": {text: "m a multiple of p", holds: (p, m) => m % p === 0},
  "interleaved fleet": {text: "m = p, or m at least 2p", holds: (p, m) => m === p || m >= 2 * p},
  "interleaved fleet_fthenb": {text: "m = p", holds: (p, m) => m === p},
  "interleaved fleet_balanced": {text: "m at least p", holds: (p, m) => m >= p},
  interleaved_zb: inRounds,
  dualpipe: {text: "p even, m even and at least 2p", holds: (p, m) => p % 2 === 0 && m % 2 === 0 && m >= 2 * p},
  dualpipe_v: {text: "m at least 2p", holds: (p, m) => m >= 2 * p},
  chimera: {text: "p even", holds: (p) => p % 2 === 0},
};

const sizesOf = (kind, variant) => SIZES[kind] ?? SIZES[`${kind} ${variant}`] ?? {text: "", holds: () => true};

// Warm-up forwards, then forward and backward in turn, then the backwards that are left.
function alternate(forwards, backwards, numWarmup) {
  const warmup = Math.min(numWarmup, forwards.length);
  const program = forwards.slice(0, warmup);
  forwards.slice(warmup).forEach((forward, index) => program.push(forward, backwards[index]));
  return program.concat(backwards.slice(forwards.length - warmup));
}

// Rounds of F, I and W; W runs some rounds behind I.
function withWeightLag(forwards, inputs, numWarmup, weightLag) {
  const weights = inputs.map((op) => compute("W", op.stage, op.microBatch));
  const warmup = Math.min(numWarmup, forwards.length), lag = Math.min(weightLag, inputs.length);
  const program = forwards.slice(0, warmup);
  inputs.forEach((input, index) => {
    if (warmup + index < forwards.length) program.push(forwards[warmup + index]);
    program.push(input);
    if (index >= lag) program.push(weights[index - lag]);
  });
  return program.concat(weights.slice(weights.length - lag));
}

// [chunk, micro-batch]: each group of micro-batches goes through all chunks before the next one begins.
function orderOfGroups(sizes, v) {
  const order = [];
  let first = 0;
  for (const size of sizes) {
    for (const chunk of range(v)) for (const k of range(size, first)) order.push([chunk, k]);
    first += size;
  }
  return order;
}

const fromTheLastChunk = (order, v) => order.map(([chunk, k]) => [v - 1 - chunk, k]);
const onRank = (kind, order, rank, p) => order.map(([chunk, k]) => compute(kind, chunk * p + rank, k));

function inGroups(p, v, sizes, {backwards, perHop = 2} = {}) {
  const order = orderOfGroups(sizes, v), back = backwards ?? fromTheLastChunk(order, v);
  return range(p).map((rank) =>
    alternate(onRank("F", order, rank, p), onRank("B", back, rank, p), (v - 1) * sizes[0] + perHop * (p - 1 - rank)));
}

function equalRounds(p, m) {
  const rounds = Math.max(1, Math.floor(m / p));
  return range(rounds).map(() => m / rounds);
}

const fleetGroups = (p, m) => [p + (m % p), ...range(Math.floor(m / p) - 1).map(() => p)];

// Backwards of the last chunk keep pace with its forwards on the last rank; the others fill the places between.
function lastChunkAhead(p, sizes, v) {
  const others = fromTheLastChunk(orderOfGroups(sizes, v), v).filter(([chunk]) => chunk !== v - 1);
  const order = [];
  let first = 0;
  sizes.forEach((size, group) => {
    const due = first + group * (v - 1) * p;
    order.push(...others.splice(0, due - order.length));
    order.push(...range(size, first).map((k) => [v - 1, k]));
    first += size;
  });
  return order.concat(others);
}

const INTERLEAVED = {
  torch: (p, m, v) => inGroups(p, v, equalRounds(p, m)),
  megatron: (p, m, v) => inGroups(p, v, range(m / p).map(() => p)),
  fleet: (p, m, v) => inGroups(p, v, fleetGroups(p, m)),
  fleet_fthenb: (p, m, v) => {
    const order = orderOfGroups([m], v);
    return range(p).map((rank) =>
      [...onRank("F", order, rank, p), ...onRank("B", fromTheLastChunk(order, v), rank, p)]);
  },
  fleet_balanced: (p, m, v) => {
    if (m < 2 * p) return inGroups(p, v, [m], {perHop: 1});
    const sizes = fleetGroups(p, m);
    return inGroups(p, v, sizes, {backwards: lastChunkAhead(p, sizes, v)});
  },
};

function zbV(rank, p, m) {
  const behind = p - rank, most = Math.max(m, 2 * p - 1);
  const letters = "F".repeat(2 * behind - 1) + "fF".repeat(rank) + "fiw".repeat(behind)
    + "FIWfiw".repeat(most - (p + behind - 1)) + "IWfiw".repeat(behind - 1) + "Ii".repeat(rank) + "IW".repeat(behind)
    + "w".repeat(rank) + "W".repeat(rank);
  const next = {};
  const program = [];
  for (const letter of letters) {
    const k = (next[letter] = (next[letter] ?? -1) + 1), kind = letter.toUpperCase();
    if (k < m) program.push(compute(kind, letter === kind ? rank : 2 * p - 1 - rank, k));
  }
  return program;
}

// The first and the due slot of each micro-batch at one of the 4p places of its way through a V.
function windows(p, m, {ahead, hop, turn}, place) {
  const way = Math.floor(place / p), passed = place % p, down = p - 1 - passed, firstCycle = 3 * p - 1;
  const cycles = range(m).map((k) => firstCycle + 6 * k);
  if (way === 0) {
    const early = Math.min(ahead, m);
    return [...range(early).map((k) => [place + 2 * k, firstCycle - 2 * (ahead - k) - down]),
      ...cycles.slice(0, m - early).map((cycle) => [cycle + 4 - hop * down, cycle + 4 - down])];
  }
  if (way === 1) return cycles.map((cycle) => [0, cycle - p - down]);
  if (way === 2) return cycles.map((cycle) => [cycle - hop * down, cycle - down]);
  return cycles.map((cycle) => [cycle + turn + passed, cycle + turn + passed]);
}

// The way of one micro-batch repeated every six slots: of what may run, a rank runs what is due first, else its oldest W.
function buildingBlocks(p, m, block) {
  const numDone = [m, ...range(4 * p).map(() => 0)];
  const ranks = range(p).map((rank) => ({
    program: [], weights: [], forwardsLeft: 2 * m, free: 2 * block.ahead,
    ways: [rank, 2 * p - 1 - rank, 2 * p + rank, 4 * p - 1 - rank].map((place) =>
      ({place, windows: windows(p, m, block, place), isForward: place < 2 * p})),
  }));
  let left = 6 * p * m;
  for (let slot = 0; left; slot++) {
    const moved = [];
    for (const rank of ranks) {
      const keepsMemory = m > block.ahead && rank.forwardsLeft > 0;
      let chosen = null, chosenDue = 0;
      for (const way of rank.ways) {
        const k = numDone[way.place + 1];
        if (k === numDone[way.place]) continue;
        const [first, due] = way.windows[k];
        if (slot < first && (keepsMemory || way.isForward)) continue;
        if (way.isForward && !rank.free) continue;
        if (chosen === null || due < chosenDue) [chosen, chosenDue] = [way, due];
      }
      if (chosen) {
        const k = numDone[chosen.place + 1], stage = chosen.isForward ? chosen.place : 4 * p - 1 - chosen.place;
        rank.program.push(compute(chosen.isForward ? "F" : "I", stage, k));
        if (chosen.isForward) { rank.forwardsLeft--; rank.free--; } else rank.weights.push(compute("W", stage, k));
        moved.push(chosen.place);
      } else if (rank.weights.length) {
        rank.program.push(rank.weights.shift());
        rank.free++;
      } else continue;
      left--;
    }
    for (const place of moved) numDone[place + 1]++;
  }
  return ranks.map((rank) => rank.program);
}

function dualPipeV(rank, p, m) {
  const stages = [rank, 2 * p - 1 - rank], behind = p - 1 - rank, whole = rank + 1, out = 0, back = 1;
  const numForwards = [0, 0], numBackwards = [0, 0], inputs = [], program = [];
  let numWeights = 0;
  const forward = (way, pair = false) => {
    const op = compute("F", stages[way], numForwards[way]++);
    program.push(pair ? {...op, pair} : op);
  };
  const backward = (way, kind) => {
    program.push(compute(kind, stages[way], numBackwards[way]++));
    if (kind === "I") inputs.push(program.at(-1));
  };
  const weight = () => { const {stage, microBatch} = inputs[numWeights++]; program.push(compute("W", stage, microBatch)); };
  const overlapped = (way) => { forward(way, true); backward(1 - way, "B"); };
  range(2 * behind).forEach(() => forward(out));
  range(whole).forEach(() => { forward(out); forward(back); });
  range(behind).forEach(() => { backward(back, "I"); weight(); forward(back); });
  range(m - 2 * p + whole).forEach((index) => {
    if (index === 0 && behind === 0) { forward(out); backward(back, "B"); } else overlapped(out);
    overlapped(back);
  });
  range(behind).forEach(() => { backward(back, "B"); overlapped(back); });
  range(2 * whole).forEach((place) => backward(place % 2 ? out : back, place < whole ? "B" : "I"));
  range(behind).forEach(() => { weight(); backward(out, "I"); });
  range(whole).forEach(weight);
  return program;
}

// DualPipeV of half the ranks and micro-batches, its way back done by the opposite rank for the other direction.
function dualPipe(rank, p, m) {
  const half = m / 2, folded = Math.min(rank, p - 1 - rank), [out, back] = folded === rank ? [0, half] : [half, 0];
  return dualPipeV(folded, p / 2, half).map((op) => ({...op, microBatch: op.microBatch + (op.stage < p / 2 ? out : back)}));
}

function chimera(rank, p, m) {
  const slots = [];
  for (let first = 0; first < m; first += p) {
    const left = Math.min(p, m - first), atRank0 = Math.floor((left + 1) / 2);
    for (const place of range(left)) {
      const entersAt0 = place < atRank0, slot = 2 * first + 2 * (entersAt0 ? place : place - atRank0);
      const stage = entersAt0 ? rank : p - 1 - rank;
      slots[slot + stage] = compute("F", stage, first + place);
      slots[slot + 2 * p - 1 - stage] = compute("B", stage, first + place);
    }
  }
  return slots.filter((op) => op !== undefined);
}

function loopedBfs(rank, p, m, v) {
  const stages = range(v).map((chunk) => chunk * p + rank);
  return [...stages.flatMap((stage) => allOf("F", stage, m)),
    ...stages.reverse().flatMap((stage) => allOf("B", stage, m).reverse())];
}

function interleavedZb(p, m, v) {
  const rounds = equalRounds(p, m), order = orderOfGroups(rounds, v), back = fromTheLastChunk(order, v);
  return range(p).map((rank) => withWeightLag(
    onRank("F", order, rank, p), onRank("I", back, rank, p), (v - 1) * rounds[0] + p - 1 - rank, rank));
}

const eachRank = (program) => (p, m, v) => range(p).map((rank) => program(rank, p, m, v));
const zeroBubble = (spare) => eachRank((rank, p, m) => withWeightLag(allOf("F", rank, m), allOf("I", rank, m),
  p - 1 - rank + Math.min(p - 1 - rank, spare(p, m)), rank + Math.min(rank, spare(p, m))));

const GENERATORS = {
  gpipe: eachRank((rank, p, m) => [...allOf("F", rank, m), ...allOf("B", rank, m)]),
  "1f1b": eachRank((rank, p, m) => alternate(allOf("F", rank, m), allOf("B", rank, m), p - 1 - rank)),
  eager_1f1b: (p, m) => inGroups(p, 1, [m]),
  interleaved: (p, m, v, variant) => INTERLEAVED[variant](p, m, v),
  looped_bfs: eachRank(loopedBfs),
  zb_h1: zeroBubble(() => 0),
  zb_h2: zeroBubble((p, m) => Math.max(0, m - p)),
  interleaved_zb: interleavedZb,
  zb_v: eachRank(zbV),
  v_half: (p, m) => buildingBlocks(p, m, {ahead: Math.floor(p / 2) + 1, hop: 2, turn: 2}),
  v_min: (p, m) => buildingBlocks(p, m, {ahead: Math.floor((p + 4) / 3), hop: 1, turn: 1}),
  dualpipe: eachRank(dualPipe),
  dualpipe_v: eachRank(dualPipeV),
  chimera: eachRank(chimera),
};

const textOf = ({kind, stage, microBatch}) => `${stage}${kind}${microBatch}`;

// {programs, m, numStages} of a text with a line for each rank, or {problem}: the reason if it is not a schedule of this page.
const readBefore = new Map();
function readPrograms(text) {
  if (!readBefore.has(text)) {
    readBefore.clear();
    readBefore.set(text, parsePrograms(text));
  }
  return readBefore.get(text);
}

function parsePrograms(text) {
  const refuse = (problem) => ({problem});
  const lines = text.split("\n").map((line) => line.replace(/^\s*(rank\s+\d+\s*:)?/, "").trim()).filter(Boolean);
  const programs = [], seen = new Map();
  let m = 0, numStages = 0;
  for (const [rank, line] of lines.entries()) {
    programs.push([]);
    for (const word of line.split(/[\s,;]+/).filter(Boolean)) {
      const [, stage, kind, microBatch] = word.match(/^(\d{1,3})([FBIW])(\d{1,3})$/) ?? [];
      if (kind === undefined) return refuse(`rank ${rank}: ${word.slice(0, 30)} is not a computation such as 0F0`);
      const op = compute(kind, +stage, +microBatch);
      if (seen.has(textOf(op))) return refuse(`${word} is there twice`);
      const [forward, input] = ["F", "I"].map((needed) => seen.get(textOf({...op, kind: needed})));
      if ("BI".includes(kind) && forward !== rank) return refuse(`${word} comes before its forward, or on another rank`);
      if (kind === "W" && input !== rank) return refuse(`${word} comes before its I, or on another rank`);
      seen.set(textOf(op), rank);
      programs[rank].push(op);
      m = Math.max(m, +microBatch + 1);
      numStages = Math.max(numStages, +stage + 1);
    }
  }
  if (programs.length > 16 || m > 64 || numStages > 128) return refuse("at most 16 ranks, 64 micro-batches and 128 stages");
  if (numStages % programs.length) return refuse(`${numStages} stages on ${programs.length} ranks: each rank needs as many`);
  const has = (kind, stage, microBatch) => seen.has(textOf({kind, stage, microBatch}));
  for (const stage of range(numStages)) {
    for (const k of range(m)) {
      if (!has("F", stage, k)) return refuse(`${stage}F${k} is missing`);
      if (has("B", stage, k) === has("I", stage, k)) return refuse(`micro-batch ${k} of stage ${stage} needs either B, or I and W`);
      if (has("I", stage, k) !== has("W", stage, k)) return refuse(`${stage}W${k} is missing`);
    }
  }
  return {programs, m, numStages, problem: ""};
}
