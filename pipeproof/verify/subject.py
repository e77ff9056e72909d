"""What the rules look at: a lowered plan, its backend's table, and the file it came from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar, cast

import numpy as np

from pipeproof.comm.backends import backend_table, declared_backend
from pipeproof.comm.capabilities import BackendTable
from pipeproof.comm.loaded import lower_loaded
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.schedule.ops import COMPUTE_KINDS, Op
from pipeproof.schedule.optable import NONE, IntColumn, OpGraph
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import (
    CycleWitness,
    Finding,
    Location,
    OpsWitness,
    Severity,
    Witness,
    WitnessOp,
)
from pipeproof.specs.load import LoadedPlan
from pipeproof.specs.source import SourceMap
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.verify.compute_table import ComputeTable, compute_table
from pipeproof.verify.facts import NO_FACTS, Facts

_Fact = TypeVar("_Fact")


@dataclass(frozen=True)
class Subject:
    """Everything that a rule may read.

    ``lowered`` is the plan that the graph comes from, None for a graph that
    was made in Python and is judged alone. ``source`` is None for plans made
    in Python. ``origins`` are the places of rows that were read from a file,
    by the graph's ``origin`` column. ``facts`` is what a person says beside
    the graph.
    """

    graph: OpGraph
    backend: BackendTable
    lowered: LoweredPlan | None = None
    source: SourceMap | None = None
    origins: tuple[Location, ...] = ()
    facts: Facts = NO_FACTS

    @property
    def plan(self) -> LoweredPlan:
        """The plan that the graph comes from; for rules that need one."""
        assert self.lowered is not None, "a rule that needs a plan was run on a graph alone"
        return self.lowered

    @property
    def loaded(self) -> LoadedPlan:
        """The plan as it was loaded."""
        return LoadedPlan(self.plan.spec, self.source)

    def with_graph(self, graph: OpGraph) -> Subject:
        """The same subject with another graph, as mutation tests and users' own graphs need it."""
        lowered = None if self.lowered is None else self.lowered.with_graph(graph)
        return replace(self, graph=graph, lowered=lowered)

    def unfolded(self) -> Subject:
        """The same subject with every rank standing for itself, as processes run it."""
        if self.lowered is None or not self.lowered.folded:
            return self
        lowered = self.lowered.unfolded()
        return replace(self, graph=lowered.graph, lowered=lowered)

    @cached_property
    def pp_of(self) -> IntColumn:
        """The coordinate on the ``pp`` axis of each of the graph's ranks, for a subject with a plan."""
        mesh = self.plan.mesh
        return np.array([mesh.coords(rank)["pp"] for rank in self.graph.global_rank], dtype=np.int64)

    @cached_property
    def stage_owners(self) -> Mapping[int, tuple[int, ...]]:
        """The graph's ranks that compute each stage: as the plan places it, else those that do."""
        graph = self.graph
        owners: dict[int, list[int]] = {}
        if self.lowered is not None:
            by_pp: dict[int, list[int]] = {}
            for rank, pp in enumerate(self.pp_of.tolist()):
                by_pp.setdefault(pp, []).append(rank)
            return {
                stage: tuple(rank for pp in holders for rank in by_pp.get(pp, ()))
                for stage, holders in enumerate(self.lowered.holders)
                if holders
            }
        rows = graph.is_kind(COMPUTE_KINDS)
        for stage, rank in np.unique(np.stack([graph.stage[rows], graph.rank[rows]], axis=1), axis=0).tolist():
            owners.setdefault(stage, []).append(rank)
        return {stage: tuple(ranks) for stage, ranks in owners.items()}

    @cached_property
    def computes(self) -> ComputeTable:
        """What each rank computes, by stage and micro-batch."""
        return compute_table(self.graph)

    @cached_property
    def num_units(self) -> int:
        """Units of work of a step (micro-batches, or their splits): as the plan says, else as many as are computed."""
        if self.lowered is not None:
            return self.lowered.num_units
        return int(self.graph.unit[self.graph.is_kind(COMPUTE_KINDS)].max(initial=-1)) + 1

    @cached_property
    def _found(self) -> dict[object, object]:
        return {}

    def once(self, find: Callable[[Subject], _Fact]) -> _Fact:
        """What ``find`` says of this subject, found when it is first asked for: what several rules share."""
        if find not in self._found:
            self._found[find] = find(self)
        return cast("_Fact", self._found[find])

    def locate(self, *path: str | int) -> Location | None:
        """The place of a plan key, or of its nearest parent that the file has."""
        return self.source.locate(path) if self.source is not None else None

    def placed(self, finding: Finding) -> Finding:
        """The finding at the file place of the first operation of its witness that was read from a file.

        Where all of them are missing, that is the end of the program that lacks the first.
        """
        witness = finding.witness
        if not self.origins or not isinstance(witness, CycleWitness | OpsWitness):
            return finding
        ops = [op.op_id for op in witness.ops if op.op_id is not None]
        origins = [int(self.graph.origin[op_id]) for op_id in ops if self.graph.origin[op_id] != NONE]
        if origins:
            return replace(finding, location=self.origins[origins[0]])
        if ops or self.lowered is None or self.lowered.foreign is None:
            return finding
        pp = self.lowered.mesh.coords(witness.ops[0].rank)["pp"]
        return replace(finding, location=self.lowered.foreign.missing_place(pp))

    def coords_text(self, rank: int) -> str:
        """``rank 5 (pp 2, tp 1)``: a rank with its coordinates on the axes that have more than one rank."""
        if self.lowered is None:
            return f"rank {rank}"
        mesh, global_rank = self.lowered.mesh, self.graph.global_rank[rank]
        coords = mesh.coords(global_rank)
        folded = self.lowered.folded
        shown = [
            axis for axis in ("pp", "dp", "tp", "cp", "ep") if mesh.size(axis) > 1 and (axis == "pp" or not folded)
        ]
        parts = [f"{axis} {coords[axis]}" for axis in shown]
        if folded:
            parts.append(f"and {mesh.num_ranks // mesh.size('pp') - 1} more alike")
        return f"rank {global_rank} ({', '.join(parts)})" if parts else f"rank {global_rank}"

    def witness_op(self, op_id: int) -> WitnessOp:
        """One operation of the graph as a witness shows it."""
        return WitnessOp(self.graph.global_rank[int(self.graph.rank[op_id])], str(self.graph.ops[op_id]), op_id)


def missing_op(rank: int, op: Op) -> WitnessOp:
    """An operation that should be in a rank's program and is not."""
    return WitnessOp(rank, str(op))


def make_subject(loaded: LoadedPlan, *, boundary: Boundary | None = None) -> Subject:
    """Lower a plan, with another boundary tensor if one is given, and find its backend's table.

    Raises:
        PlanFileError: the plan's own schedule cannot be read or does not fit, the layers cannot be put onto the
            stages, or the plan is too large.
    """
    lowered = lower_loaded(loaded, boundary=boundary)
    origins = lowered.foreign.origins if lowered.foreign is not None else ()
    return Subject(lowered.graph, declared_backend(loaded.spec), lowered, loaded.source, origins)


def graph_subject(
    graph: OpGraph,
    *,
    backend: BackendTable | None = None,
    origins: tuple[Location, ...] = (),
    facts: Facts = NO_FACTS,
) -> Subject:
    """A graph made in Python or read from a file, to be judged alone: by every rule that needs no plan.

    ``backend`` is whose promises hold, the default backend's without it.
    """
    return Subject(graph, backend or backend_table("paddle", "cpu"), origins=origins, facts=facts)


@dataclass(frozen=True, slots=True)
class Rule:
    """A stable code with its documentation and the function that finds its violations.

    A rule that ``needs_plan`` is not run on a graph alone.
    """

    doc: RuleDoc
    check: Callable[[Subject], Iterator[Finding]]
    needs_plan: bool = False


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
