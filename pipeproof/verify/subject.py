"""The subject of a check: an op graph, its lowered plan and backend table, and the file that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar, cast

import numpy as np

from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.backends import backend_table, declared_backend
from pipeproof.comm.generated_schedule import MAX_OPERATIONS, TOO_LARGE
from pipeproof.comm.lower import lower_loaded
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import (
    BadPlanError,
    CycleWitness,
    Finding,
    Location,
    OpsWitness,
    RuleDoc,
    WitnessOp,
)
from pipeproof.diagnostics.source import SourceMap
from pipeproof.schedule.derive import look_up
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import COMPUTE_KINDS, KIND_CODE, Op, OpKind
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.schedule import NO_OPERATIONS, ScheduleFileError, read_schedule_text
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.verify.declared_facts import NO_FACTS, Facts

# --- Computation as columns: one entry per rank, stage and micro-batch ---


@dataclass(frozen=True, eq=False)
class ComputeTable:
    """The compute operations of a graph by rank, stage and micro-batch, in that order.

    ``rank``, ``stage`` and ``work_item`` identify entry ``i``;
    ``count[kind][i]`` how often its rank runs that kind, ``first[kind][i]`` the
    op id of the first one, ``NONE`` without any. ``rows`` are the op ids of
    all compute operations, ``entry_of`` the entry of each.
    """

    rank: IntColumn
    stage: IntColumn
    work_item: IntColumn
    count: Mapping[OpKind, IntColumn]
    first: Mapping[OpKind, IntColumn]
    rows: IntColumn
    entry_of: IntColumn

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def forwards(self) -> IntColumn:
        """Number of forwards of each entry."""
        return self.count[OpKind.FORWARD]

    @cached_property
    def backwards(self) -> IntColumn:
        """Number of input gradients of each entry: in a whole backward or in its first half."""
        return self.count[OpKind.BACKWARD] + self.count[OpKind.BACKWARD_INPUT]

    @cached_property
    def first_backward(self) -> IntColumn:
        """The op id of the first operation that makes an entry's input gradient, ``NONE`` without any."""
        whole, half = self.first[OpKind.BACKWARD], self.first[OpKind.BACKWARD_INPUT]
        return np.where(whole == NONE, half, np.where(half == NONE, whole, np.minimum(whole, half)))

    def ops(self, entry: int) -> list[int]:
        """The op ids of one entry, in program order."""
        order, starts = self._by_entry
        return [int(op_id) for op_id in self.rows[order[starts[entry] : starts[entry + 1]]]]

    def find(self, rank: IntColumn, stage: IntColumn, work_item: IntColumn) -> IntColumn:
        """The entry for each (rank, stage, work item), ``NONE`` if nothing is computed; all arrays of one length."""
        num_stages, num_work_items, keys = self._index
        inside = (stage >= 0) & (stage < num_stages) & (work_item >= 0) & (work_item < num_work_items)
        expected = np.where(inside, (rank * num_stages + stage) * num_work_items + work_item, NONE)
        return look_up(keys, np.arange(len(keys)), expected)

    @cached_property
    def _index(self) -> tuple[int, int, IntColumn]:
        num_stages = int(self.stage.max(initial=-1)) + 1
        num_work_items = int(self.work_item.max(initial=-1)) + 1
        return num_stages, num_work_items, (self.rank * num_stages + self.stage) * num_work_items + self.work_item

    @cached_property
    def _by_entry(self) -> tuple[IntColumn, IntColumn]:
        order = np.argsort(self.entry_of, kind="stable")
        return order, np.searchsorted(self.entry_of[order], np.arange(len(self) + 1))


def compute_table(graph: OpGraph) -> ComputeTable:
    """The compute operations of a graph; linear in rows but for one sort of them.

    Raises:
        OverflowError: stages and micro-batches are numbered too high for 63 bits.
    """
    rows = np.flatnonzero(graph.is_kind(COMPUTE_KINDS) & (graph.work_item != NONE))
    rank, stage, work_item = graph.rank[rows], graph.stage[rows], graph.work_item[rows]
    sizes = graph.num_ranks, int(stage.max(initial=-1)) + 1, int(work_item.max(initial=-1)) + 1
    if sizes[0] * sizes[1] * sizes[2] >= 2**63:
        raise OverflowError("operations are numbered too high for this table")
    keys = (rank * sizes[1] + stage) * sizes[2] + work_item
    _, some, entry_of = np.unique(keys, return_index=True, return_inverse=True)
    count: dict[OpKind, IntColumn] = {}
    first: dict[OpKind, IntColumn] = {}
    for kind in sorted(COMPUTE_KINDS):
        selected = np.flatnonzero(graph.kind[rows] == KIND_CODE[kind])
        count[kind] = np.bincount(entry_of[selected], minlength=len(some))
        first[kind] = np.full(len(some), NONE, dtype=np.int64)
        backwards = selected[::-1]  # of several the last one written stays: the first row
        first[kind][entry_of[backwards]] = rows[backwards]
    return ComputeTable(rank[some], stage[some], work_item[some], count, first, rows, entry_of)


def of_small_plan(topology: str, *changes: str) -> str:
    """Python code that makes a small plan of this topology, changes its ``rows`` and leaves it in ``subject``."""
    return "\n".join(
        [
            "from dataclasses import replace",
            "from pipeproof.schedule.op_table import build_graph",
            "from pipeproof.schedule.op_table import Row",
            "from pipeproof.schedule.ops import parse_op",
            "from pipeproof.specs.load_plan import plan_from_dict",
            "from pipeproof.verify.subject import make_subject",
            "",
            "model = {'kind': 'gpt', 'num_layers': 2, 'hidden_size': 16, 'num_heads': 4, 'ffn_size': 32}",
            "model |= {'vocab_size': 32, 'seq_length': 8}",
            "schedule = {'kind': '1f1b', 'num_micro_batches': 2, 'micro_batch_size': 2}",
            f"plan = {{'pipeproof': 1, 'model': model, 'topology': {topology}, 'schedule': schedule}}",
            "base = make_subject(plan_from_dict(plan))",
            "rows = base.graph.rows()",
            *changes,
            "subject = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))",
        ]
    )


def of_ranks(group: str, *programs: str) -> str:
    """The text form of the programs of some ranks, with one group of them: ``tp: 0 1``."""
    return "\n".join([f"group {group}", *(f"rank {rank}: {ops}" for rank, ops in enumerate(programs))])


_Fact = TypeVar("_Fact")


@dataclass(frozen=True)
class Subject:
    """Everything that a rule may read.

    ``lowered`` is the plan that the graph comes from, None for a graph that
    was made in Python and is checked alone. ``source`` is None for plans made
    in Python. ``origins`` are the locations of rows that were read from a file,
    by the graph's ``origin`` column. ``facts`` are stated by a person in
    addition to the graph.
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
        """A plan that lowers to the same graph, with given times."""
        return LoadedPlan(self.plan.spec, self.source)

    def with_graph(self, graph: OpGraph) -> Subject:
        """The same subject with another graph, as mutation tests and users' own graphs need it."""
        lowered = None if self.lowered is None else self.lowered.with_graph(graph)
        return replace(self, graph=graph, lowered=lowered)

    def unfolded(self) -> Subject:
        """The same subject with every rank represented by itself, as processes run it.

        Raises:
            BadPlanError: PP116, all ranks together have too many operations.
        """
        if self.lowered is None or not self.lowered.folded:
            return self
        num_ranks = self.plan.mesh.num_ranks
        num_ops = self.graph.num_ops * (num_ranks // self.graph.num_ranks)
        if num_ops > MAX_OPERATIONS:
            message = f"{num_ranks:,} ranks have {num_ops:,} operations in a step, and a run's processes hold at most "
            fix = "run it with fewer replicas, such as --set topology.dp=1; `check` and `simulate` count replicas once"
            raise BadPlanError(TOO_LARGE.finding(f"{message}{MAX_OPERATIONS:,}", self.locate("topology"), fix))
        lowered = self.lowered.unfolded()
        return replace(self, graph=lowered.graph, lowered=lowered)

    @cached_property
    def pp_of(self) -> IntColumn:
        """The coordinate on the ``pp`` axis of each of the graph's ranks, for a subject with a plan."""
        mesh = self.plan.mesh
        return np.array([mesh.coords(rank)["pp"] for rank in self.graph.global_rank], dtype=np.int64)

    @cached_property
    def stage_owners(self) -> Mapping[int, tuple[int, ...]]:
        """The graph's ranks that compute each stage: by the plan's placement, else by their programs."""
        graph = self.graph
        if self.lowered is not None:
            return {
                stage: tuple(rank for pp in holders for rank in np.flatnonzero(self.pp_of == pp).tolist())
                for stage, holders in enumerate(self.lowered.holders)
                if holders
            }
        owners: dict[int, list[int]] = {}
        rows = graph.is_kind(COMPUTE_KINDS)
        for stage, rank in np.unique(np.stack([graph.stage[rows], graph.rank[rows]], axis=1), axis=0).tolist():
            owners.setdefault(stage, []).append(rank)
        return {stage: tuple(ranks) for stage, ranks in owners.items()}

    @cached_property
    def computes(self) -> ComputeTable:
        """Computation of each rank, by stage and micro-batch."""
        return compute_table(self.graph)

    @cached_property
    def num_work_items(self) -> int:
        """Work items of a step (micro-batches, or their splits): from the plan, else as many as are computed."""
        if self.lowered is not None:
            return self.lowered.num_work_items
        return int(self.graph.work_item[self.graph.is_kind(COMPUTE_KINDS)].max(initial=-1)) + 1

    @cached_property
    def _found(self) -> dict[object, object]:
        return {}

    def once(self, find: Callable[[Subject], _Fact]) -> _Fact:
        """Return the result of ``find`` for this subject, computed at the first call: several rules share it."""
        if find not in self._found:
            self._found[find] = find(self)
        return cast("_Fact", self._found[find])

    def locate(self, *path: str | int) -> Location | None:
        """The location of a plan key, or of its nearest parent in the file."""
        return self.source.locate(path) if self.source is not None else None

    def placed(self, finding: Finding) -> Finding:
        """The finding with the location of the first operation of its witness that was read from a file.

        If all of them are missing, the location is the end of the program that lacks the first.
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
        shown = ("pp",) if folded else ("pp", "dp", "tp", "cp", "ep")
        parts = [f"{axis} {coords[axis]}" for axis in shown if mesh.size(axis) > 1]
        module = self.lowered.module_of(coords["pp"]) if self.lowered.spec.modules else None
        if module is not None:
            name, replica, num_replicas = module
            parts.append(f"{name} {replica}" if num_replicas > 1 else name)
        if folded:
            parts.append(f"and {mesh.num_ranks // mesh.size('pp') - 1} more like it")
        return f"rank {global_rank} ({', '.join(parts)})" if parts else f"rank {global_rank}"

    def witness_op(self, op_id: int) -> WitnessOp:
        """One operation of the graph as a witness shows it."""
        return WitnessOp(self.graph.global_rank[int(self.graph.rank[op_id])], str(self.graph.ops[op_id]), op_id)

    def witness(self, *op_ids: int) -> OpsWitness:
        """Operations of the graph as a finding shows them."""
        return OpsWitness(tuple(map(self.witness_op, op_ids)))


def missing_op(rank: int, op: Op) -> WitnessOp:
    """An operation that is missing in a rank's program."""
    return WitnessOp(rank, str(op))


def make_subject(loaded: LoadedPlan, *, boundary: Boundary | None = None) -> Subject:
    """Lower a plan, with another boundary tensor if one is given, and find its backend's table.

    Raises:
        PlanFileError: the plan's own schedule cannot be read or does not fit, the layers cannot be put onto the
            stages, or the plan is too large.
    """
    return lowered_subject(lower_loaded(loaded, boundary=boundary), loaded.source)


def lowered_subject(lowered: LoweredPlan, source: SourceMap | None) -> Subject:
    """Subject of a plan that is lowered already; ``source`` is the text of the plan, if there is one."""
    origins = lowered.foreign.origins if lowered.foreign is not None else ()
    return Subject(lowered.graph, declared_backend(lowered.spec), lowered, source, origins)


def graph_subject(
    graph: OpGraph,
    *,
    backend: BackendTable | None = None,
    origins: tuple[Location, ...] = (),
    facts: Facts = NO_FACTS,
) -> Subject:
    """Subject of a graph that was made in Python or read from a file; rules that need a plan do not apply.

    ``backend`` is the table whose promises hold; default: the table of the default backend.
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


def load_program(path: Path, *, backend: BackendTable | None) -> Subject:
    """Subject of the programs of a file; rules that need a plan do not apply.

    Raises:
        ScheduleFileError: PP130 to PP133, PP136, PP138, the file cannot be read or is not a program.
    """
    return program_subject(read_schedule_text(path), file=str(path), backend=backend)


def program_subject(
    text: str, *, file: str = "<program>", backend: BackendTable | None = None, facts: Facts = NO_FACTS
) -> Subject:
    """Subject of the programs of a text; ``file`` is the name in locations, ``facts`` are additional facts.

    Raises:
        ScheduleFileError: PP131 to PP133, PP136, PP138, the text is not a program.
    """
    from pipeproof.schedule.formats.schedule_size_checks import RawSchedule, check_splits
    from pipeproof.schedule.formats.text_form import parse_program
    from pipeproof.schedule.formats.text_tokens import Findings

    program = parse_program(text, file)
    findings = Findings()
    check_splits(RawSchedule(program.rows_by_rank, program.origins, program.ends, None), None, findings)
    findings.raise_any()
    if not any(program.rows_by_rank):
        message = "no rank of this program does anything: nothing could be wrong with it"
        raise ScheduleFileError(NO_OPERATIONS.finding(message, Location(file)))
    return graph_subject(program.graph(), backend=backend, origins=program.origins, facts=facts)
