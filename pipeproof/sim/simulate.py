"""From a lowered plan to its predicted timeline and figures."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pipeproof.comm.capabilities import BackendTable, declared_backend
from pipeproof.comm.lower import LoweredPlan
from pipeproof.schedule.ops import TRANSFER_KINDS
from pipeproof.schedule.optable import EdgeKind, OpGraph
from pipeproof.sim.costs import Durations, durations_of
from pipeproof.sim.errors import NOT_SIMULATED, refuse_unfinished
from pipeproof.sim.figures import RankFigures, figures_of
from pipeproof.sim.model import Outcome, TransferRules, run_model
from pipeproof.sim.timeline import COMPUTE_QUEUE, Span, Timeline
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity


@dataclass(frozen=True)
class Simulation:
    """One simulated step: its timeline, the figures of each rank, and the makespan in exact microseconds.

    ``p2p`` is ``cost.p2p`` as the plan has it, ``send_completes`` what it came to.
    """

    timeline: Timeline
    figures: tuple[RankFigures, ...]
    makespan: Fraction
    p2p: str
    send_completes: str


def simulate(lowered: LoweredPlan, backend: BackendTable | None = None) -> Simulation:
    """Run the reference model on a plan's graph. Linear in operations.

    ``backend`` is read where ``cost.p2p`` is ``backend``; without it, the
    table of the backend that the plan declares.

    Raises:
        SimulationError: the program cannot finish.
        BadPlanAtError: the backend's sends or queues are of a kind that is not simulated.
    """
    spec, graph = lowered.spec, lowered.graph
    send_completes, rules = _transfer_rules(lowered, backend)
    durations = durations_of(graph, spec.cost)
    outcome = run_model(graph, durations, rules)
    refuse_unfinished(graph, outcome)
    timeline = Timeline(
        spans=spans_of(graph, durations, outcome),
        ranks=tuple(lowered.mesh.coords(rank) for rank in graph.global_rank),
        matches=tuple((send, receive) for send, receive in graph.edges[EdgeKind.MATCH].tolist()),
    )
    return Simulation(timeline, figures_of(timeline), timeline.makespan_us, spec.cost.p2p, send_completes)


def _transfer_rules(lowered: LoweredPlan, backend: BackendTable | None) -> tuple[str, TransferRules]:
    """(how sends complete, by the words of the backend tables; the rules of the model)."""
    p2p = lowered.spec.cost.p2p
    if p2p == "async":
        return "eager", TransferRules(rendezvous=False)
    if p2p == "rendezvous":
        return "rendezvous", TransferRules(rendezvous=True)
    table = backend if backend is not None else declared_backend(lowered.spec)
    if table.send_completes == "slots" or table.queue != "directed_edge":
        message = f"{table.name} (send_completes {table.send_completes}, queue {table.queue}) is not simulated"
        mend = "set cost.p2p to async or rendezvous"
        raise BadPlanAtError(Finding(NOT_SIMULATED.code, Severity.ERROR, message, help=mend), ("cost", "p2p"))
    rendezvous = table.send_completes == "rendezvous"
    return table.send_completes, TransferRules(rendezvous, table.host_blocks_on_post)


def spans_of(graph: OpGraph, durations: Durations, outcome: Outcome) -> tuple[Span, ...]:
    """The spans of a finished outcome in microseconds, in order of op ids."""
    spans = []
    for op_id, (op, start, end) in enumerate(zip(graph.ops, outcome.starts, outcome.ends, strict=True)):
        assert start is not None
        assert end is not None
        queue = str(graph.channels[int(graph.channel[op_id])]) if op.kind in TRANSFER_KINDS else COMPUTE_QUEUE
        spans.append(
            Span(
                rank=int(graph.rank[op_id]),
                queue=queue,
                op_id=op_id,
                op=str(op),
                start=Fraction(start, durations.ticks_per_us),
                end=Fraction(end, durations.ticks_per_us),
            )
        )
    return tuple(spans)
