"""Start and end of each operation of a simulated step, and the error of a step that does not end."""

from __future__ import annotations

from dataclasses import dataclass

from pipeproof.diagnostics.finding import OpsWitness, WitnessOp
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, TRANSFER_KINDS, OpKind
from pipeproof.sim.sim_codes import UNFINISHED, SimulationError

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
