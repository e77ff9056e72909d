"""The codes of the simulator, and the error of a step that does not end."""

from __future__ import annotations

from pipeproof.diagnostics.finding import PipeproofError, RuleDoc

UNFINISHED = RuleDoc(
    code="PP403",
    title="the simulated step does not end",
    explanation=(
        "The simulator ran the plan until no event was left, and some ranks or transfers had not ended: they wait for "
        "each other, or for an operation that is never issued. The job would hang there. The message names what each "
        "of them waits for; `pipeproof check` shows the shortest cycle."
    ),
    wrong="rank 0: 0RECV_B0 WAIT(0RECV_B0) 0F0 0SEND_F0 WAIT(0SEND_F0) 0B0\n"
    "rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 WAIT(1SEND_B0)",
    right="rank 0: 0F0 0SEND_F0 0RECV_B0 WAIT(0RECV_B0) 0B0 WAIT(0SEND_F0)\n"
    "rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 WAIT(1SEND_B0)",
)

NOT_FAST = RuleDoc(
    code="PP153",
    title="the fast engine does not support this plan",
    explanation=(
        "`pipeproof simulate --engine fast` was requested, and only the reference model supports this plan; the engine "
        "`auto` chooses the model. Reasons: times scaled to a common tick exceed 64 bits; transfers share FIFOs, "
        "bounded buffers, batches or named queues; computations are slowed down by receives; messages of a channel "
        "take different times, or share links with others; a rank sends to itself; a collective is called by a rank "
        "outside its group."
    ),
    wrong="cost: {forward_us: [1/999999999989, 1/999999999961]}",
    right="cost: {forward_us: [0.25, 0.5]}",
)

NO_ROOM = RuleDoc(
    code="PP154",
    title="a stage takes less time than the collectives inside it",
    explanation=(
        "The time of a stage (`cost.forward_us` and the like, or the median of a profile) includes its collectives. "
        "The simulator subtracts their time, which the network or the profile gives, to get the time of the "
        "computation itself. Here the result is negative: one of the two is wrong."
    ),
    wrong="topology: {pp: 2, tp: 2}\n"
    "cost: {forward_us: 1, network: {ranks_per_node: 4, node: {bandwidth: 100, latency_us: 50}}}",
    right="topology: {pp: 2, tp: 2}\n"
    "cost: {forward_us: 900, backward_us: 1800, network: {ranks_per_node: 4, node: {bandwidth: 100, latency_us: 50}}}",
)


class SimulationError(PipeproofError):
    """The simulated program cannot finish; the finding names the waiting ranks and operations."""
