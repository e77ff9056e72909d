"""12x: every stage computes every micro-batch once, in order, on the rank that owns it, and steps once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeproof.diagnostics.finding import ExampleKind, Finding, OpsWitness, RuleDoc
from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_table import NONE, IntColumn
from pipeproof.schedule.ops import KIND_CODE, Op, OpKind
from pipeproof.verify.fifo_matching import FaultsByChannel
from pipeproof.verify.subject import Rule, Subject, missing_op, of_small_plan

_F, _B, _I, _W = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT


def is_training(subject: Subject) -> bool:
    """Return True if every forward needs a backward: not in an evaluation, which has forwards only."""
    if subject.lowered is None:
        return bool(subject.computes.backwards.any() or subject.computes.count[_W].any())
    return any(op.kind is not _F for program in subject.lowered.programs for op in program)


def owns(subject: Subject, rank: IntColumn, stage: IntColumn) -> BoolColumn:
    """Mask of the (rank, stage) pairs in which the rank owns the stage (-1 or more)."""
    pairs = [(owner, owned) for owned, owners in subject.stage_owners.items() for owner in owners]
    num_stages = max(int(stage.max(initial=0)), max(subject.stage_owners, default=0)) + 2
    keys = np.array([owner * num_stages + owned for owner, owned in pairs], dtype=np.int64)
    return (stage >= 0) & np.isin(rank * num_stages + stage, keys)


def is_expected(subject: Subject, rank: IntColumn, stage: IntColumn, work_item: IntColumn) -> BoolColumn:
    """Mask of the (rank, stage, work item) triples that the rank should compute.

    It owns the stage, the work item exists, and if the stage has several copies, its copy computes this item.
    """
    lowered = subject.lowered
    if lowered is None or not lowered.has_copies:
        return owns(subject, rank, stage) & (work_item < subject.num_work_items)
    num_stages, num_work_items = lowered.owner.shape
    inside = (stage >= 0) & (stage < num_stages) & (work_item >= 0) & (work_item < num_work_items)
    selected = lowered.owner[np.where(inside, stage, 0), np.where(inside, work_item, 0)] == subject.pp_of[rank]
    return np.asarray(inside & selected)


MISSING = RuleDoc(
    code="PP121",
    title="a stage never computes a micro-batch",
    explanation=(
        "Training needs one forward and one backward (or one input-gradient and one weight-gradient operation) "
        "for each stage and micro-batch; an evaluation, whose programs have no backward at all, one forward. A "
        "missing backward leaves a gradient without that micro-batch's share: training continues with a smaller, "
        "biased gradient."
    ),
    wrong="rank 0: 0F0 0F1 0B0",
    right="rank 0: 0F0 0F1 0B0 0B1",
)


def _check_missing(subject: Subject) -> Iterator[Finding]:
    table = subject.computes
    rank, stage, work_item = _expected_by_plan(subject) if subject.lowered is not None else _expected_alone(subject)
    entry = table.find(rank, stage, work_item)

    def lacks(kind: OpKind) -> BoolColumn:
        none: BoolColumn = np.append(table.count[kind], 0)[entry] == 0  # the place NONE, -1, is the appended one
        return none

    split = ~lacks(_I) | ~lacks(_W)
    absent: dict[OpKind, BoolColumn] = {_F: lacks(_F)}
    if is_training(subject):
        due = stage >= (0 if subject.lowered is None else subject.lowered.spec.first_trained)
        absent |= {_B: due & ~split & lacks(_B), _I: due & split & lacks(_I), _W: due & split & lacks(_W)}
    for index in np.flatnonzero(np.any(list(absent.values()), axis=0)).tolist():
        at = int(rank[index])
        ops = [
            subject.graph.op_of(kind, int(stage[index]), int(work_item[index]))
            for kind, mask in absent.items()
            if mask[index]
        ]
        names = " and ".join(map(str, ops))
        yield MISSING.finding(
            f"{subject.coords_text(at)} never runs {names}",
            help=f"add {names} to the program of rank {subject.graph.global_rank[at]}",
            witness=OpsWitness(tuple(missing_op(subject.graph.global_rank[at], op) for op in ops)),
        )


def _expected_by_plan(subject: Subject) -> tuple[IntColumn, IntColumn, IntColumn]:
    """(rank, stage, work item) of every computation in the plan."""
    pairs = sorted((rank, stage) for stage, ranks in subject.stage_owners.items() for rank in ranks)
    rank, stage = np.repeat(np.array(pairs, dtype=np.int64).reshape(-1, 2), subject.num_work_items, axis=0).T
    work_item = np.tile(np.arange(subject.num_work_items), len(pairs))
    due = is_expected(subject, rank, stage, work_item)
    return rank[due], stage[due], work_item[due]


def _expected_alone(subject: Subject) -> tuple[IntColumn, IntColumn, IntColumn]:
    """Cells that a graph without a plan must compute: all that it begins, and every micro-batch on every stage.

    Two ranks with one stage are replicas, which both run each micro-batch, or
    copies, which divide them: each micro-batch is expected on as many ranks
    of its stage as the other micro-batches are.
    """
    table = subject.computes
    stages, stage_code = np.unique(table.stage, return_inverse=True)
    work_items, work_item_code = np.unique(table.work_item, return_inverse=True)
    cells = stage_code * len(work_items) + work_item_code
    covered = np.bincount(cells, minlength=len(stages) * len(work_items)).reshape(len(stages), len(work_items))
    uncovered = covered.max(axis=1, initial=0)[:, None] - covered
    lacking = np.flatnonzero(uncovered.ravel() > 0)
    touched = np.isin(cells, lacking)
    busy = set(zip(cells[touched].tolist(), table.rank[touched].tolist(), strict=True))
    more: list[tuple[int, int, int]] = []
    for cell in lacking.tolist():
        row, column = divmod(cell, len(work_items))
        idle = [rank for rank in subject.stage_owners[int(stages[row])] if (cell, rank) not in busy]
        missing = int(uncovered[row, column])
        more += [(rank, int(stages[row]), int(work_items[column])) for rank in idle[:missing]]
    added = np.array(more, dtype=np.int64).reshape(-1, 3)
    ours = np.stack([table.rank, table.stage, table.work_item], axis=1)
    rank, stage_column, unit_column = np.concatenate([ours, added]).T
    return rank, stage_column, unit_column


DOUBLED = RuleDoc(
    code="PP122",
    title="a stage computes a micro-batch twice",
    explanation=(
        "A second backward adds the micro-batch's gradient again; a second forward overwrites the activations "
        "that the backward needs. B in addition to I or W of the same micro-batch counts as twice too."
    ),
    wrong="rank 0: 0F0 0B0 0B0",
    right="rank 0: 0F0 0B0",
)


def _check_doubled(subject: Subject) -> Iterator[Finding]:
    graph, table = subject.graph, subject.computes
    count = table.count
    twice = np.any([column > 1 for column in count.values()], axis=0)
    mixed = (count[_B] > 0) & ((count[_I] > 0) | (count[_W] > 0))
    for entry in np.flatnonzero(twice | mixed).tolist():
        by_kind = grouped((graph.ops[op_id].kind, op_id) for op_id in table.ops(entry))
        doubles = [ids for ids in by_kind.values() if len(ids) > 1]
        if mixed[entry]:
            doubles.append([i for kind, ids in by_kind.items() if kind is not _F for i in ids])
        for ids in doubles:
            yield DOUBLED.finding(
                f"{subject.coords_text(int(table.rank[entry]))} runs "
                f"{', '.join(str(graph.ops[i]) for i in ids)}: stage {table.stage[entry]} does the work of "
                f"micro-batch {graph.work_item_text(int(table.work_item[entry]))} more than once",
                help="keep one of them",
                witness=subject.witness(*ids),
            )


ORDER = RuleDoc(
    code="PP123",
    title="a computation comes before its inputs",
    explanation=(
        "The backward of a micro-batch reads the activations that its forward kept, and the weight-gradient "
        "operation reads the result of the input-gradient operation. If two computations of a rank are exchanged, but "
        "the transfers around them are not, the fault is the same: one reads an input that has not been "
        "received, or makes an output that has already been sent."
    ),
    wrong="rank 0: 0B0 0F0",
    right="rank 0: 0F0 0B0",
)

_MUST_PRECEDE = ((_F, _B), (_F, _I), (_I, _W))


def _check_order(subject: Subject) -> Iterator[Finding]:
    graph, table = subject.graph, subject.computes
    home: dict[int, int] = {}
    for first_op, second_op, transfers in exchanges(subject):
        one, other = graph.ops[first_op], graph.ops[second_op]
        home |= {first_op: second_op, second_op: first_op}
        yield ORDER.finding(
            f"{subject.coords_text(int(graph.rank[first_op]))} runs {one} in the place of {other}, and "
            f"{other} in the place of {one}: the transfers around each belong to the other",
            help=f"exchange {one} and {other}",
            witness=subject.witness(first_op, second_op, *transfers),
        )
    late: list[tuple[int, int]] = []
    for index, (earlier, later) in enumerate(_MUST_PRECEDE):
        first, second = table.first[earlier], table.first[later]
        wrong = (first != NONE) & (second != NONE) & (second < first)
        late += [(entry, index) for entry in np.flatnonzero(wrong).tolist()]
    for entry, index in sorted(late):
        needed, needs = (int(table.first[kind][entry]) for kind in _MUST_PRECEDE[index])
        if home.get(needed, needed) < home.get(needs, needs):  # exchanged back, they are in order
            continue
        yield ORDER.finding(
            f"{subject.coords_text(int(table.rank[entry]))} runs {graph.ops[needs]} before {graph.ops[needed]}",
            help=f"move {graph.ops[needed]} before {graph.ops[needs]}",
            witness=subject.witness(needs, needed),
        )


SPLITS = RuleDoc(
    code="PP129",
    title="the splits of a sequence are out of order",
    explanation=(
        "Causal attention of a split reads the keys and values of the splits before it: forwards of a micro-batch "
        "run from its first split to its last. Backwards run from the last to the first, because the gradient of "
        "these keys and values comes from the later splits."
    ),
    wrong="rank 0: 0F0.s0 0F0.s1 0B0.s0 0B0.s1",
    right="rank 0: 0F0.s0 0F0.s1 0B0.s1 0B0.s0",
)


def _check_splits(subject: Subject) -> Iterator[Finding]:
    graph, table = subject.graph, subject.computes
    if not graph.num_splits:
        return
    entry = np.arange(len(table.work_item))
    before = table.find(table.rank, table.stage, table.work_item - 1)  # the split before it of the same micro-batch
    follows = (before != NONE) & (table.work_item % graph.num_splits > 0)
    for first, onward in ((table.first[_F], True), (table.first_backward, False)):
        own, previous = first[entry[follows]], first[before[follows]]
        due, late = (
            (previous, own) if onward else (own, previous)
        )  # the operation that should run first, and the next one
        for index in np.flatnonzero((due != NONE) & (late != NONE) & (late < due)).tolist():
            needs, needed = int(late[index]), int(due[index])
            yield SPLITS.finding(
                f"{subject.coords_text(int(graph.rank[needs]))} runs {graph.ops[needs]} before {graph.ops[needed]}, "
                "whose keys and values, or the gradients of these, it reads",
                help=f"move {graph.ops[needed]} before {graph.ops[needs]}",
                witness=subject.witness(needs, needed),
            )


FOREIGN = RuleDoc(
    code="PP124",
    title="a rank computes a stage or micro-batch that it does not have",
    explanation=(
        "A rank owns the stages that the placement gives it, and the schedule has a fixed number of "
        "micro-batches. An operation outside of both has no weights or no data."
    ),
    wrong=of_small_plan("{'pp': 2}", "rows[0].append(Row(parse_op('1F0')))"),
    right=of_small_plan("{'pp': 2}"),
    kind=ExampleKind.PYTHON,
)


def _check_foreign(subject: Subject) -> Iterator[Finding]:
    graph, table = subject.graph, subject.computes
    yield from _check_frozen(subject)
    strangers = np.flatnonzero(~is_expected(subject, table.rank, table.stage, table.work_item))
    for rank in np.unique(table.rank[strangers]).tolist():
        ids = [op_id for entry in strangers[table.rank[strangers] == rank].tolist() for op_id in table.ops(entry)]
        stages = [stage for stage, ranks in subject.stage_owners.items() if rank in ranks]
        named = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        module = None if subject.lowered is None else subject.lowered.module_of(int(subject.pp_of[rank]))
        turns = "" if module is None or module[2] == 1 else f" with m mod {module[2]} = {module[1]}"
        yield FOREIGN.finding(
            f"{subject.coords_text(rank)} owns {named} and micro-batches "
            f"0..{graph.work_item_text(subject.num_work_items - 1)}{turns}, but runs "
            f"{', '.join(str(graph.ops[i]) for i in ids[:8])}",
            help="run the operation on the rank that owns the stage" + (" and the micro-batch" if turns else ""),
            witness=subject.witness(*ids),
        )


def _check_frozen(subject: Subject) -> Iterator[Finding]:
    """Yield a finding for each rank with gradients of frozen weights, or before all trained ones, or sums of them."""
    spec, graph = None if subject.lowered is None else subject.lowered.spec, subject.graph
    if spec is None or not spec.frozen_stages:
        return
    is_frozen = np.isin(graph.stage, [*spec.frozen_stages]) & (graph.parent == NONE)
    needless = is_frozen & graph.is_kind(frozenset({_W, OpKind.REDUCE_GRAD}))
    needless |= is_frozen & (graph.stage < spec.first_trained) & graph.is_kind(frozenset({_B, _I}))
    for rank in np.unique(graph.rank[needless]).tolist():
        ids = np.flatnonzero(needless & (graph.rank == rank)).tolist()
        named = ", ".join(str(graph.ops[i]) for i in ids[:8])
        yield FOREIGN.finding(
            f"{subject.coords_text(rank)} runs {named} of a frozen module: nothing needs that gradient",
            help="remove the operation, or train the module",
            witness=subject.witness(*ids),
        )


STEPS = RuleDoc(
    code="PP128",
    title="the optimizer does not step once on every stage",
    explanation=(
        "A stage without its step keeps its weights while the others train, possibly on one replica only; a second "
        "step applies the same gradient again. Programs that name no step at all leave it "
        "to the caller, and are not checked."
    ),
    wrong="rank 0: 0F0 1F0 1B0 0B0 0STEP",
    right="rank 0: 0F0 1F0 1B0 0B0 0STEP 1STEP",
)


def _check_steps(subject: Subject) -> Iterator[Finding]:
    graph, table = subject.graph, subject.computes
    steps = np.flatnonzero(graph.kind == KIND_CODE[OpKind.STEP])
    if not len(steps):
        return
    frozen = [] if subject.lowered is None else [*subject.lowered.spec.frozen_stages]
    ours = owns(subject, table.rank, table.stage) & ~np.isin(table.stage, frozen)
    rank = np.concatenate([graph.rank[steps], table.rank[ours]])
    stage = np.concatenate([graph.stage[steps], table.stage[ours]])
    held, some, entry = np.unique(packed(rank, stage), return_index=True, return_inverse=True)
    count = np.bincount(entry[: len(steps)], minlength=len(held))
    computes = np.bincount(entry[len(steps) :], minlength=len(held)) > 0
    described = np.isin(rank[some], table.rank)  # nothing is known of a rank that computes nothing
    for index in np.flatnonzero((count != 1) | (~computes & described)).tolist():
        at, of_stage = int(rank[some[index]]), int(stage[some[index]])
        step = Op(OpKind.STEP, of_stage)
        selected = steps[entry[: len(steps)] == index].tolist()
        where = subject.coords_text(at)
        if not selected:
            yield STEPS.finding(
                f"{where} computes stage {of_stage} and never runs {step}, while others step",
                help=f"add {step} at the end of its program",
                witness=OpsWitness((missing_op(graph.global_rank[at], step),)),
            )
        else:
            what = f"{len(selected)} times" if computes[index] else "and computes nothing of that stage"
            what = "and the weights of that stage are frozen" if of_stage in frozen else what
            yield STEPS.finding(
                f"{where} runs {step} {what}",
                help="keep one for each stage of the rank",
                witness=subject.witness(*selected),
            )


RULES: tuple[Rule, ...] = (
    Rule(STEPS, _check_steps),
    Rule(MISSING, _check_missing),
    Rule(DOUBLED, _check_doubled),
    Rule(ORDER, _check_order),
    Rule(FOREIGN, _check_foreign, needs_plan=True),
    Rule(SPLITS, _check_splits),
)


# Exchanged computations of a rank, found by the transfers around them.
#
# The transfers of a rank keep their positions when two computations are
# exchanged. So one of the two runs before its input is received, or after its
# output has been sent, and each is among the other's transfers: it is the first
# computation after the receive of the other's input, or the last one before the
# send of the other's output. Exchanged back, both are in order.


_TRANSFERS = {
    _F: (OpKind.RECV_FORWARD, OpKind.SEND_FORWARD),
    _B: (OpKind.RECV_BACKWARD, OpKind.SEND_BACKWARD),
    _I: (OpKind.RECV_BACKWARD, OpKind.SEND_BACKWARD),
}
"""By kind of a computation: the transfer that brings its input, and the one that takes its output."""


Exchange = tuple[int, int, list[int]]
"""Two exchanged computations, as op ids in program order, and the transfers that show it."""


@dataclass(frozen=True, eq=False)
class _Places:
    """By row of a computation the transfers of its input and output on its rank, NONE without any."""

    rows: IntColumn
    receive: dict[int, int]
    send: dict[int, int]

    def fits(self, row: int, at: int) -> bool:
        """Return True if a computation at a position comes after its receive and before its send."""
        receive, send = self.receive[row], self.send[row]
        return (receive == NONE or receive < at) and (send == NONE or at < send)

    def has_transfers_of(self, at: int, row: int) -> bool:
        """Return True if no computation is between a position and the transfers of the computation for it."""
        return self._next_to(self.receive[row], 0) == at or self._next_to(self.send[row], -1) == at

    def candidates(self, row: int) -> list[int]:
        """The computations at the positions where the transfers of a computation are."""
        neighbours = (self._next_to(self.receive[row], 0), self._next_to(self.send[row], -1))
        return [other for other in neighbours if other not in (NONE, row)]

    def _next_to(self, transfer: int, side: int) -> int:
        """The first computation behind a transfer (``side`` 0), or the last one before it (-1)."""
        index = int(np.searchsorted(self.rows, transfer)) + side
        return int(self.rows[index]) if transfer != NONE and 0 <= index < len(self.rows) else NONE


def exchanges(subject: Subject) -> list[Exchange]:
    """All exchanges, in program order; each computation is in one at most."""
    graph, faults = subject.graph, subject.once(FaultsByChannel)
    result: list[Exchange] = []
    done: set[int] = set()
    for places, row in _out_of_place(subject):
        for other in places.candidates(row):
            same_rank = graph.rank[row] == graph.rank[other]
            both = places.has_transfers_of(other, row) and places.has_transfers_of(row, other)
            if same_rank and both and places.fits(row, other) and places.fits(other, row) and not {row, other} & done:
                first, second = sorted((row, other))
                ends = [end for of in (first, second) for end in (places.receive[of], places.send[of]) if end != NONE]
                if any(end in faults[int(graph.channel[end])].block_of for end in ends):
                    continue  # the transfers are exchanged, and the peer's are not: PP302 reports it
                shown = [end for end in ends if first < end < second]
                result.append((first, second, sorted(shown)))
                done |= {row, other}
    return sorted(result)


def _out_of_place(subject: Subject) -> Iterator[tuple[_Places, int]]:
    """Computations that run before their receive or after their send, in program order, with all places."""
    table = subject.computes
    firsts = {kind: table.first[kind] for kind in _TRANSFERS}
    by_transfer = {end: _first_transfer(subject, end) for transfers in _TRANSFERS.values() for end in transfers}
    ends = {kind: tuple(by_transfer[end] for end in transfers) for kind, transfers in _TRANSFERS.items()}
    wrong: list[int] = []
    for kind, rows in firsts.items():
        receive, send = ends[kind]
        there = rows != NONE
        early, late = there & (receive > rows), there & (send != NONE) & (send < rows)
        wrong += rows[early | late].tolist()
    if not wrong:
        return
    all_rows = np.sort(np.concatenate([rows[rows != NONE] for rows in firsts.values()]))
    by_end = [
        {
            int(row): int(end)
            for kind, rows in firsts.items()
            for row, end in zip(rows.tolist(), ends[kind][side].tolist(), strict=True)
            if row != NONE
        }
        for side in range(2)
    ]
    places = _Places(all_rows, *by_end)
    for row in sorted(wrong):
        yield places, row


def _first_transfer(subject: Subject, kind: OpKind) -> IntColumn:
    """By entry of the computations its first transfer of a kind, NONE without any."""
    graph, table = subject.graph, subject.computes
    rows = np.flatnonzero(graph.is_kind(frozenset({kind})))
    entry = table.find(graph.rank[rows], graph.stage[rows], graph.work_item[rows])
    rows, entry = rows[entry != NONE][::-1], entry[entry != NONE][::-1]
    first = np.full(len(table), NONE, dtype=np.int64)
    first[entry] = rows  # the last write stays: the first row
    return first
