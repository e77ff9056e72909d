"""The programs of modules that have ranks of their own, each with its number of replicas.

The schedule is first made for one replica of each module. Then each program is written once for every replica of its
module, with that replica's micro-batches only: replica r of d computes the micro-batches m with m mod d = r. This
removes order between computations and adds none.

A kind with one stage on each rank, or with any placement, orders all modules together. A kind with several stages on
each rank, such as interleaved or ZB-V, orders the last module; the stages before it continue its order as 1F1B does:
each has one more micro-batch in flight than the next stage.

A frozen stage has no W. Frozen stages with no trained stage before them have forwards only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate

from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, Request, ScheduleKind
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.schedule.programs import Program, Schedule, StageCosts, Time, UnfitSizesError
from pipeproof.specs.custom_layers import ModuleSpec
from pipeproof.specs.plan import PlanSpec

_MODULES = ("modules",)


def module_placement(plan: PlanSpec) -> tuple[tuple[int, ...], ...]:
    """The stages of each pipeline rank: module by module, and in each module replica by replica."""
    return tuple(stages for module in plan.modules for _ in range(module.dp) for stages in _ranks_of(plan, module))


def _ranks_of(plan: PlanSpec, module: ModuleSpec) -> list[tuple[int, ...]]:
    """The stages of the ranks of one replica, in a V if the kind or the plan places them so, else in turns."""
    kind, num = SCHEDULE_KINDS.get(plan.schedule.kind), module.num_ranks
    is_v = plan.schedule.placement == "v" if kind is None else kind.placement is Placement.V

    def rank_of(chunk: int, rank: int) -> int:
        return num - 1 - rank if is_v and chunk % 2 else rank

    first = module.stages[0]
    return [
        tuple(first + chunk * num + rank_of(chunk, rank) for chunk in range(module.num_chunks)) for rank in range(num)
    ]


def module_schedule(plan: PlanSpec, kind: ScheduleKind, request: Request) -> Schedule:
    """The computations of each pipeline rank; ``request`` has what does not depend on the modules.

    Raises:
        UnfitSizesError: the kind cannot order these modules.
    """
    single = _single(plan, kind, request)
    sizes = [module.num_ranks for module in plan.modules]
    parts = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    trained = partial(_trained, frozen=plan.frozen_stages, first_trained=plan.first_trained)
    programs: list[Program] = []
    pairs: list[frozenset[int]] = []
    for module, ranks in zip(plan.modules, parts, strict=True):
        own = [(single.programs[rank], single.pairs_of(rank)) for rank in range(*ranks.indices(len(single.programs)))]
        for replica in range(module.dp):
            for program, begins in own:
                kept, of_kept = _of_replica(program, begins, replica, module.dp, trained)
                programs.append(kept)
                pairs.append(of_kept)
    return Schedule(tuple(programs), tuple(pairs) if any(pairs) else ())


def _of_replica(
    program: Program,
    begins: frozenset[int],
    replica: int,
    num_replicas: int,
    trained: Callable[[Op], Op | None],
) -> tuple[Program, frozenset[int]]:
    """A program with the micro-batches of one replica, and the pairs that are still whole."""
    number: dict[int, int] = {}
    kept: list[Op] = []
    for position, op in enumerate(program):
        own = trained(op) if (op.micro_batch or 0) % num_replicas == replica else None
        if own is not None:
            number[position] = len(kept)
            kept.append(own)
    both = (number[begin] for begin in begins if begin in number and begin + 1 in number)
    return tuple(kept), frozenset(both)


def _trained(op: Op, frozen: Collection[int], first_trained: int) -> Op | None:
    """A computation as a stage with its frozen weights has it; None if it has not."""
    if op.stage not in frozen or op.kind is OpKind.FORWARD:
        return op
    if op.stage < first_trained or op.kind is OpKind.BACKWARD_WEIGHT:
        return None
    return op._replace(kind=OpKind.BACKWARD)


def _single(plan: PlanSpec, kind: ScheduleKind, request: Request) -> Schedule:
    """The schedule of one replica of each module."""
    if kind.placement is Placement.BOTH_WAYS or kind.splits_sequences:
        fix = "use another kind, such as 1f1b or zb_v"
        raise UnfitSizesError(f"{kind.name} has no order for `modules`", help=fix, key=("schedule", "kind"))
    if isinstance(plan.schedule.placement, tuple):
        raise UnfitSizesError(
            f"{kind.name} places the stages of `modules`, and schedule.placement lists them",
            help="remove it, or use kind custom",
            key=("schedule", "placement"),
        )
    if kind.placement is Placement.ANY:
        placed = tuple(stages for module in plan.modules for stages in _ranks_of(plan, module))
        costs = None if request.costs is None else _shared(plan, request.costs)
        return kind.generate(replace(request, num_ranks=len(placed), placement=placed, costs=costs))
    several = [module for module in plan.modules if module.num_chunks > 1]
    if kind.max_chunks == 1:
        for module in several:
            fix = f"set its pp to {module.num_stages}, or use a kind such as interleaved"
            raise UnfitSizesError(_chunks_text(kind, module), help=fix, key=_MODULES)
        return kind.generate(replace(request, num_ranks=plan.num_stages, num_chunks=1))
    return _before_last(plan, kind, request, several)


def _before_last(plan: PlanSpec, kind: ScheduleKind, request: Request, several: Sequence[ModuleSpec]) -> Schedule:
    """The schedule of the last module, and before it the programs of the stages that feed it."""
    last = plan.modules[-1]
    if last not in several or (kind.max_chunks is not None and last.num_chunks > kind.max_chunks):
        fix = f"set its pp to a number that makes {kind.min_chunks} stages on each rank"
        raise UnfitSizesError(_chunks_text(kind, last), help=f"{fix}, or use 1f1b", key=_MODULES)
    if len(several) > 1:
        message = f"{kind.name} orders the last module, and `{several[0].name}` has {several[0].num_chunks} stages on "
        fix = f"set its pp to {several[0].num_stages}, or use looped_bfs or optimal"
        raise UnfitSizesError(message + "each rank too", help=fix, key=_MODULES)
    costs = request.costs and _from_stage(request.costs, last.stages[0])
    own = kind.generate(replace(request, num_ranks=last.num_ranks, num_chunks=last.num_chunks, costs=costs))
    programs = tuple(tuple(op._replace(stage=op.stage + last.stages[0]) for op in program) for program in own.programs)
    first = next(program for program in programs if any(op.stage == last.stages[0] for op in program))
    before = [tuple(_feeding(first, last.stages[0], stage)) for stage in range(last.stages[0])]
    pairs = (*(frozenset[int]() for _ in before), *own.pairs) if own.pairs else ()
    return Schedule((*before, *programs), pairs)


def _feeding(program: Program, first: int, stage: int) -> Iterator[Op]:
    """The program of a stage before stage ``first``, in the order in which ``program`` computes that."""
    forwards = iter([op.micro_batch for op in program if op.stage == first and op.kind is OpKind.FORWARD])
    for _, mb in zip(range(first - stage), forwards, strict=False):
        yield Op(OpKind.FORWARD, stage, mb)
    for op in program:
        if op.stage != first or op.kind is OpKind.BACKWARD_WEIGHT:
            continue
        if op.kind is not OpKind.FORWARD:
            yield Op(OpKind.BACKWARD, stage, op.micro_batch)
        elif (mb := next(forwards, None)) is not None:
            yield Op(OpKind.FORWARD, stage, mb)


def _chunks_text(kind: ScheduleKind, module: ModuleSpec) -> str:
    few = "one stage" if kind.min_chunks == 1 else f"{kind.min_chunks} stages" + " or more" * (kind.max_chunks is None)
    each = f"{module.num_chunks} stage{'s' * (module.num_chunks > 1)}"
    return f"{kind.name} has {few} on each rank, and module `{module.name}` has {each}"


def _shared(plan: PlanSpec, costs: StageCosts) -> StageCosts:
    """The times of stages with replicas, which work at the same time, divided by their number."""

    def shared(times: Sequence[Time]) -> tuple[Time, ...]:
        return tuple(Fraction(time) / num for time, num in zip(times, plan.num_replicas, strict=True))

    return replace(
        costs,
        forward=shared(costs.forward),
        backward_input=shared(costs.backward_input),
        backward_weight=shared(costs.backward_weight),
    )


def _from_stage(costs: StageCosts, first: int) -> StageCosts:
    return replace(
        costs,
        forward=costs.forward[first:],
        backward_input=costs.backward_input[first:],
        backward_weight=costs.backward_weight[first:],
        overlapped=costs.overlapped and costs.overlapped[first:],
    )
