// The settings of the page: their labels and limits, their form in the address, and the plan that they make.

const MOST = {p: 16, m: 64, v: 8};
const count = (label, help, least, most, value) => ({label, help, type: "count", least, most, value});
const decimal = (label, help, value, {least = 0, most = 1e6, optional = false} = {}) =>
  ({label, help, type: "decimal", least, most, value, optional});
const choice = (label, help, options, value) => ({label, help, type: "choice", options, value});

const GROUPS = [
  ["Schedule", {
    kind: choice("Schedule", "", DATA.kinds.map(({name}) => [name, name]), "1f1b"),
    variant: choice("Variant", "The tool whose order is drawn.", DATA.variants.map((name) => [name, name]), "megatron"),
    p: count("Ranks (p)", "", 1, MOST.p, "4"),
    m: count("Micro-batches (m)", "", 1, MOST.m, "8"),
    v: count("Stages per rank (v)", "", 1, MOST.v, "1"),
    program: {label: "Or paste one", type: "text", value: "", isWide: true,
      help: "A line for each rank: 0F0 1F0 0B0 .. (stage, F B I or W, micro-batch), or PyTorch's CSV of computations."},
  }],
  ["Times of a micro-batch, in us", {
    per: choice("Times are of", "", [["rank", "all stages of a rank together"], ["stage", "one stage"]], "rank"),
    f: decimal("Forward (F)", "", "1000", {least: 0.001}),
    i: decimal("Input gradient (I)", "", "1000"),
    w: decimal("Weight gradient (W)", "A whole backward (B) takes I + W.", "1000"),
    o: decimal("F with B, overlapped", "Empty: the sum of both.", "", {optional: true}),
  }],
  ["Links", {
    latency: decimal("Latency, in us", "", "5"),
    speed: decimal("Speed, in GB/s", "Empty: no limit.", "200", {least: 0.001, optional: true}),
    hidden: count("Hidden size", "A multiple of 64.", 64, 65536, "4096"),
    seq: count("Sequence length", "", 1, 1048576, "4096"),
    mbs: {...count("Micro-batch size", "", 1, 1024, "1"), isWide: true},
    layers: {...count("Layers of the model", "For the memory of activations.", 1, 10000, "32"), isWide: true},
    sends: choice("A send ends", "", [["async", "at once"], ["rendezvous", "with its receive"], ["backend", "as the FIFO below allows"]], "async"),
  }],
  ["Order of transfers", {
    queue: choice("One FIFO per", "Transfers of a rank that wait for each other.", [["directed_edge", "edge and direction"],
      ["pair", "pair of ranks"], ["communicator", "communicator"], ["direction", "direction"], ["rank", "rank"],
      ["device", "device, collectives too"]], "directed_edge"),
    recv: choice("Receives are posted", "", [["just_in_time", "just in time"], ["prefetch_one", "one computation ahead"],
      ["send_order", "in the order of sends"]], "just_in_time"),
  }],
  ["Noise", {
    cv: decimal("Of computations", "Standard deviation over mean, 0.05 for 5 %.", "0", {most: 1}),
    ncv: decimal("Of messages", "", "0", {most: 1}),
    seed: {...count("Seed of the step drawn", "", 0, 999999, "1"), isWide: true},
  }],
];
const FIELDS = Object.assign({}, ...GROUPS.map(([, fields]) => fields));
const DEFAULTS = Object.fromEntries(Object.entries(FIELDS).map(([name, field]) => [name, field.value]));

// Why a value cannot be used, "" if it can.
function problemOf(name, value) {
  const field = FIELDS[name];
  if (field.type === "choice") return field.options.some(([option]) => option === value) ? "" : "choose from the list";
  if (field.type === "text") return value === "" ? "" : readPrograms(value).problem;
  if (value === "" && field.optional) return "";
  const pattern = field.type === "count" ? /^\d{1,7}$/ : /^\d{1,7}(\.\d{1,3})?$/;
  const shape = field.type === "count" ? "a whole number" : "a number with at most 3 decimals";
  if (!pattern.test(value)) return `${shape}, please`;
  if (+value < field.least || +value > field.most) return `from ${field.least} to ${field.most}, please`;
  return name === "hidden" && +value % 64 ? "a multiple of 64, please" : "";
}

// The settings as an address, with the settings to compare with, if there are any, as one value in it.
const fragmentOf = (values, pinned = null) => `#${new URLSearchParams(pinned ? {...values, pin: new URLSearchParams(pinned)} : values)}`;

// {values, pinned, refused}: the settings of an address, with defaults in place of what is not understood.
function readFragment(fragment) {
  const values = {...DEFAULTS}, refused = [];
  let pinned = null;
  for (const [name, value] of new URLSearchParams(fragment.replace(/^#/, ""))) {
    if (name === "pin") {
      const inner = readFragment(value);
      pinned = inner.values;
      refused.push(...inner.refused.map((part) => `pin: ${part}`));
    } else if (name in FIELDS && !problemOf(name, value)) values[name] = value; else refused.push(`${name}=${value}`);
  }
  return {values, pinned, refused};
}

// Settings in a few words.
function nameOfSettings(settings) {
  const values = sized(settings);
  const chunks = chunksOf(values), variant = variantOf(values);
  return `${values.kind}${variant ? ` (${variant})` : ""}, p ${+values.p}, m ${+values.m}${chunks > 1 ? `, v ${chunks}` : ""}`;
}

// The settings with the sizes of a schedule that was pasted.
function sized(values) {
  if (values.program === "") return values;
  const {programs, m, numStages} = readPrograms(values.program);
  return {...values, kind: "custom", programs, p: String(programs.length), m: String(m), v: String(numStages / programs.length)};
}

function kindOf(values) {
  if (!values.program) return DATA.kinds.find(({name}) => name === values.kind);
  const v = +sized(values).v;
  return {name: "custom", title: "The schedule that was pasted", source: "your own", minChunks: v, maxChunks: v, variants: []};
}
const chunksOf = (values) => {
  const {minChunks, maxChunks} = kindOf(values);
  return Math.max(minChunks, Math.min(+values.v, maxChunks ?? MOST.v));
};
const variantOf = (values) => (kindOf(values).variants.length ? values.variant : null);

const nanoseconds = (text) => Math.round(+text * 1000);
const microseconds = (ns) => String(ns / 1000);
const messageBytes = (values) => +values.mbs * +values.seq * +values.hidden * 2; // bfloat16

// Times of one stage and of a message, in whole nanoseconds.
function timesOf(values) {
  const share = values.per === "rank" ? chunksOf(values) : 1;
  const [F, I, W, pair] = [values.f, values.i, values.w, values.o].map((text) => Math.round(nanoseconds(text) / share));
  let message = nanoseconds(values.latency);
  if (values.speed !== "") { // bytes over 10^9 bytes a second are nanoseconds, rounded up
    const bytes = BigInt(messageBytes(values)) * 1000n, perNs = BigInt(nanoseconds(values.speed));
    message += Number((bytes + perNs - 1n) / perNs);
  }
  return {F: Math.max(1, F), I, W, overlapped: values.o === "" ? Math.max(1, F) + I + W : pair, message};
}

// The plan with these settings, which every command of pipeproof reads.
function planText(settings) {
  const values = sized(settings);
  const chunks = chunksOf(values), variant = variantOf(values), times = timesOf(values);
  const size = (messageBytes(values) / 2 ** 20).toFixed(1);
  const transport = [["recv_order", values.recv, "just_in_time"], ["queue", values.queue, "directed_edge"]]
    .filter(([, value, usual]) => value !== usual).map(([key, value]) => `${key}: ${value}`);
  return [
    "pipeproof: 1",
    `model:    {kind: gpt, num_layers: ${+values.p * chunks}, hidden_size: ${+values.hidden}, num_heads: ${+values.hidden / 64}, `
      + `ffn_size: ${4 * values.hidden}, vocab_size: 32000, seq_length: ${+values.seq}}`,
    `topology: {pp: ${+values.p}}`,
    `schedule: {kind: ${values.kind}, ${variant ? `variant: ${variant}, ` : ""}num_micro_batches: ${+values.m}, `
      + `micro_batch_size: ${+values.mbs}${chunks > 1 ? `, num_chunks: ${chunks}` : ""}`
      + `${values.programs ? `, programs: [${values.programs.map((ops) => `[${ops.map(textOf).join(", ")}]`).join(", ")}]` : ""}}`,
    ...(transport.length ? [`transport: {${transport.join(", ")}}`] : []),
    "cost:",
    `  forward_us: ${microseconds(times.F)}`,
    `  backward_input_us: ${microseconds(times.I)}`,
    `  backward_weight_us: ${microseconds(times.W)}`,
    ...(values.o === "" ? [] : [`  overlapped_us: ${microseconds(times.overlapped)}`]),
    `  p2p_latency_us: ${microseconds(times.message)}    # ${+values.latency} us`
      + (values.speed === "" ? "" : ` and ${size} MiB at ${+values.speed} GB/s`),
    `  p2p: ${values.sends}`,
    "run: {backend: torch, dtype: bfloat16}",
    "",
  ].join("\n");
}

// {unfit} with the sizes that would do, or the graph, its times and its figures.
function solve(settings) {
  const values = sized(settings);
  const p = +values.p, m = +values.m, v = chunksOf(values), kind = kindOf(values), variant = variantOf(values);
  const sizes = sizesOf(values.kind, variant);
  if (!sizes.holds(p, m)) return {unfit: sizes.text, fitting: fittingSizes(sizes, p, m)};
  const programs = values.programs ?? GENERATORS[kind.name](p, m, v, variant), graph = lower(programs, m, values.recv);
  const times = timesOf(values), declared = {queue: values.queue, completes: "rendezvous"};
  const model = values.sends === "backend" ? declared : {queue: "directed_edge", completes: values.sends === "async" ? "eager" : "rendezvous"};
  const isNoisy = +values.cv > 0 || +values.ncv > 0;
  const noise = isNoisy ? noiseOf(+values.seed, +values.cv, +values.ncv) : null;
  const durations = durationsOf(graph, times, noise), timed = run(graph, model, durations);
  const verdict = run(graph, declared, null);
  return {graph, model, times, durations, timed, verdict, isNoisy,
    figures: timed.isStuck ? null : figuresOf(graph, timed), work: m * v * (times.F + times.I + times.W)};
}

// Near settings of p or m for which the schedule exists, as changes of the settings.
function fittingSizes(sizes, p, m) {
  const nearest = (most, at, holds) => {
    for (let step = 1; step <= most; step++) {
      for (const value of [at - step, at + step]) if (value >= 1 && value <= most && holds(value)) return value;
    }
    return null;
  };
  const micro = nearest(MOST.m, m, (value) => sizes.holds(p, value)), ranks = nearest(MOST.p, p, (value) => sizes.holds(value, m));
  return [...(micro ? [{m: String(micro)}] : []), ...(ranks ? [{p: String(ranks)}] : [])];
}

// Verdicts under all models from the strictest down, one at a time; a safe model proves those that it covers.
function* verdicts(graph, values) {
  const bytes = messageBytes(values), safe = [];
  for (const {model, coversTo} of DATA.models) {
    const isCovered = safe.some((known) => known.includes(model.number));
    const isDeadlock = !isCovered && deadlocks(graph, modelFor(model, bytes));
    if (!isDeadlock) safe.push(coversTo);
    yield {model, isDeadlock};
  }
}
