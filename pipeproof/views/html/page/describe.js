// Words: what an operation or a bubble is, for the tooltip, the status line and screen readers.

const KIND_WORDS = {
  F: "forward", B: "backward", I: "gradient of inputs", W: "gradient of weights", send: "send", recv: "receive",
  wait: "wait", collective: "collective", other: "other",
};

function messageText(tl, i) {
  const other = tl.partner[i];
  if (other < 0) return "";
  const sent = tl.category[i] === CATEGORY.send;
  const [send, recv] = sent ? [i, other] : [other, i];
  return `${sent ? "to" : "from"} ${nameOf(tl, other)} on rank ${rankOf(tl, other)}: ` +
    `sent at ${duration(tl.start[send])}, arrived at ${duration(tl.end[recv])}`;
}

function opText(k, i) {
  const tl = TIMELINES[k], kind = DATA.categories[tl.category[i]], rank = rankOf(tl, i);
  const chunks = tl.ranks[rank].stages.length;
  const steps = tl.size && tl.step[tl.size - 1] ? `, step ${tl.step[i]}` : "";
  return [
    `${nameOf(tl, i)}: ${KIND_WORDS[kind]} on ${tl.ranks[rank].name}${chunks > 1 ? `, chunk ${tl.chunk[i]}` : ""}${steps}`,
    `${duration(tl.start[i])} to ${duration(tl.end[i])}, takes ${duration(tl.end[i] - tl.start[i])}`,
    tl.bytes[i] >= 0 ? bytesText(tl.bytes[i]) : "",
    messageText(tl, i),
    tl.critical[i] ? "on the critical path" : "",
  ].filter(Boolean).join("\n");
}

function idleText(k, rank, at) {
  const { idle, ranks } = TIMELINES[k], peer = idle.peer[at] - 1, cause = CAUSES[idle.cause[at]];
  const from = peer < 0 ? "" : ` from rank ${peer}`;
  const why = {
    "message": `waits for a message${from}`,
    "collective": peer < 0 ? "waits in a collective" : `waits in a collective for rank ${peer}`,
    "warm-up": peer < 0 ? "warm-up" : `warm-up, waits for a message${from}`,
    "cool-down": peer < 0 ? "cool-down" : `cool-down, waits for a message${from}`,
    "held up": "idle, by nothing that the timeline shows",
  }[cause];
  return `${ranks[rank].name} is idle: ${why}\n` +
    `${duration(idle.start[at])} to ${duration(idle.end[at])}, ${duration(idle.end[at] - idle.start[at])}`;
}

// What a rank holds: bytes, or a count of activations.
const heldAmount = (tl, held) => (tl.inBytes ? bytesText(held) : `${held}`);

function heldText(k, rank, time) {
  const { time: times, count } = TIMELINES[k].held[rank];
  let at = lowerBound(times, 0, times.length, time);
  if (at === times.length || times[at] > time) at--;
  const tl = TIMELINES[k], amount = heldAmount(tl, at < 0 ? 0 : count[at]);
  return `${tl.ranks[rank].name} holds ${amount}${tl.inBytes ? "" : " chunk activations"} at ${duration(time)}`;
}

function rankText(k, rank) {
  const tl = TIMELINES[k], { name, busy, stages, peak } = tl.ranks[rank];
  return `${name}: stages ${stages.join(", ")}\nbusy ${duration(busy)}, idle ${trimmed(100 * (1 - busy / Math.max(tl.makespan, 1e-6)), 1)}% ` +
    `of ${duration(tl.makespan)}\nholds at most ${peak} chunk activations` + (tl.inBytes ? `, ${heldAmount(tl, tl.peaks[rank])} in all` : "");
}
