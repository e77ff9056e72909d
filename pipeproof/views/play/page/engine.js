// Times of all rows under a channel model, as longest paths through their events; a cycle is a deadlock.
//
// Each row has two events: post (2 row), when it is under way, and done (2 row + 1), when it has finished. What an event
// follows is defined in pipeproof/comm/channel_models.py and pipeproof/sim/simpy_model.py. Times are whole nanoseconds.

const COMPUTES = new Set(["F", "B", "I", "W"]);

class Events {
  constructor(numEvents) {
    this.numEvents = numEvents;
    this.first = new Int32Array(numEvents).fill(-1);
    this.missing = new Int32Array(numEvents);
    this.grow(8 * numEvents);
    this.numEdges = 0;
  }

  grow(size) {
    const grown = (Type, old) => { const array = new Type(size); if (old) array.set(old); return array; };
    this.next = grown(Int32Array, this.next);
    this.source = grown(Int32Array, this.source);
    this.follower = grown(Int32Array, this.follower);
    this.weight = grown(Float64Array, this.weight);
  }

  // `event` comes at least `weight` after `before`.
  follow(event, before, weight = 0) {
    if (this.numEdges === this.next.length) this.grow(2 * this.numEdges);
    const edge = this.numEdges++;
    this.next[edge] = this.first[before];
    this.first[before] = edge;
    this.source[edge] = before;
    this.follower[edge] = event;
    this.weight[edge] = weight;
    this.missing[event]++;
  }

  // Times of the events, -1 for those that never come.
  times() {
    const time = new Float64Array(this.numEvents), came = new Uint8Array(this.numEvents), missing = this.missing.slice();
    const ready = new Int32Array(this.numEvents);
    let count = 0;
    for (let event = 0; event < this.numEvents; event++) if (!missing[event]) ready[count++] = event;
    for (let place = 0; place < count; place++) {
      const event = ready[place];
      came[event] = 1;
      for (let edge = this.first[event]; edge >= 0; edge = this.next[edge]) {
        const follower = this.follower[edge], at = time[event] + this.weight[edge];
        if (at > time[follower]) time[follower] = at;
        if (!--missing[follower]) ready[count++] = follower;
      }
    }
    if (count === this.numEvents) return {time, isStuck: false, came};
    return {time: time.map((at, event) => (came[event] ? at : -1)), isStuck: true, came};
  }

  // Events that wait for each other in a circle, each for the next.
  cycle(came) {
    const waitsFor = new Int32Array(this.numEvents).fill(-1);
    for (let edge = this.numEdges - 1; edge >= 0; edge--) {
      if (!came[this.source[edge]] && !came[this.follower[edge]]) waitsFor[this.follower[edge]] = this.source[edge];
    }
    const seen = new Map(), path = [];
    for (let event = waitsFor.findIndex((before) => before >= 0); ; event = waitsFor[event]) {
      if (seen.has(event)) return path.slice(seen.get(event));
      seen.set(event, path.length);
      path.push(event);
    }
  }
}

const post = (row) => 2 * row, done = (row) => 2 * row + 1;

// The FIFO of its rank that a transfer shares with others, beyond its end of a channel.
function fifoOf(graph, row, queue) {
  const {communicator, source, destination} = graph.channels[graph.channel[row]];
  const isSend = graph.kind[row].startsWith("SEND");
  if (queue === "rank" || queue === "device") return queue;
  if (queue === "direction") return `direction ${isSend}`;
  if (queue === "communicator") return communicator;
  if (queue === "pair") return isSend ? destination : source;
  return null;
}

function eventsOf(graph, model, durations) {
  const events = new Events(2 * graph.numRows);
  for (let rank = 0; rank < graph.numRanks; rank++) {
    const last = new Map();
    let issued = -1;
    const inOrder = (row, order) => {
      if (last.has(order)) events.follow(post(row), done(last.get(order)));
      last.set(order, row);
    };
    for (let row = graph.offsets[rank]; row < graph.offsets[rank + 1]; row++) {
      if (issued >= 0) events.follow(post(row), done(issued));
      if (graph.channel[row] < 0) {
        issued = row;
        events.follow(done(row), post(row), durations ? durations.rows[row] : 0);
        if (graph.target[row] >= 0) events.follow(done(row), done(graph.target[row]));
        if (graph.meeting[row] >= 0 && model.queue === "device") inOrder(row, "device");
        continue;
      }
      inOrder(row, `${graph.channel[row]} ${graph.kind[row].startsWith("SEND")}`);
      const fifo = fifoOf(graph, row, model.queue);
      if (fifo !== null) inOrder(row, fifo);
    }
  }
  for (const members of graph.meetings.values()) {
    for (const row of members) for (const other of members) if (other !== row) events.follow(done(row), post(other));
  }
  for (const {sends, receives} of graph.channels) {
    sends.forEach((send, place) => {
      const receive = receives[place], ns = durations ? durations.messages[send] : 0;
      if (model.completes === "rendezvous") {
        for (const row of [send, receive]) {
          events.follow(done(row), post(send), ns);
          events.follow(done(row), post(receive), ns);
        }
        return;
      }
      events.follow(done(send), post(send));
      if (model.completes === "slots" && place >= model.slots) events.follow(done(send), done(receives[place - model.slots]));
      events.follow(done(receive), post(receive));
      events.follow(done(receive), done(send), ns);
    });
  }
  return events;
}

// {starts, ends, cycle}: times of all rows, -1 where a row never begins or ends; the rows of a circle of waits, if any.
function run(graph, model, durations) {
  const events = eventsOf(graph, model, durations), {time, isStuck, came} = events.times();
  const starts = new Float64Array(graph.numRows), ends = new Float64Array(graph.numRows);
  for (let row = 0; row < graph.numRows; row++) {
    starts[row] = time[post(row)];
    ends[row] = time[done(row)];
    if (graph.pairOf[row] >= 0) starts[row] = starts[graph.pairOf[row]];
    if (graph.parent[row] >= 0) ends[graph.parent[row]] = ends[row];
  }
  const cycle = isStuck ? [...new Set(events.cycle(came).map((event) => event >> 1))] : [];
  return {starts, ends, isStuck, cycle};
}

const deadlocks = (graph, model) => eventsOf(graph, model, null).times().isStuck;

// A model of the verifier for messages of one size: an eager buffer is as many slots as messages fit into it.
function modelFor({queue, completes, slots, eagerBytes}, messageBytes) {
  if (eagerBytes === null) return {queue, completes, slots};
  const fitting = Math.floor(eagerBytes / messageBytes);
  return fitting ? {queue, completes: "slots", slots: fitting} : {queue, completes: "rendezvous", slots: 0};
}

// Nanoseconds of each row and of the message of each send, both on average and with noise.
function durationsOf(graph, times, noise = null) {
  const rows = new Float64Array(graph.numRows), messages = new Float64Array(graph.numRows);
  const numStages = times.numStages;
  for (let row = 0; row < graph.numRows; row++) {
    const kind = graph.kind[row];
    if (COMPUTES.has(kind)) {
      if (graph.pairOf[row] >= 0) continue; // both of a pair take the time of the first
      const isPair = row + 1 < graph.numRows && graph.pairOf[row + 1] === row;
      const ns = isPair ? times.overlapped : {F: times.F, B: times.I + times.W, I: times.I, W: times.W}[kind];
      rows[row] = noise ? Math.round(ns * noise.compute()) : ns;
    } else if (kind.startsWith("SEND")) {
      messages[row] = noise ? Math.round(times.message * noise.network()) : times.message;
    }
  }
  return {rows, messages};
}

// Factors of mean 1: the exponential of a normal variable, from a generator with a seed (mulberry32, Box-Muller).
function noiseOf(seed, computeCv, networkCv) {
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  const factor = (cv) => {
    const variance = Math.log1p(cv * cv);
    return cv ? Math.exp(normal() * Math.sqrt(variance) - variance / 2) : 1;
  };
  return {compute: () => factor(computeCv), network: () => factor(networkCv)};
}

// The figures of a finished run: makespan, and by rank the busy time, the idle time by place, the activations held.
function figuresOf(graph, {starts, ends}) {
  let makespan = 0;
  for (const end of ends) if (end > makespan) makespan = end;
  const ranks = range(graph.numRanks).map((rank) => {
    const changes = [];
    let busy = 0, reached = 0, first = makespan, last = 0;
    for (let row = graph.offsets[rank]; row < graph.offsets[rank + 1]; row++) {
      const kind = graph.kind[row];
      if (!COMPUTES.has(kind)) continue;
      busy += Math.max(0, ends[row] - Math.max(starts[row], reached));
      reached = Math.max(reached, ends[row]);
      first = Math.min(first, starts[row]);
      last = Math.max(last, ends[row]);
      if (kind === "F") changes.push([starts[row], 1]);
      else if (kind !== "I") changes.push([ends[row], -1]);
    }
    changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    let held = 0, peak = 0;
    const curve = changes.map(([time, change]) => { held += change; peak = Math.max(peak, held); return [time, held]; });
    return {busy, warmUp: first, waiting: last - first - busy, coolDown: makespan - last, bubble: makespan - busy, peak, curve};
  });
  return {makespan, ranks, busy: ranks.reduce((sum, {busy}) => sum + busy, 0)};
}
