// The rows of every rank: computations with their transfers and waits, as pipeproof/comm lowers a plan.
//
// A graph has one array for each column, with a place for each row; the rows of a rank follow each other. -1 is none.

const RECEIVE = {F: "RECV_F", B: "RECV_B", I: "RECV_B"}, SEND = {F: "SEND_F", B: "SEND_B", I: "SEND_B"};

// Ranks of each stage by micro-batch, and what computations pass to each other, each named by its user.
class Pipeline {
  constructor(programs, m) {
    this.programs = programs;
    this.m = m;
    this.owner = [];
    programs.forEach((program, rank) => program.forEach((op) => {
      if (op.kind === "F") (this.owner[op.stage] ??= [])[op.microBatch] = rank;
    }));
    this.numStages = this.owner.length;
  }

  ownerOf(stage, microBatch) { return stage >= 0 && stage < this.numStages ? this.owner[stage][microBatch] : -1; }

  // The link over which a computation gets its input, null where the input is on its rank.
  input(rank, op) {
    if (op.kind === "W") return null;
    const forward = op.kind === "F", source = this.ownerOf(op.stage + (forward ? -1 : 1), op.microBatch);
    return source < 0 || source === rank ? null : `${forward ? "forward" : "backward"} ${source}->${rank}`;
  }

  // {link, user} of the message that a computation sends, null where nothing leaves the rank.
  output(rank, op) {
    if (op.kind === "W") return null;
    const forward = op.kind === "F", stage = op.stage + (forward ? 1 : -1), target = this.ownerOf(stage, op.microBatch);
    if (target < 0 || target === rank) return null;
    return {link: `${forward ? "forward" : "backward"} ${rank}->${target}`, user: compute(forward ? "F" : "B", stage, op.microBatch)};
  }
}

const nameOf = (link, op) => `${link} ${op.stage} ${op.microBatch}`;

// By rank and place: the computations whose inputs are received before the one there, in the order of their sends.
function receivesAsSent(pipeline) {
  const sent = new Map(), index = new Map();
  pipeline.programs.forEach((program, rank) => program.forEach((op) => {
    const output = pipeline.output(rank, op);
    if (!output) return;
    if (!sent.has(output.link)) sent.set(output.link, []);
    index.set(nameOf(output.link, output.user), sent.get(output.link).length);
    sent.get(output.link).push(output.user);
  }));
  return pipeline.programs.map((program, rank) => {
    const posted = new Map(), posts = new Map();
    program.forEach((op, place) => {
      const link = pipeline.input(rank, op);
      if (!link) return;
      const first = posted.get(link) ?? 0, at = index.get(nameOf(link, op));
      posted.set(link, Math.max(first, at + 1));
      if (first !== at) posts.set(place, sent.get(link).slice(first, at + 1));
    });
    return posts;
  });
}

// Ends of all computations if each of F, I and W takes a unit of time and messages take none.
function unitEnds(pipeline) {
  const ends = pipeline.programs.map(() => []), clock = pipeline.programs.map(() => 0), outputs = new Map();
  const waiting = new Map(), ready = range(pipeline.programs.length);
  const advance = (rank) => {
    const program = pipeline.programs[rank];
    while (ends[rank].length < program.length) {
      const place = ends[rank].length, ops = program.slice(place, place + (program[place].pair ? 2 : 1));
      let start = clock[rank];
      for (const op of ops) {
        const link = pipeline.input(rank, op);
        if (!link) continue;
        const name = nameOf(link, op);
        if (!outputs.has(name)) { waiting.set(name, rank); return; }
        start = Math.max(start, outputs.get(name));
      }
      clock[rank] = start + ops.reduce((sum, op) => sum + (op.kind === "B" ? 2 : 1), 0);
      for (const op of ops) {
        ends[rank].push(clock[rank]);
        const output = pipeline.output(rank, op);
        if (!output) continue;
        const name = nameOf(output.link, output.user);
        outputs.set(name, clock[rank]);
        if (waiting.has(name)) { ready.push(waiting.get(name)); waiting.delete(name); }
      }
    }
  };
  while (ready.length) advance(ready.pop());
  return ends;
}

const compareKeys = (a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2];

// Number of sends, in order of their keys, that come before a key.
function numBefore(sends, key) {
  let low = 0, high = sends.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (compareKeys(sends[middle].key, key) < 0) low = middle + 1; else high = middle;
  }
  return low;
}

// Receives before each place, at most `most` computations ahead of their use, none before an earlier send of the rank.
function earlyReceives(pipeline, most) {
  const asSent = receivesAsSent(pipeline), ends = unitEnds(pipeline), keys = new Map();
  const sent = pipeline.programs.map(() => new Map());
  pipeline.programs.forEach((program, rank) => program.forEach((op, place) => {
    const output = pipeline.output(rank, op);
    if (!output) return;
    const key = [ends[rank][place], rank, place];
    keys.set(nameOf(output.link, output.user), key);
    sent[rank].set(place, key);
  }));
  return pipeline.programs.map((program, rank) => {
    const entries = entriesOf(program), sending = [], received = entries.map(() => []);
    entries.forEach((places, entry) => {
      const own = places.filter((place) => sent[rank].has(place)).map((place) => sent[rank].get(place));
      if (own.length) sending.push({entry, key: own.sort(compareKeys)[0]});
    });
    entries.forEach((places, entry) => {
      for (const place of places) {
        for (const user of asSent[rank].get(place) ?? [program[place]]) {
          const link = pipeline.input(rank, user);
          if (!link) continue;
          const key = keys.get(nameOf(link, user));
          const earlier = numBefore(sending, key);
          const afterSends = earlier ? sending[earlier - 1].entry + 1 : 0;
          received[Math.min(entry, Math.max(entry - most, 0, afterSends))].push({key, user});
        }
      }
    });
    const posts = new Map();
    entries.forEach((places, entry) => {
      const users = received[entry].sort((a, b) => compareKeys(a.key, b.key)).map(({user}) => user);
      const own = places.map((place) => program[place]).filter((op) => pipeline.input(rank, op));
      const isOwn = users.length === own.length && users.every((user, i) =>
        user.kind === own[i].kind && user.stage === own[i].stage && user.microBatch === own[i].microBatch);
      if (isOwn) return;
      places.forEach((place) => posts.set(place, []));
      posts.set(places[0], users);
    });
    return posts;
  });
}

// Places of a program one by one, those that overlap in twos.
function entriesOf(program) {
  const entries = [];
  for (let place = 0; place < program.length; place += entries.at(-1).length) {
    entries.push(program[place].pair ? [place, place + 1] : [place]);
  }
  return entries;
}

class Graph {
  constructor(numRanks) {
    this.numRanks = numRanks;
    this.kind = []; this.rank = []; this.stage = []; this.microBatch = [];
    this.channel = []; this.match = []; this.target = []; this.pairOf = []; this.meeting = []; this.parent = [];
    this.channels = [];
    this.numbers = new Map();
    this.offsets = [0];
    this.meetings = new Map();
  }

  get numRows() { return this.kind.length; }

  add(kind, rank, stage, microBatch, {link = null, target = -1, pairOf = -1, meeting = -1, parent = -1} = {}) {
    let channel = -1;
    if (link) {
      if (!this.numbers.has(link)) {
        this.numbers.set(link, this.channels.length);
        const [communicator, source, destination] = link.split(/ |->/);
        this.channels.push({communicator, source: +source, destination: +destination, sends: [], receives: []});
      }
      channel = this.numbers.get(link);
      this.channels[channel][kind.startsWith("SEND") ? "sends" : "receives"].push(this.kind.length);
    }
    this.kind.push(kind); this.rank.push(rank); this.stage.push(stage); this.microBatch.push(microBatch);
    this.channel.push(channel); this.match.push(-1); this.target.push(target); this.pairOf.push(pairOf);
    this.meeting.push(meeting); this.parent.push(parent);
    return this.kind.length - 1;
  }

  // The end of the step of a stage that two ranks hold: its gradients are summed, which one all-reduce stands for here.
  sum(rank, stage, key) {
    const parent = this.add("REDUCE_GRAD", rank, stage, -1);
    const child = this.add("ALL_REDUCE", rank, stage, -1, {meeting: stage, parent});
    if (!this.meetings.has(key)) this.meetings.set(key, []);
    this.meetings.get(key).push(child);
  }

  matchMessages() {
    for (const {sends, receives} of this.channels) {
      sends.forEach((send, place) => { this.match[send] = receives[place]; this.match[receives[place]] = send; });
    }
  }

  text(row) {
    const kind = this.kind[row], stage = this.stage[row];
    if (kind === "WAIT") return `WAIT(${this.text(this.target[row])})`;
    if (kind === "REDUCE_GRAD") return `${stage}REDUCE_GRAD:pp`;
    if (kind === "ALL_REDUCE") return `${stage}REDUCE_GRAD:pp/0.ALL_REDUCE:pp`;
    return `${stage}${kind}${this.microBatch[row] < 0 ? "" : this.microBatch[row]}`;
  }
}

// The graph of a schedule; `recvOrder` is transport.recv_order of a plan.
function lower(programs, m, recvOrder) {
  const pipeline = new Pipeline(programs, m), graph = new Graph(programs.length);
  const posts = recvOrder === "just_in_time" ? receivesAsSent(pipeline)
    : earlyReceives(pipeline, recvOrder === "prefetch_one" ? 1 : Infinity);
  const isCopied = (stage) => new Set(pipeline.owner[stage]).size > 1;
  programs.forEach((program, rank) => {
    const rows = new Map(), late = [];
    const receive = (op) => {
      const link = pipeline.input(rank, op);
      if (link) rows.set(`${RECEIVE[op.kind]} ${op.stage} ${op.microBatch}`, graph.add(RECEIVE[op.kind], rank, op.stage, op.microBatch, {link}));
    };
    const wait = (kind, op) => graph.add("WAIT", rank, op.stage, op.microBatch, {target: rows.get(`${kind} ${op.stage} ${op.microBatch}`)});
    const ready = (op) => {
      if (!pipeline.input(rank, op)) return;
      wait(RECEIVE[op.kind], op);
      if (op.kind !== "F") wait("SEND_F", op);
    };
    for (const places of entriesOf(program)) {
      const ops = places.map((place) => program[place]), isPosted = places.some((place) => posts[rank].has(place));
      if (isPosted) places.forEach((place) => (posts[rank].get(place) ?? [program[place]]).forEach(receive));
      for (const op of ops) {
        if (!isPosted) receive(op);
        ready(op);
      }
      let first = -1;
      for (const op of ops) first = graph.add(op.kind, rank, op.stage, op.microBatch, {pairOf: first});
      for (const op of ops) {
        const output = pipeline.output(rank, op);
        if (!output) continue;
        rows.set(`${SEND[op.kind]} ${op.stage} ${op.microBatch}`, graph.add(SEND[op.kind], rank, op.stage, op.microBatch, output));
        if (op.kind !== "F") late.push(op);
      }
    }
    late.forEach((op) => wait("SEND_B", op));
    for (const stage of [...new Set(program.map((op) => op.stage))].sort((a, b) => a - b)) {
      if (isCopied(stage)) graph.sum(rank, stage, stage);
      graph.add("STEP", rank, stage, -1);
    }
    graph.offsets.push(graph.numRows);
  });
  graph.matchMessages();
  return graph;
}
