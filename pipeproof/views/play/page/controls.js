// The form, the results that it shows at once, and the results that take longer: verdicts of other models, noise.

const element = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const NAMES = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"};
// Runtimes whose transfers share FIFOs so.
const RUNTIMES = {directed_edge: "NCCL with batched transfers, gloo", pair: "NCCL, transfers of PyTorch one by one"};
const NUM_NOISY_RUNS = 100;
let values, pinned, refused;
let inBackground = 0; // the number of the last change: work in the background of an older one ends

function makeField(name) {
  const field = FIELDS[name], id = `field-${name}`, helpId = `${id}-help`, problemId = `${id}-problem`;
  const set = (value) => change({[name]: value.trim()});
  let control;
  if (field.type === "choice") {
    control = make("select", {id}, ...field.options.map(([value, text]) => make("option", {value}, text)));
    control.addEventListener("change", () => set(control.value));
  } else if (field.type === "text") {
    control = make("textarea", {id, rows: 2, spellcheck: "false", autocomplete: "off"});
    control.addEventListener("input", () => set(control.value));
  } else {
    control = make("input", {id, type: "text", inputmode: field.type === "count" ? "numeric" : "decimal", autocomplete: "off"});
    control.addEventListener("input", () => set(control.value));
  }
  control.setAttribute("aria-describedby", `${helpId} ${problemId}`);
  const row = make("div", {class: "row"}, control);
  if (name in MOST) {
    const slider = make("input", {type: "range", min: field.least, max: field.most, id: `${id}-slider`, "aria-label": field.label});
    slider.addEventListener("input", () => set(slider.value));
    row.prepend(slider);
  }
  return make("div", {class: field.type === "choice" || field.isWide ? "field wide" : "field", id: `${id}-box`}, make("label", {for: id}, field.label), row,
    make("p", {class: "help", id: helpId}, field.help), make("p", {class: "problem", id: problemId, role: "alert"}));
}

function makeForms() {
  GROUPS.forEach(([title, fields], index) => {
    const inner = make("div", {class: "pair"}, ...Object.keys(fields).map(makeField));
    element(index ? "more" : "first").append(make("fieldset", {}, make("legend", {}, title), inner));
  });
  for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
}

// Write the values into the form, but not into the field in which the user types.
function fillForms(problems) {
  const kind = kindOf(values);
  for (const name of Object.keys(FIELDS)) {
    const control = element(`field-${name}`), slider = element(`field-${name}-slider`);
    if (control !== document.activeElement && !problems[name]) control.value = values[name];
    if (slider && slider !== document.activeElement) slider.value = values[name];
    control.setAttribute("aria-invalid", String(Boolean(problems[name])));
    element(`field-${name}-problem`).textContent = problems[name] ?? "";
  }
  element("field-kind-help").textContent = `${kind.title}${kind.minChunks === 2 && kind.maxChunks === 2 ? "; two stages on each rank" : ""} (${kind.source})`;
  for (const name of ["kind", "p", "m"]) element(`field-${name}-box`).hidden = kind.name === "custom";
  element("field-variant-box").hidden = !kind.variants.length;
  element("field-v-box").hidden = kind.maxChunks === kind.minChunks;
  element("field-v-help").textContent = chunksOf(values) === +values.v ? ""
    : `${kind.name} has at least ${kind.minChunks}: that is shown.`;
  element("field-o-box").hidden = !kind.name.startsWith("dualpipe");
  element("field-mbs-help").textContent = `A message has ${(messageBytes(values) / 2 ** 20).toFixed(2)} MiB (bfloat16) and takes ${timeText(timesOf(values).message)}.`;
}

const problems = {};

function change(some) {
  for (const [name, value] of Object.entries(some)) {
    problems[name] = problemOf(name, value);
    if (!problems[name]) values[name] = value;
  }
  history.replaceState(null, "", fragmentOf(values, pinned));
  show();
}

function show() {
  const number = ++inBackground, solved = solve(values);
  fillForms(problems);
  element("refused").hidden = !refused.length;
  element("refused").textContent = `Parts of the link are not understood and were left out: ${refused.join(", ")}`;
  element("plan").textContent = planText(values);
  const isDrawn = Boolean(solved.figures);
  for (const id of ["figures", "drawing", "tables"]) element(id).hidden = !isDrawn && (id !== "tables" || Boolean(solved.unfit));
  showVerdict(solved);
  if (solved.unfit) return;
  if (isDrawn) {
    const base = pinned ? solve(pinned) : null;
    showFigures(solved, base?.figures);
    showRanks(solved);
    picture.show(solved.graph, solved.timed, solved.figures, base?.figures?.makespan);
    showPinned(base, solved.figures.makespan);
    showLegend(solved.graph);
    describe(picture, -1);
  }
  element("ranks").parentElement.hidden = !isDrawn;
  background(number, judgeModels(solved.graph), () => isDrawn && solved.isNoisy && background(number, noisyRuns(solved)));
}

// Run a generator in slices of a few milliseconds, as long as no later change has come.
function background(number, work, then = () => {}) {
  const slice = () => {
    if (number !== inBackground) return;
    const until = performance.now() + 12;
    for (let step = work.next(); ; step = work.next()) {
      if (step.done) { then(); return; }
      if (performance.now() > until) break;
    }
    setTimeout(slice);
  };
  setTimeout(slice);
}

const waitsText = (graph, cycle) => [...cycle, cycle[0]].map((row) => `${graph.text(row)} (rank ${graph.rank[row]})`);

function showVerdict({unfit, fitting, graph, verdict, timed}) {
  const box = element("verdict");
  if (unfit) {
    box.className = "unfit";
    box.replaceChildren(make("strong", {}, "Does not exist."), `${values.kind} needs ${unfit}. `);
    for (const some of fitting) {
      const button = make("button", {type: "button"}, `Use ${Object.entries(some).map(([name, value]) => `${name} = ${value}`).join(", ")}`);
      button.addEventListener("click", () => change(some));
      box.append(button, " ");
    }
    return;
  }
  const fifo = FIELDS.queue.options.find(([value]) => value === values.queue)[1];
  if (!verdict.isStuck) {
    box.className = "valid";
    box.replaceChildren(make("strong", {}, "Valid."), `No deadlock with one FIFO per ${fifo} and sends that wait for their receives.`);
    return;
  }
  const names = waitsText(graph, verdict.cycle);
  const shown = names.length > 7 ? [...names.slice(0, 3), `… ${names.length - 6} more …`, ...names.slice(-3)] : names;
  box.className = "deadlock";
  box.replaceChildren(make("strong", {}, "Deadlock."), `With one FIFO per ${fifo}, ${shown.join(" waits for ")}. `);
  if (timed.isStuck) box.append("There is no timeline. ");
  else box.append("The timeline is for a backend that ends sends as set under Links. ");
  if (values.recv !== "send_order") {
    const button = make("button", {type: "button"}, "Post receives in the order of sends");
    button.addEventListener("click", () => change({recv: "send_order"}));
    box.append(button);
  }
}

// The settings to compare with: their values, and their timeline on the same axis.
function showPinned(base, most) {
  element("pinned").hidden = !base;
  element("pin").setAttribute("aria-pressed", String(Boolean(base)));
  element("pin").textContent = base ? "End comparison" : "Compare with this";
  picture.other = base?.figures ? pinnedPicture : null;
  if (!base) return;
  element("pinned-title").textContent = `Compared with ${nameOfSettings(pinned)}${base.figures ? "" : ": no timeline"}`;
  element("pinned-canvas").hidden = !base.figures;
  if (base.figures) pinnedPicture.show(base.graph, base.timed, base.figures, most);
}

function showFigures({figures, work, graph, isNoisy}, base) {
  const ranks = figures.ranks, peak = Math.max(...ranks.map((rank) => rank.peak)), numRanks = graph.numRanks;
  const mean = (of) => ranks.reduce((sum, rank) => sum + of(rank), 0) / numRanks, share = (ns) => `${(100 * ns / figures.makespan).toFixed(1)} %`;
  const signed = (number, digits = 1) => `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(digits)}`;
  const against = (text) => (base ? `${text} against the other` : null);
  const bubbleOf = ({ranks: all, makespan}) => 100 * all.reduce((sum, {bubble}) => sum + bubble, 0) / all.length / makespan;
  const differences = base ? {
    "Step time": against(`${signed(100 * (figures.makespan - base.makespan) / base.makespan)} %`),
    Bubble: against(`${signed(bubbleOf(figures) - bubbleOf(base))} points`),
    "Peak activations": chunksOf(values) !== chunksOf(pinned) ? null : against(signed(peak - Math.max(...base.ranks.map((rank) => rank.peak)), 0)),
  } : {};
  const items = [
    ["Step time", timeText(figures.makespan), isNoisy ? `one step, seed ${values.seed}` : `work of a rank: ${timeText(work)}`],
    ["Bubble", share(mean((rank) => rank.bubble)), "idle share of the step time, mean of ranks"],
    ["Warm-up, cool-down", share(mean((rank) => rank.warmUp + rank.coolDown)), "before the first, after the last computation"],
    ["Waiting in between", share(mean((rank) => rank.waiting)), "for messages"],
    ["Peak activations", String(peak), `of one stage and micro-batch; least ${Math.min(...ranks.map((rank) => rank.peak))}`],
    ["Memory of them", `${heldGiB(peak)} GiB`, `${+values.layers} layers, 34 bytes of each for an element of the hidden state (bfloat16; attention scores are not kept)`],
  ];
  element("figures").replaceChildren(...items.map(([term, value, note]) =>
    make("div", {}, make("dt", {}, term), make("dd", {}, value), make("small", {}, differences[term] ?? note))));
  if (isNoisy) element("figures").append(make("div", {}, make("dt", {}, `Median of ${NUM_NOISY_RUNS} steps`), make("dd", {id: "median"}, "…")));
}

// Bytes of activations held at once, in GiB: a layer keeps 34 bytes for an element of its hidden state (Korthikanti et
// al., 2022, without the attention scores, which FlashAttention recomputes).
const heldGiB = (held) => (held * 17 * messageBytes(values) * values.layers / (sized(values).p * chunksOf(values)) / 2 ** 30).toPrecision(3);

function showRanks({figures}) {
  const most = Math.max(...figures.ranks.map(({peak}) => peak));
  const head = make("tr", {}, ...["rank", "busy", "bubble", "held at most"].map((text) => make("th", {scope: "col"}, text)));
  const rows = figures.ranks.map(({busy, bubble, peak}, rank) => make("tr", {}, make("td", {}, String(rank)), make("td", {}, timeText(busy)),
    make("td", {}, `${(100 * bubble / figures.makespan).toFixed(1)} %`),
    make("td", {class: "bars"}, `${peak} (${heldGiB(peak)} GiB)`, make("span", {class: "bar", style: `width:${Math.round(90 * peak / most)}px`}))));
  element("ranks").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}

function showLegend(graph) {
  const isSplit = graph.kind.includes("I"), isWhole = graph.kind.includes("B");
  const kinds = ["F", ...(isWhole ? ["B"] : []), ...(isSplit ? ["I", "W"] : [])];
  const marks = kinds.map((kind) => make("span", {}, make("i", {style: `background:var(--${kind})`}), `${kind} ${NAMES[kind]}`));
  if (picture.chunks[0].length > 1) marks.push(make("span", {}, "paler: a later stage of the rank"));
  marks.push(make("span", {}, make("i", {style: "background:var(--held);opacity:.55"}), "activations held"));
  element("legend").replaceChildren(...marks);
}

function describe({graph, timed}, row) {
  element("status").textContent = row < 0 ? "Point at an operation, or focus the timeline and press . or , to step; + - 0 zoom."
    : `${graph.text(row)}: ${NAMES[graph.kind[row]]} of micro-batch ${graph.microBatch[row]} on stage ${graph.stage[row]}, rank ${graph.rank[row]}; `
      + `${timeText(timed.starts[row])} to ${timeText(timed.ends[row])}, takes ${timeText(timed.ends[row] - timed.starts[row])}`;
}

function* judgeModels(graph) {
  element("models").setAttribute("aria-busy", "true");
  const found = [];
  for (const verdict of verdicts(graph, values)) { found.push(verdict); yield; }
  const queues = [...new Set(found.map(({model}) => model.queueText))], endings = found.slice(0, found.length / queues.length);
  const head = make("tr", {}, make("th", {scope: "col"}, "one FIFO per"), ...endings.map(({model}) => make("th", {scope: "col"}, model.text)));
  const nameOf = (queue) => {
    const {queue: key} = found.find(({model}) => model.queueText === queue).model, own = key === values.queue ? "chosen above" : "";
    const notes = [RUNTIMES[key] ?? "", own].filter(Boolean).join("; ");
    return make("td", own ? {class: "chosen"} : {}, queue, ...(notes ? [make("small", {}, notes)] : []));
  };
  const rows = queues.map((queue) => make("tr", {}, nameOf(queue), ...found.filter(({model}) => model.queueText === queue)
    .map(({isDeadlock}) => make("td", {class: isDeadlock ? "hangs" : "safe"}, isDeadlock ? "✗ deadlock" : "✓ valid"))));
  element("models").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
  element("models").removeAttribute("aria-busy");
}

function* noisyRuns({graph, model, times}) {
  const makespans = [];
  for (let seed = 1; seed <= NUM_NOISY_RUNS; seed++) {
    const {ends} = run(graph, model, durationsOf(graph, times, noiseOf(seed, +values.cv, +values.ncv)));
    makespans.push(ends.reduce((most, end) => Math.max(most, end), 0));
    yield;
  }
  makespans.sort((a, b) => a - b);
  const at = (share) => timeText(makespans[Math.ceil(share * NUM_NOISY_RUNS) - 1]);
  element("median").replaceWith(make("dd", {}, at(0.5)), make("small", {}, `95 of ${NUM_NOISY_RUNS} end by ${at(0.95)}`));
}

function copyWith(button, text) {
  const label = button.textContent, say = (message) => { button.textContent = message; setTimeout(() => { button.textContent = label; }, 1500); };
  button.addEventListener("click", () => {
    if (!navigator.clipboard) { say("Copying is not allowed here"); return; }
    navigator.clipboard.writeText(text()).then(() => say("Copied"), () => say("Copying is not allowed here"));
  });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  element("theme").setAttribute("aria-pressed", String(theme === "dark"));
  for (const one of [picture, pinnedPicture]) one.draw();
}

const picture = new Picture(element("canvas"), describe), pinnedPicture = new Picture(element("pinned-canvas"), describe);
pinnedPicture.other = picture;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
makeForms();
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", () => setTheme(prefersDark.matches ? "dark" : "light"));
element("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
element("reset").addEventListener("click", () => { refused = []; pinned = null; change({...DEFAULTS}); });
element("pin").addEventListener("click", () => { pinned = pinned ? null : {...values}; change({}); });
copyWith(element("copy-link"), () => location.href);
copyWith(element("copy-plan"), () => planText(values));
element("about").textContent = `Schedules, times and verdicts equal pipeproof's, to the nanosecond. Left out: ${DATA.leftOut.join(" and ")}, `
  + "which need sequence splits and a search. Noise is drawn here.";
const open = () => { ({values, pinned, refused} = readFragment(location.hash)); show(); };
addEventListener("hashchange", open);
open();
window.play = {solve, verdicts, readFragment, fragmentOf, planText, deadlocks, picture, get values() { return values; }};
