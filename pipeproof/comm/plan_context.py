"""The input of lowering: a plan with its mesh, layers, stages, boundaries and schedule, before any operation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.schedule.columns import NONE, IntColumn, work_item_of
from pipeproof.schedule.op_parts import TensorPart, part_starts
from pipeproof.schedule.op_table import BoundaryPosition, Group, TensorSpec
from pipeproof.schedule.ops import Op
from pipeproof.schedule.programs import Programs, Schedule, stages_of
from pipeproof.specs.axis_layout import INVARIANT, VARYING, parse_placement
from pipeproof.specs.cost import DeviceName
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.transport import TransportSpec
from pipeproof.stages.describe.boundary import Boundary, DirectEdge, Edge, MicroBatchSize, work_item_sizes
from pipeproof.stages.describe.layer import COUNTS_DTYPE, Layer, Parameter, users_of_shared

if TYPE_CHECKING:
    from pipeproof.cost.part_shares import PartShares
    from pipeproof.cost.transfer_times import LinkTimes
    from pipeproof.schedule.formats.read_schedule import ForeignSchedule

# --- Weights that several layers use: their ranks, and the stage with which a rank reduces and updates them ---
# A tied head multiplies by the embedding's weight, and modules of multi-token
# prediction may look up tokens in it. Pipeline ranks that hold one of their
# stages hold the weight, each once. The contributions of a rank's stages to its
# gradient are added up on the rank, beginning with the first stage; then over the
# ranks that hold it, in their order (a ``pp`` group, as Megatron-LM's embedding
# group, arXiv:1909.08053); then over the data axes, as for any other weight.


@dataclass(frozen=True)
class SharedWeights:
    """``users`` has the stages that compute with a weight, for borrowed weights.

    ``holders`` are the pipeline ranks of each stage.
    """

    users: Mapping[str, tuple[int, ...]]
    holders: Sequence[tuple[int, ...]]

    def of_stage(self, stage: int, layers: Sequence[Layer], pp: int) -> tuple[Parameter, ...]:
        """The weights that a pipeline rank reduces and updates with a stage, in the model's order.

        Without weights that the stage borrows from another stage of the rank: they belong to that stage.
        """
        borrowed = dict.fromkeys(weight for layer in layers for weight in layer.borrowed)
        own = [weight for layer in layers for weight in layer.parameters]
        return (*(weight for weight in borrowed if self.home(weight.name, pp) == stage and weight not in own), *own)

    def home(self, name: str, pp: int) -> int:
        """The stage with which a pipeline rank that holds a borrowed weight reduces and updates it."""
        return next(stage for stage in self.users[name] if pp in self.holders[stage])

    def borrowers(self, pp: int) -> Mapping[int, tuple[int, ...]]:
        """By stage of a pipeline rank, the stages there that compute with borrowed weights which belong to it."""
        stages_of: dict[int, set[int]] = {}
        for users in self.users.values():
            local = [stage for stage in users if pp in self.holders[stage]]
            if local:
                stages_of.setdefault(local[0], set()).update(local)
        return {home: tuple(sorted(stages)) for home, stages in stages_of.items()}

    def places(self, stage: int, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold a weight of a stage, in order."""
        users = self.users.get(name, (stage,))
        return tuple(sorted({pp for user in users for pp in self.holders[user]}))

    def groups(self) -> Iterator[tuple[int, ...]]:
        """The pipeline ranks that sum gradients with each other, for each such sum."""
        for holders in (*self.holders, *(self.places(stages[0], name) for name, stages in self.users.items())):
            if len(holders) > 1:
                yield holders


def shared_weights(stages: Sequence[Sequence[Layer]], holders: Sequence[tuple[int, ...]]) -> SharedWeights:
    """Shared weights of a model whose layers are given by stage."""
    return SharedWeights(users_of_shared(stages), holders)


@dataclass(frozen=True)
class PlanContext:
    """Everything that is derived from a plan except its op graph.

    ``spec`` has explicit times: ``cost.analytic`` times are already computed.
    ``boundary`` is the activation of the model; ``edges`` has the tensors
    between each two stages. ``schedule`` has the computations of each
    pipeline rank. ``foreign`` is the schedule if it was not generated.
    ``receives`` lists by pipeline rank the inputs that are not received just
    before their use; see ``receive_order``. ``links`` has the times of
    messages and collectives; without it, each message takes ``p2p_latency_us``
    and collectives nothing. ``device`` is the device of ``cost.analytic``.
    ``part_shares`` are the shares of alternating computations' parts. ``direct`` are the edges past the next stage
    that are not passed on.
    """

    spec: PlanSpec
    mesh: Mesh
    layers: tuple[Layer, ...]
    stages: tuple[tuple[str, ...], ...]
    boundary: Boundary
    edges: tuple[Edge, ...]
    schedule: Schedule
    foreign: ForeignSchedule | None = None
    receives: tuple[Mapping[int, tuple[Op, ...]], ...] = ()
    links: LinkTimes | None = None
    device: DeviceName | None = None
    part_shares: PartShares | None = None
    direct: tuple[DirectEdge, ...] = ()

    @property
    def programs(self) -> Programs:
        """The computations of each pipeline rank, in order."""
        return self.schedule.programs

    @property
    def num_splits(self) -> int:
        """Number of sequence splits; 0 if sequences are not split."""
        num_splits = self.spec.schedule.num_sequence_splits
        return num_splits if num_splits > 1 else 0

    @property
    def num_work_items(self) -> int:
        """Work items of a step: micro-batches, or their splits."""
        return self.spec.schedule.num_micro_batches * self.spec.schedule.num_sequence_splits

    @cached_property
    def sizes(self) -> tuple[MicroBatchSize, ...]:
        """The distinct sizes of work items."""
        return work_item_sizes(self.spec)[0]

    @cached_property
    def size_of_work_item(self) -> tuple[int, ...]:
        """Index into ``sizes`` of each work item; empty if all have one size."""
        return work_item_sizes(self.spec)[1]

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The pipeline ranks that hold each stage: one, or one for each copy."""
        holders: list[list[int]] = [[] for _ in range(self.spec.num_stages)]
        for rank, stages in enumerate(stages_of(self.programs)):
            for stage in stages:
                holders[stage].append(rank)
        return tuple(map(tuple, holders))

    @cached_property
    def shared_weights(self) -> SharedWeights:
        """The weights that several layers compute with, and who holds them."""
        return shared_weights([self.layers_of(stage) for stage in range(len(self.stages))], self.holders)

    def weights_of(self, stage: int, pp: int) -> tuple[Parameter, ...]:
        """The weights that a pipeline rank holds, reduces and updates with a stage, in the model's order."""
        return self.shared_weights.of_stage(stage, self.layers_of(stage), pp)

    @property
    def has_copies(self) -> bool:
        """True if several pipeline ranks hold a copy of a stage; they share its work items."""
        return any(len(ranks) > 1 for ranks in self.holders)

    @cached_property
    def owner(self) -> IntColumn:
        """The pipeline rank that computes each work item of each stage, shape [stages, work items].

        Replicas of a module share the micro-batches in turns. Other copies compute what their programs have; if no rank
        computes a work item, this is the first holder of the stage.
        """
        if self.spec.modules:
            turns = [[ranks[m % len(ranks)] for m in range(self.num_work_items)] for ranks in self.holders]
            return np.array(turns, dtype=np.int64)
        owner = np.array([ranks[0] if ranks else NONE for ranks in self.holders], dtype=np.int64)
        owner = np.repeat(owner[:, None], self.num_work_items, axis=1)
        if self.has_copies:
            for rank, program in reversed([*enumerate(self.programs)]):
                for op in program:
                    owner[op.stage, work_item_of(op, self.num_splits)] = rank
        return owner

    def module_of(self, pp: int) -> tuple[str, int, int] | None:
        """The module of a pipeline rank: its name, the rank's replica and the number of replicas; None without one."""
        for module in self.spec.modules:
            for holders in self.holders[module.stages[0] : module.stages[1] + 1]:
                if pp in holders:
                    return module.name, holders.index(pp), module.dp
        return None

    def receivers(self, edge: DirectEdge) -> tuple[int, ...]:
        """The consumers that get a direct edge's message: the first on each other rank, for all of that rank."""
        own, *_ = self.holders[edge.producer]
        first = {self.holders[stage][0]: stage for stage in reversed(edge.consumers)}
        return tuple(sorted(stage for rank, stage in first.items() if rank != own))

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a global rank computes, in order of their numbers."""
        return stages_of(self.programs)[self.mesh.coords(rank)["pp"]]

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        """The global ranks that hold a stage, in order."""
        return self._ranks_of(self.holders[stage])

    def ranks_of_weight(self, stage: int, name: str) -> tuple[int, ...]:
        """The global ranks that hold a weight of a stage, in order: other stages may use it, too."""
        return self._ranks_of(self.shared_weights.places(stage, name))

    def _ranks_of(self, pp_ranks: Sequence[int]) -> tuple[int, ...]:
        mesh = self.mesh
        stride = prod(mesh.sizes[: mesh.axes.index("pp")])
        ranks = np.arange(mesh.num_ranks)
        return tuple(ranks[np.isin(ranks // stride % mesh.size("pp"), pp_ranks)].tolist())

    @cached_property
    def layer_by_name(self) -> Mapping[str, Layer]:
        """The described layers by name."""
        return {layer.name: layer for layer in self.layers}

    def layers_of(self, stage: int) -> tuple[Layer, ...]:
        """The described layers of one stage, in execution order."""
        return tuple(self.layer_by_name[name] for name in self.stages[stage])


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks; ``axes`` and ``sizes`` from fastest to slowest in the global rank.

    With ``axes = (tp, dp, pp)`` and ``sizes = (2, 1, 4)`` global rank 5 is
    ``tp 1, dp 0, pp 2``.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Number of global ranks: the product of all sizes."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return self.sizes[self.axes.index(axis)]

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of a global rank on each axis."""
        result = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank, result[axis] = divmod(rank, size)
        return result

    def rank(self, coords: Mapping[str, int]) -> int:
        """The global rank at ``coords``, which names every axis."""
        result = 0
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            result = result * size + coords[axis]
        return result

    def ranks(self, folded: Collection[str] = ()) -> tuple[int, ...]:
        """The global ranks in order; only coordinate 0 on ``folded`` axes, without enumerating the others."""
        axes = tuple(reversed(self.axes))
        sizes = (1 if axis in folded else self.size(axis) for axis in axes)
        return tuple(self.rank(dict(zip(axes, point, strict=True))) for point in product(*map(range, sizes)))

    def groups(self, axis: str, folded: Collection[str] = ()) -> Iterator[Group]:
        """The groups along ``axis``: members differ in that coordinate only, in order; ``folded``: see ``ranks``."""
        others = [a for a in self.axes if a != axis]
        ranges = [range(1 if a in folded else self.size(a)) for a in reversed(others)]
        along = range(1 if axis in folded else self.size(axis))
        for point in product(*ranges):
            fixed = dict(zip(reversed(others), point, strict=True))
            yield Group(axis, tuple(self.rank({**fixed, axis: i}) for i in along))


# The tensors at the ends of stages, which transfers carry: one for each end, direction, size and member.
#
# A plan may pack the members of an edge into one message: then they are one tensor, a vector of their bytes.


PACKED = -1
"""In place of a member: the packed message of all members in its direction."""


def is_packed(members: Sequence[Boundary], transport: TransportSpec, *, gradient: bool) -> bool:
    """Return True if the members of an edge, or their gradients, are one packed message: if there are several."""
    num_crossing = sum(member.has_gradient for member in members) if gradient else len(members)
    return transport.messages == "packed" and num_crossing > 1


def message_name(members: Sequence[Boundary], transport: TransportSpec) -> str:
    """Return the name of the message that carries the first member of an edge forward."""
    if is_packed(members, transport, gradient=False):
        return _packed_name([member.member for member in members])
    return members[0].member


def _packed_name(members: Iterable[str]) -> str:
    return " + ".join(members)


@dataclass(frozen=True)
class BoundaryTensors:
    """The tensors at the stages' ends, and the index of each by (``input_grad``, stage, variant, member).

    For a direct edge the key is (``input_grad``, edge, stage at the other end, variant); an ``output`` has NONE there.
    """

    specs: tuple[TensorSpec, ...]
    index: Mapping[tuple[str, int, int, int], int]
    direct: Mapping[tuple[str, int, int, int], int]
    inside: Mapping[str, int]
    """The index of the tensor that collectives inside layers move in a dtype of their own, by dtype."""


def tensors_of(
    edges: Sequence[Edge], layers: Sequence[Layer], transport: TransportSpec, num_loads: int = 0,
    direct: Sequence[DirectEdge] = (),
) -> BoundaryTensors:  # fmt: skip
    """Input and output of each stage that has one, with their gradients, in each variant of the micro-batches.

    After them come the tensors of direct edges, and for each dtype that only collectives of ``layers`` have, their
    largest tensor. ``num_loads`` numbers are summed at the end of the step for each router.
    """
    specs: list[TensorSpec] = []
    index: dict[tuple[str, int, int, int], int] = {}
    for stage in range(len(edges) + 1):
        for side in ("input", "output"):
            edge = stage - 1 if side == "input" else stage
            if not 0 <= edge < len(edges):
                continue
            for variant, members in enumerate(edges[edge].variants):
                for number, gradient in _messages(members, transport):
                    name = f"{side}_grad" if gradient else side
                    title = f"{name.replace('_', ' ')} of stage {stage}"
                    position = BoundaryPosition(edge, variant, number)
                    index[name, stage, variant, number] = len(specs)
                    if number == PACKED:
                        specs.append(_packed(title, members, side, gradient, position))
                    else:
                        specs.append(_tensor(title, members[number], side, gradient, position))
    of_direct = _direct_tensors(edges, direct, specs)
    largest = {COUNTS_DTYPE: num_loads} if num_loads else dict[str, int]()
    for layer in layers:
        for collective in (*layer.forward_collectives, *layer.backward_collectives):
            if collective.dtype is not None:
                largest[collective.dtype] = max(largest.get(collective.dtype, 0), collective.numel)
    inside = {dtype: len(specs) + offset for offset, dtype in enumerate(largest)}
    specs += [TensorSpec(f"{dtype} inside layers", (n,), dtype, str(INVARIANT), "x") for dtype, n in largest.items()]
    return BoundaryTensors(tuple(specs), index, of_direct, inside)


def _direct_tensors(
    edges: Sequence[Edge], direct: Sequence[DirectEdge], specs: list[TensorSpec]
) -> dict[tuple[str, int, int, int], int]:
    """Append the tensors of direct edges: an output, and at each consumer an input and the gradients at both ends."""
    index: dict[tuple[str, int, int, int], int] = {}
    for number, edge in enumerate(direct):
        ends = [
            ("output", NONE),
            *((name, c) for c in edge.consumers for name in ("input", "input_grad", "output_grad")),
        ]
        for variant, boundary in enumerate(edge.variants):
            for name, user in ends:
                gradient, at_producer = name.endswith("grad"), name.startswith("output")
                if gradient and not edge.has_gradient:
                    continue
                stage = edge.producer if at_producer else user
                position = BoundaryPosition(NONE, variant, edge_position(edges, direct, number, stage))
                index[name, number, user, variant] = len(specs)
                text = f"gradient of {edge.name} from stage {user}" if gradient else edge.name
                specs.append(_tensor(f"{text} at stage {stage}", boundary, name[:6], gradient, position))
    return index


def edge_position(edges: Sequence[Edge], direct: Sequence[DirectEdge], number: int, stage: int) -> int:
    """The position of a direct edge among the outputs of its producer, or among the inputs of a consumer.

    They come after the members of the boundary, in the order of the edges.
    """
    is_made = direct[number].producer == stage
    before = [edge for edge in direct[:number] if (stage == edge.producer if is_made else stage in edge.consumers)]
    boundary = stage if is_made else stage - 1
    return len(before) + (len(edges[boundary].variants[0]) if 0 <= boundary < len(edges) else 0)


def _messages(members: Sequence[Boundary], transport: TransportSpec) -> list[tuple[int, bool]]:
    """The members of an edge that cross one by one, and ``PACKED``; each with whether it is the gradient."""
    packed = [gradient for gradient in (False, True) if is_packed(members, transport, gradient=gradient)]
    alone = [
        (number, gradient)
        for number, member in enumerate(members)
        for gradient in ((False, True) if member.has_gradient else (False,))
        if gradient not in packed
    ]
    return alone + [(PACKED, gradient) for gradient in packed]


def _packed(
    name: str, members: Sequence[Boundary], side: str, gradient: bool, position: BoundaryPosition
) -> TensorSpec:
    """The message with the bytes of all members that cross. Equal parts on all TP ranks are equal messages."""
    tensors = [
        (index, _tensor(name, member, side, gradient, position))
        for index, member in enumerate(members)
        if member.has_gradient or not gradient
    ]
    parts = tuple(TensorPart(t.member, t.shape, t.dtype, t.placement, t.dims, index) for index, t in tensors)
    is_equal = all(parse_placement(part.placement).holds_equal_values for part in parts)
    num_bytes = part_starts(part.num_bytes for part in parts)[-1]
    return TensorSpec(
        name, (num_bytes,), "uint8", str(INVARIANT if is_equal else VARYING), "x",
        _packed_name(part.member for part in parts), position=position, parts=parts,
    )  # fmt: skip


def _tensor(name: str, boundary: Boundary, side: str, gradient: bool, position: BoundaryPosition) -> TensorSpec:
    at_sender = side == "output"
    placement = boundary.placement(at_sender=at_sender, gradient=gradient)
    shape = boundary.local_shape_at(at_sender=at_sender)
    return TensorSpec(name, shape, boundary.dtype, str(placement), boundary.dims, boundary.member, position=position)
