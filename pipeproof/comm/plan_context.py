"""The input of lowering: a plan with its mesh, layers, stages, boundaries and schedule, before any operation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from pipeproof.schedule.columns import NONE, IntColumn, work_item_of
from pipeproof.schedule.op_table import Group
from pipeproof.schedule.ops import Op
from pipeproof.schedule.programs import Programs, Schedule, stages_of
from pipeproof.specs.cost import DeviceName
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import Boundary, Edge, MicroBatchSize, work_item_sizes
from pipeproof.stages.describe.layer import Layer, Parameter, users_of_shared

if TYPE_CHECKING:
    from pipeproof.cost.part_shares import PartShares
    from pipeproof.cost.transfer_times import LinkTimes
    from pipeproof.schedule.formats.read_schedule import ForeignSchedule

# --- Weights that several layers use: their ranks, and the stage with which a rank reduces and updates them ---
# A tied head multiplies by the embedding's weight, and modules of multi-token
# prediction may look tokens up in it. Pipeline ranks that hold one of their
# stages hold the weight, each once. What a rank's stages add to its
# gradient is added up on the rank, first of the first stage; then over the
# ranks that hold it, in their order (a ``pp`` group, as Megatron-LM's embedding
# group, arXiv:1909.08053); then over the data axes, as of any other weight.


@dataclass(frozen=True)
class SharedWeights:
    """``users`` has the stages that compute with a weight, for those that any layer borrows.

    ``holders`` are the pipeline ranks of each stage.
    """

    users: Mapping[str, tuple[int, ...]]
    holders: Sequence[tuple[int, ...]]

    def of_stage(self, stage: int, layers: Sequence[Layer], pp: int) -> tuple[Parameter, ...]:
        """The weights that a pipeline rank reduces and updates with a stage, in the model's order.

        Not those that the stage borrows from one that the rank holds: they belong to that one.
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
        """The pipeline ranks that sum gradients with each other, for each sum that there is."""
        for holders in (*self.holders, *(self.places(stages[0], name) for name, stages in self.users.items())):
            if len(holders) > 1:
                yield holders


def shared_weights(stages: Sequence[Sequence[Layer]], holders: Sequence[tuple[int, ...]]) -> SharedWeights:
    """Of a model whose layers are given by stage."""
    return SharedWeights(users_of_shared(stages), holders)


@dataclass(frozen=True)
class PlanContext:
    """Everything that is derived from a plan except its op graph.

    ``spec`` has given times: those of ``cost.analytic`` are computed.
    ``boundary`` is the activation of the model; ``edges`` has the tensors
    between each two stages. ``schedule`` has the computations of each
    pipeline rank. ``foreign`` is the schedule where it was not generated.
    ``receives`` lists by pipeline rank the inputs that are not received just
    before their use; see ``receive_order``. ``links`` has the times of
    messages and collectives; without, each message takes ``p2p_latency_us``
    and collectives nothing. ``device`` is that of ``cost.analytic``.
    ``part_shares`` are those of computations that take turns.
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

        That is the first holder of the stage for a work_item that none computes.
        """
        owner = np.array([ranks[0] if ranks else NONE for ranks in self.holders], dtype=np.int64)
        owner = np.repeat(owner[:, None], self.num_work_items, axis=1)
        if self.has_copies:
            for rank, program in reversed([*enumerate(self.programs)]):
                for op in program:
                    owner[op.stage, work_item_of(op, self.num_splits)] = rank
        return owner

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
        """The global ranks of some pipeline ranks, in order."""
        return tuple(rank for rank in range(self.mesh.num_ranks) if self.mesh.coords(rank)["pp"] in pp_ranks)

    @cached_property
    def layer_by_name(self) -> Mapping[str, Layer]:
        """The described layers by name."""
        return {layer.name: layer for layer in self.layers}

    def layers_of(self, stage: int) -> tuple[Layer, ...]:
        """The described layers of one stage, in execution order."""
        return tuple(self.layer_by_name[name] for name in self.stages[stage])


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks; ``axes`` from fastest to slowest in the global rank, ``sizes`` alike.

    With ``axes = (tp, dp, pp)`` and ``sizes = (2, 1, 4)`` global rank 5 is
    ``tp 1, dp 0, pp 2``.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        """Number of global ranks: the product of all sizes."""
        result = 1
        for size in self.sizes:
            result *= size
        return result

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

    def groups(self, axis: str) -> Iterator[Group]:
        """The groups along ``axis``: members differ in that coordinate only, in its order."""
        others = [a for a in self.axes if a != axis]
        ranges = [range(self.size(a)) for a in reversed(others)]
        for point in product(*ranges):
            fixed = dict(zip(reversed(others), point, strict=True))
            yield Group(axis, tuple(self.rank({**fixed, axis: i}) for i in range(self.size(axis))))
