"""What the rules look at: a lowered plan, its backend's table, and the file it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pipeproof.comm.capabilities import BackendTable, backend_table
from pipeproof.comm.lower import LoweredPlan, lower
from pipeproof.schedule.ops import Op
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import BadPlanAtError, Finding, Location, Severity, Witness, WitnessOp
from pipeproof.specs.load import LoadedPlan, PlanFileError
from pipeproof.specs.source import SourceMap
from pipeproof.stages.describe.boundary import Boundary


@dataclass(frozen=True)
class Subject:
    """Everything that a rule may read. ``source`` is None for plans made in Python."""

    plan: LoweredPlan
    backend: BackendTable
    source: SourceMap | None = None

    @property
    def graph(self) -> OpGraph:
        """The op graph under judgement."""
        return self.plan.graph

    def with_graph(self, graph: OpGraph) -> Subject:
        """The same subject with another graph, as mutation tests and users' own graphs need it."""
        return replace(self, plan=replace(self.plan, graph=graph))

    def locate(self, *path: str | int) -> Location | None:
        """The place of a plan key, or of its nearest parent that the file has."""
        return self.source.locate(path) if self.source is not None else None

    def coords_text(self, rank: int) -> str:
        """``rank 5 (pp 2, tp 1)``: a rank with its coordinates on the axes that have more than one rank."""
        coords = self.plan.mesh.coords(rank)
        parts = [f"{axis} {coords[axis]}" for axis in ("pp", "dp", "tp", "cp", "ep") if self.plan.mesh.size(axis) > 1]
        return f"rank {rank} ({', '.join(parts)})" if parts else f"rank {rank}"

    def witness_op(self, op_id: int) -> WitnessOp:
        """One operation of the graph as a witness shows it."""
        return WitnessOp(int(self.graph.rank[op_id]), str(self.graph.ops[op_id]), op_id)


def missing_op(rank: int, op: Op) -> WitnessOp:
    """An operation that should be in a rank's program and is not."""
    return WitnessOp(rank, str(op))


def make_subject(loaded: LoadedPlan, *, boundary: Boundary | None = None) -> Subject:
    """Lower a plan, with another boundary tensor if one is given, and find its backend's table.

    Raises:
        PlanFileError: the layers cannot be put onto the stages, or the plan is too large.
    """
    run, source = loaded.spec.run, loaded.source
    try:
        lowered = lower(loaded.spec, boundary=boundary)
    except BadPlanAtError as error:
        location = source.locate(error.path) if source is not None else None
        raise PlanFileError(*(replace(f, location=location) for f in error.findings), source=source) from error
    return Subject(lowered, backend_table(run.backend, run.device), source)


@dataclass(frozen=True, slots=True)
class Rule:
    """A stable code with its documentation and the function that finds its violations."""

    doc: RuleDoc
    check: Callable[[Subject], Iterator[Finding]]


def finding(
    doc: RuleDoc,
    message: str,
    *,
    location: Location | None = None,
    help: str | None = None,
    witness: Witness | None = None,
) -> Finding:
    """A finding of the rule that ``doc`` documents, with that rule's code and severity."""
    return Finding(doc.code, Severity(doc.severity), message, location, help, witness)
