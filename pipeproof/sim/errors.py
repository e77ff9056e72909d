"""A simulation that comes to no end, and what each rank waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.schedule.ops import COLLECTIVE_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.schedule.optable import NONE, OpGraph
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, OpsWitness, PipeproofError, Severity, WitnessOp

if TYPE_CHECKING:  # `explain` reads the code below, and must not import SimPy for it
    from pipeproof.sim.model import Outcome

UNFINISHED = RuleDoc(
    code="PP403",
    title="the simulated step comes to no end",
    severity="error",
    explanation=(
        "The simulator ran the plan until nothing more could happen, and some ranks or transfers had not "
        "come to their end: they wait for each other, or for something that never comes. The job would hang "
        "there. The message names what each of them waits for; `pipeproof check` shows the shortest cycle."
    ),
    wrong="rank 0: 0RECV_B0 WAIT(0RECV_B0) 0F0 0SEND_F0 WAIT(0SEND_F0) 0B0\n"
    "rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 WAIT(1SEND_B0)",
    right="rank 0: 0F0 0SEND_F0 0RECV_B0 WAIT(0RECV_B0) 0B0 WAIT(0SEND_F0)\n"
    "rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 WAIT(1SEND_B0)",
)

NOT_FAST = RuleDoc(
    code="PP153",
    title="the fast engine does not time this plan",
    severity="error",
    explanation=(
        "`pipeproof simulate --engine fast` was asked for, and only the reference model times this plan, which is what "
        "the engine `auto` takes for it: its times fit into 64 bits no longer when they are scaled to a common tick; "
        "transfers share FIFOs, bounded buffers, batches or queues of other names; computations are slowed down by "
        "receives; messages of a channel take different times, or share links with others; a rank sends to itself; or "
        "a collective is called by a rank that is not of its group."
    ),
    wrong="cost: {forward_us: [1/999999999989, 1/999999999961]}",
    right="cost: {forward_us: [0.25, 0.5]}",
)

NO_ROOM = RuleDoc(
    code="PP154",
    title="a stage takes less time than the collectives inside it",
    severity="error",
    explanation=(
        "The time of a stage (`cost.forward_us` and the like, or the median of a profile) includes the collectives "
        "inside it. What the network or the profile says that these take is shown inside the computation, and what is "
        "left is its own work. Here nothing is left: one of the two is wrong."
    ),
    wrong="topology: {pp: 2, tp: 2}\n"
    "cost: {forward_us: 1, network: {ranks_per_node: 4, node: {bandwidth: 100, latency_us: 50}}}",
    right="topology: {pp: 2, tp: 2}\n"
    "cost: {forward_us: 900, backward_us: 1800, network: {ranks_per_node: 4, node: {bandwidth: 100, latency_us: 50}}}",
)

_MOST_NAMED = 8


class SimulationError(PipeproofError):
    """The simulated program cannot finish; its finding names which ranks wait in which operations."""


def refuse_unfinished(graph: OpGraph, outcome: Outcome) -> None:
    """Do nothing if every operation ended.

    Raises:
        SimulationError: PP403, some operation never ended.
    """
    stuck = [op_id for op_id in outcome.stuck_at if op_id is not None]
    if not stuck:  # every host came to its end, but a transfer that nobody waits for may not have
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
        Finding(
            UNFINISHED.code,
            Severity.ERROR,
            "the simulated step comes to no end: " + "; ".join(texts),
            help="`pipeproof check` names the cycle, or what is missing, and the change that mends it",
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
