"""Lowering: from per-rank programs of a pipeline to the op graph of every global rank.

Lowering adds to the programs: for each transfer its peer and its wait, the
slices and gathers of the ``partial`` transport, below each compute operation
its actual collectives, and at the end the gradient reductions and the
optimizer.

- A receive is posted just before the wait for it, and the wait is just
  before the operation that uses the tensor (an earlier receive spins on a GPU
  and slows concurrent compute). ``transport.recv_order`` moves receives
  earlier (``early_receives``). If a rank uses tensors in another order than
  they are sent, receives are posted in the order of the sends.
- A send is posted right after its producer and never blocks it. A forward
  send is waited for before the backward of its micro-batch, which frees the
  activation; backward sends, and all sends of a program without backwards,
  are waited for at the end of the step.
- With ``transport.shape_exchange: per_message`` a message with its shape goes before each tensor. The wait for its
  receive comes before the tensor's receive is posted; its send is waited for together with the tensor's send.
- No transfer is made between two stages of one rank.

``op_graph`` lowers one replica of the ranks, and unfolds the graph of all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.comm.generated_schedule import (
    TOO_LARGE,
    UNFIT_SCHEDULE,
    plan_schedule,
    require_moderate_size,
)
from pipeproof.comm.op_graph import LoweredPlan, lower_context
from pipeproof.comm.plan_context import Mesh, PlanContext
from pipeproof.comm.step_end_rows import require_own_updates
from pipeproof.cost.plan_times import link_times, shares_of_parts, with_times
from pipeproof.diagnostics.finding import BadPlanAtError, BadPlanError, Finding, Severity
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.columns import NONE, work_item_of
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import SEND_KINDS, Op, OpKind
from pipeproof.schedule.programs import Time, asap, even_costs
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import Boundary, Edge
from pipeproof.stages.describe.layer import Collective, Layer, backward_calls, weight_calls
from pipeproof.stages.describe.model_family import (
    describe_boundaries,
    describe_boundary,
    describe_layers,
    direct_edges,
    stage_layers,
)
from pipeproof.stages.describe.synthetic import stored_hash_tables

if TYPE_CHECKING:
    from pipeproof.schedule.formats.read_schedule import ForeignSchedule
    from pipeproof.schedule.formats.schedule_size_checks import Expected

FOLD_ABOVE = 100_000
"""Operations of all ranks above which replicas are checked once."""

LOWERING_CODES = (TOO_LARGE, UNFIT_SCHEDULE)


def mesh_of(plan: PlanSpec) -> Mesh:
    """The device mesh that ``topology`` describes."""
    topology = plan.topology
    return Mesh(topology.order, tuple(getattr(topology, axis) for axis in topology.order))


def lower(plan: PlanSpec, *, boundary: Boundary | None = None, foreign: ForeignSchedule | None = None) -> LoweredPlan:
    """Derive layers, stages, programs and the op graph of a plan. Linear in operations.

    ``boundary`` replaces the tensor that crosses between the stages, to check
    and simulate the messages of a user's model. ``foreign`` is the schedule of
    a plan with a schedule that is not generated.

    Raises:
        BadPlanAtError: the layers cannot be partitioned into the stages, the schedule
            does not exist for these sizes, or there are more than
            ``generated_schedule.MAX_OPERATIONS``.
    """
    mesh = mesh_of(plan)
    layers = describe_layers(plan)
    require_moderate_size(plan, sum(len(calls) for layer in layers for calls in _calls(plan, layer)))
    stages = stage_layers(plan)
    device = None if plan.cost.analytic is None else plan.cost.analytic.device
    shares, links, plan = shares_of_parts(plan), link_times(plan), with_times(plan)
    schedule = foreign.schedule if foreign is not None else plan_schedule(plan)
    edges = describe_boundaries(plan) if boundary is None else (Edge(((boundary,),)),) * (plan.num_stages - 1)
    activation = boundary or describe_boundary(plan)
    context = PlanContext(plan, mesh, layers, stages, activation, edges, schedule, foreign, links=links, device=device,
                          part_shares=shares, direct=direct_edges(plan))  # fmt: skip
    _require_single_stages(context)
    require_own_updates(context)
    if plan.schedule.alternation is not None and foreign is not None:
        _require_pairs(foreign)
    is_early = plan.transport.recv_order != "just_in_time"
    if is_early:
        context = replace(context, receives=_received_early(context))
    graph = lower_context(context)
    if not is_early and (foreign is None or foreign.computes_only) and not used_as_sent(graph):
        context = replace(context, receives=receives_as_sent(context))
        graph = lower_context(context)
    lowered = LoweredPlan.of(context, graph)
    num_replicas = mesh.num_ranks // graph.num_ranks
    return lowered if graph.num_ops * num_replicas > FOLD_ABOVE else lowered.unfolded()


def _require_single_stages(plan: PlanContext) -> None:
    """Refuse direct edges between copies of stages, unless they are replicas: then a rank has both ends or one."""
    for edge in plan.direct if plan.has_copies else ():
        ends = {plan.holders[stage] for stage in (edge.producer, *edge.consumers)}
        if plan.spec.modules and sum(map(len, ends)) == len({rank for holders in ends for rank in holders}):
            continue
        message = f"`{edge.name}` is sent directly, and several ranks have a copy of a stage"
        raise BadPlanAtError(Finding("PP106", Severity.ERROR, message, help="use `route: relay`"), ("edges",))


def _received_early(plan: PlanContext) -> tuple[Posts, ...]:
    """Receives of each pipeline rank by place in its program, for the ``transport.recv_order`` of the plan."""
    recv_order = plan.spec.transport.recv_order
    if plan.foreign is not None and not plan.foreign.computes_only:
        message = f"`transport.recv_order: {recv_order}` moves no receives of a schedule that has its own communication"
        fix = "remove recv_order, or move them in the file"
        raise BadPlanAtError(Finding("PP106", Severity.ERROR, message, help=fix), ("transport", "recv_order"))
    return early_receives(plan, 1 if recv_order == "prefetch_one" else None)


def _require_pairs(foreign: ForeignSchedule) -> None:
    """Refuse ``schedule.overlap`` if no computations overlap, or their program has its own communication."""
    if not foreign.computes_only:
        why, fix = "has its own communication", "give computations alone"
    elif not any(foreign.schedule.pairs):
        why, fix = "has no computations that overlap", "write pairs as in (0F7;7B3)OVERLAP_F_B"
    else:
        return
    message = f"`schedule.overlap` is of pairs that overlap, and the schedule of the plan {why}"
    raise BadPlanAtError(Finding("PP106", Severity.ERROR, message, help=f"{fix}, or remove overlap"), _OVERLAP)


_OVERLAP = ("schedule", "overlap")


def _calls(plan: PlanSpec, layer: Layer) -> tuple[tuple[Collective, ...], ...]:
    """Collectives of a layer for one micro-batch: forward, backward and for the gradients of its weights."""
    return layer.forward_collectives, backward_calls(plan, layer), weight_calls(plan, layer)


def lower_loaded(loaded: LoadedPlan, *, boundary: Boundary | None = None) -> LoweredPlan:
    """Lower a plan with its own schedule, if it names one; ``boundary`` as for ``lower``.

    Raises:
        PlanFileError: the schedule or the profile cannot be read or does not
            fit, the layers cannot be put onto the stages, or the plan is too
            large.
    """
    with blaming_plan(loaded):
        spec = from_here(loaded).spec
        if spec.model.moe is not None and spec.model.moe.hash_tables is not None:
            stored_hash_tables(spec)
        return lower(spec, boundary=boundary, foreign=own_schedule(loaded))


@contextmanager
def blaming_plan(loaded: LoadedPlan) -> Iterator[None]:
    """Context in which errors of a plan get their location in the plan's file.

    Raises:
        PlanFileError: in place of any BadPlanError.
    """
    source = loaded.source
    try:
        yield
    except BadPlanAtError as error:
        location = source.locate(error.path) if source is not None else None
        raise PlanFileError(*(replace(f, location=location) for f in error.findings), source=source) from None
    except BadPlanError as error:
        raise PlanFileError(*error.findings, source=source) from None


def own_schedule(loaded: LoadedPlan) -> ForeignSchedule | None:
    """The schedule that a plan reads from a file or writes out; None if one is generated.

    Raises:
        ScheduleFileError: it cannot be read, is not for the sizes of the plan, or has attributes that lowering loses.
    """
    spec, source = loaded.spec, loaded.source
    schedule = spec.schedule
    if schedule.programs is None and schedule.path is None:
        return None  # without loading the readers of schedules
    from pipeproof.schedule.formats.read_schedule import custom_schedule, load_schedule_file, require_attributes_kept

    expected = expected_schedule(spec)
    if schedule.programs is not None:
        if source is None:
            return custom_schedule(schedule.programs, expected)
        places = [
            [source.locate(("schedule", "programs", rank, index)) for index in range(len(program))]
            for rank, program in enumerate(schedule.programs)
        ]
        ends = [source.locate(("schedule", "programs", rank)) for rank in range(len(schedule.programs))]
        return custom_schedule(schedule.programs, expected, places=places, ends=ends)
    foreign = load_schedule_file(schedule_path(loaded), expected, format=schedule.format)
    require_attributes_kept(foreign)
    return foreign


def expected_schedule(spec: PlanSpec) -> Expected:
    """The sizes that the schedule of a plan has if it is not generated."""
    from pipeproof.schedule.formats.schedule_size_checks import Expected

    schedule = spec.schedule
    placed = schedule.placement if isinstance(schedule.placement, tuple) else None
    if spec.modules and placed is None:
        from pipeproof.schedule.module_programs import module_placement

        placed = module_placement(spec)
    return Expected(spec.topology.pp, schedule.num_micro_batches, spec.num_stages, placed, schedule.num_sequence_splits)


def schedule_path(loaded: LoadedPlan) -> Path:
    """Path of a plan's schedule file, relative to the plan file, or to the working directory without one."""
    assert loaded.spec.schedule.path is not None
    return _folder(loaded) / loaded.spec.schedule.path


def from_here(loaded: LoadedPlan) -> LoadedPlan:
    """The plan with the paths of its profile and its tables relative to the working directory, not the plan file."""
    spec = loaded.spec
    profile, moe = spec.cost.profile, None if spec.is_custom else spec.gpt.moe
    if profile is not None:
        cost = spec.cost.model_copy(update={"profile": str(_folder(loaded) / profile)})
        spec = spec.model_copy(update={"cost": cost})
    if moe is not None and moe.hash_tables is not None:
        tables = moe.hash_tables.model_copy(update={"path": str(_folder(loaded) / moe.hash_tables.path)})
        model = spec.gpt.model_copy(update={"moe": moe.model_copy(update={"hash_tables": tables})})
        spec = spec.model_copy(update={"model": model})
    return loaded if spec is loaded.spec else replace(loaded, spec=spec)


def with_measured_times(loaded: LoadedPlan) -> LoadedPlan:
    """The plan with given times in place of ``cost.profile``, for callers that change its stages.

    Raises:
        BadPlanError: the profile cannot be read, or is of another plan.
    """
    if loaded.spec.cost.profile is None:
        return loaded
    return replace(loaded, spec=with_times(from_here(loaded).spec))


def _folder(loaded: LoadedPlan) -> Path:
    return Path() if loaded.source is None else Path(loaded.source.file).parent


# --- Order in which ranks post their receives: the order of the sends, or earlier ---
# A rank that holds several stages may send to another rank in one order, and the
# receiver may compute in another. Messages have no names on the wire: the k-th
# receive gets the k-th message. So receives are posted in the order of the sends,
# some of them before the computation that another message is for.
#
# ``transport.recv_order`` posts receives before the rank needs them. An early
# post lets its message arrive while the rank computes. If transfers share a FIFO,
# it may also precede a send that its own sender waits for, and then the step
# hangs. So there is one order of all messages: the order in which computations
# end if each takes a unit of time (a whole backward two) and begins as early as
# possible; at equal times the lower rank is first. A receive is not posted before
# a send of its rank that comes earlier in that order:
#
# - ``prefetch_one``: just before the computation that precedes its consumer or,
#   if that computation's send comes earlier, right after it;
# - ``send_order``: right after the last send of its rank that comes earlier, which
#   puts all transfers of every rank into the one order. PyTorch's pipeline
#   runtime has an order of its own by the same idea: a receive goes into its
#   rank's program when the send goes into the sender's (``_add_send_recv`` in
#   torch/distributed/pipelining/schedules.py), after the computations of the rank
#   up to then.


Link = tuple[bool, int, int]
"""Forward or backward, from one pipeline rank to another."""


def used_as_sent(graph: OpGraph) -> bool:
    """Return True if each receive that is posted just before its use gets its own message."""
    send = np.flatnonzero(graph.is_kind(SEND_KINDS) & (graph.match != NONE))
    receive = graph.match[send]
    same = (graph.work_item[send] == graph.work_item[receive]) & (graph.partner_stage(send) == graph.stage[receive])
    return bool(same.all())


def receives_as_sent(plan: PlanContext) -> tuple[Mapping[int, tuple[Op, ...]], ...]:
    """By pipeline rank and index in its program: the computations whose inputs are received before this computation.

    Indices before which only the computation's own input is received are left out.
    """
    sent: dict[Link, list[Op]] = {}
    for rank, program in enumerate(plan.programs):
        for op in program:
            for user, link in uses_of(plan, rank, op):
                sent.setdefault(link, []).append(user)
    send_index = {(link, user): position for link, users in sent.items() for position, user in enumerate(users)}
    return tuple(_posts(plan, rank, sent, send_index) for rank in range(len(plan.programs)))


def _posts(
    plan: PlanContext, rank: int, sent: Mapping[Link, list[Op]], send_index: Mapping[tuple[Link, Op], int]
) -> dict[int, tuple[Op, ...]]:
    posted = dict.fromkeys(sent, 0)
    posts: dict[int, tuple[Op, ...]] = {}
    for position, op in enumerate(plan.programs[rank]):
        link, user = input_link(plan, rank, op)
        if link is None or (link, user) not in send_index:
            continue  # nothing comes from another rank, or nobody sends it, which the rules report
        first, index = posted[link], send_index[link, user]
        posted[link] = max(first, index + 1)
        if first != index:
            posts[position] = tuple(sent[link][first : index + 1])
    return posts


def uses_of(plan: PlanContext, rank: int, op: Op) -> Iterator[tuple[Op, Link]]:
    """The computation of another rank that needs this one's output; backwards are all named B."""
    forward = op.kind is OpKind.FORWARD
    stage = op.stage + 1 if forward else op.stage - 1
    if op.kind is not OpKind.BACKWARD_WEIGHT and 0 <= stage < len(plan.owner):
        owner = int(plan.owner[stage, work_item_of(op, plan.num_splits)])
        if owner not in (rank, NONE):
            kind = OpKind.FORWARD if forward else OpKind.BACKWARD
            yield Op(kind, stage, op.micro_batch, split=op.split), (forward, rank, owner)


def input_link(plan: PlanContext, rank: int, op: Op) -> tuple[Link | None, Op]:
    """(source of a computation's input, the computation as ``uses_of`` names it)."""
    forward = op.kind is OpKind.FORWARD
    stage = op.stage - 1 if forward else op.stage + 1
    kind = OpKind.FORWARD if forward else OpKind.BACKWARD
    user = Op(kind, op.stage, op.micro_batch, split=op.split)
    if op.kind is OpKind.BACKWARD_WEIGHT or not 0 <= stage < len(plan.owner):
        return None, user
    owner = int(plan.owner[stage, work_item_of(op, plan.num_splits)])
    return (None if owner in (rank, NONE) else (forward, owner, rank)), user


_MessageKey = tuple[Time | float, int, int]
"""Key of a message in the global order: the end, the rank and the index of its computation."""

_NEVER: _MessageKey = (inf, 0, 0)

Posts = Mapping[int, tuple[Op, ...]]
"""By index in a rank's program, the computations whose inputs are received before that computation."""


def early_receives(plan: PlanContext, most: int | None) -> tuple[Posts, ...]:
    """By pipeline rank, the receives before each index, at most ``most`` computations ahead of their use (None: any).

    An overlapping pair counts as one. Indices before which only the computation's
    own input is received are left out, as in ``receives_as_sent``. In a program
    that never ends, which the rules report, receives are posted just in time.
    """
    as_used = receives_as_sent(plan)
    try:
        timed = asap(plan.schedule, even_costs(plan.spec.num_stages))
    except ValueError:
        return as_used
    keys: dict[tuple[Link, Op], _MessageKey] = {}
    sent: list[dict[int, _MessageKey]] = [{} for _ in plan.programs]
    for rank, program in enumerate(plan.programs):
        for position, op in enumerate(program):
            for user, link in uses_of(plan, rank, op):
                keys[link, user] = sent[rank][position] = (timed.ends[rank][position], rank, position)
    return tuple(_Rank(plan, rank, sent[rank], keys).posts(as_used[rank], most) for rank in range(len(sent)))


class _Rank:
    """The entries of one rank's program: single computations and overlapping pairs."""

    def __init__(
        self, plan: PlanContext, rank: int, sent: Mapping[int, _MessageKey], keys: Mapping[tuple[Link, Op], _MessageKey]
    ) -> None:
        self._plan, self._rank, self._keys = plan, rank, keys
        self._program = plan.programs[rank]
        seconds = {position + 1 for position in plan.schedule.pairs_of(rank)}
        self._begins = [position for position in range(len(self._program)) if position not in seconds]
        self._sending: list[int] = []
        """The entries that send, and below the key of the first message of each, in order of time."""
        self._sent: list[_MessageKey] = []
        for entry, places in enumerate(self._entries()):
            key = min((sent[position] for position in places if position in sent), default=None)
            if key is not None:
                self._sending.append(entry)
                self._sent.append(key)

    def _entries(self) -> list[range]:
        ends = [*self._begins[1:], len(self._program)]
        return [range(begin, end) for begin, end in zip(self._begins, ends, strict=True)]

    def posts(self, as_used: Posts, most: int | None) -> Posts:
        """The receives before each index; ``as_used`` has the receives that are just in time."""
        received_at: list[list[tuple[_MessageKey, Op]]] = [[] for _ in self._begins]
        for entry, places in enumerate(self._entries()):
            first = 0 if most is None else max(0, entry - most)
            for position in places:
                for user in as_used.get(position, (self._program[position],)):
                    link, name = input_link(self._plan, self._rank, user)
                    if link is not None:
                        key = self._keys.get((link, name), _NEVER)
                        received_at[min(entry, max(first, self._after_sends_before(key)))].append((key, user))
        posts: dict[int, tuple[Op, ...]] = {}
        for places, received in zip(self._entries(), received_at, strict=True):
            users = tuple(user for _, user in sorted(received, key=lambda message: message[0]))
            if users != self._own(places):
                posts |= dict.fromkeys(places, ()) | {places[0]: users}
        return posts

    def _own(self, places: Sequence[int]) -> tuple[Op, ...]:
        """The computations of an entry with an input from another rank."""
        ops = [self._program[position] for position in places]
        return tuple(op for op in ops if input_link(self._plan, self._rank, op)[0] is not None)

    def _after_sends_before(self, key: _MessageKey) -> int:
        """The first entry after all sends of the rank that come earlier than a message."""
        earlier = bisect_left(self._sent, key)
        return self._sending[earlier - 1] + 1 if earlier else 0
