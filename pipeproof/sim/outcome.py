"""Start and end of each operation of a simulated step, and the codes of the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from pipeproof.diagnostics.finding import Finding, OpsWitness, PipeproofError, RuleDoc, WitnessOp
from pipeproof.diagnostics.source import SourceMap
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, TRANSFER_KINDS, OpKind

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
    """A program without a timeline: it cannot finish, or is not a whole step; the findings name ranks and operations.

    ``source`` is the text of the plan for the findings to show, None if there is none.
    """

    def __init__(self, *findings: Finding, source: SourceMap | None = None) -> None:
        super().__init__(*findings)
        self.source = source


_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """Start and end of each operation in ticks, None if it never started or never ended.

    ``stuck_at[rank]`` is the operation in which the host of ``rank`` waits
    forever, None if the host reached the end of its program.
    """

    starts: tuple[int | None, ...]
    ends: tuple[int | None, ...]
    stuck_at: tuple[int | None, ...]


def refuse_unfinished(graph: OpGraph, outcome: Outcome) -> None:
    """Raise an error unless every operation ended.

    Raises:
        SimulationError: PP403, an operation never ended.
    """
    stuck = [op_id for op_id in outcome.stuck_at if op_id is not None]
    if not stuck:  # every host reached its end, but a transfer that nobody waits for may not have ended
        stuck = [op_id for op_id, end in enumerate(outcome.ends) if end is None]
    if not stuck:
        return
    texts = [
        f"rank {int(graph.rank[op_id])} waits in {graph.ops[op_id]} {_for_what(graph, outcome, op_id)}"
        for op_id in stuck[:_MOST_NAMED]
    ]
    if len(stuck) > _MOST_NAMED:
        texts.append(f"and {len(stuck) - _MOST_NAMED} more")
    raise SimulationError(
        UNFINISHED.finding(
            "the simulated step does not end: " + "; ".join(texts),
            help="`pipeproof check` names the cycle, or what is missing, and the change that fixes it",
            witness=OpsWitness(tuple(WitnessOp(int(graph.rank[i]), str(graph.ops[i]), i) for i in stuck)),
        )
    )


def _for_what(graph: OpGraph, outcome: Outcome, op_id: int) -> str:
    kind = graph.ops[op_id].kind
    if kind in COLLECTIVE_KINDS:
        group, position = int(graph.group[op_id]), int(graph.position[op_id])
        came = {
            int(graph.rank[other])
            for other, op in enumerate(graph.ops)
            if op.kind in COLLECTIVE_KINDS
            and (int(graph.group[other]), int(graph.position[other])) == (group, position)
            and outcome.starts[other] is not None
        }
        missing = [rank for rank in graph.groups[group].ranks if rank not in came]
        return f"for rank {', '.join(map(str, missing))} of its {graph.groups[group].axis} group"
    transfer = int(graph.waits_for[op_id]) if kind is OpKind.WAIT else op_id
    if transfer == NONE:
        return "for a transfer that was never posted"
    if graph.ops[transfer].kind not in TRANSFER_KINDS:
        return f"for {graph.ops[transfer]}, which does not end"
    peer = int(graph.peer[transfer])
    partner = graph.match_of.get(transfer)
    if partner is None:
        return f"for rank {peer}, which never issues a counterpart"
    return f"for {graph.ops[partner]} on rank {peer}"
