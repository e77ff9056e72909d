"""Facts of a plan that are not in its graph: numbers of layers, roles, random draws, creation of groups.

The op graph states which rank computes and sends. Some mistakes are made outside
of it: a layer that believes it is another one, a loss on the wrong rank, a
dropout mask that differs between two ranks, communicators that are made in
another order on each rank. These facts are small and optional, filled in from
Python (or from a log of a custom runtime), and checked by rules of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipeproof.comm.plan_context import Mesh
from pipeproof.stages.describe.gradient_facts import GradientFacts
from pipeproof.stages.describe.index_map import IndexMap
from pipeproof.stages.describe.typed_ops import TypedProgram


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor of ``numel`` elements that ranks hold, save or load in parts: each element occurs ``copies`` times."""

    name: str
    numel: int
    parts: Mapping[int, IndexMap]
    copies: int = 1


@dataclass(frozen=True, slots=True)
class MapUse:
    """Elements of tensors that ranks hold, and that an operation, a loader or the peer expects."""

    name: str
    holds: Mapping[int, IndexMap]
    taken_for: Mapping[int, IndexMap]


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """The experts of the blocks of rows that a layer exchanges over the ``ranks`` of an expert-parallel group.

    Each rank sends as many blocks to every member, in the order of the group:
    ``dispatch`` are the experts that it sends them for. A member applies the
    experts ``computes`` to the blocks of each sender, in their order.
    ``combine`` are the experts that the sender assigns to the returned blocks,
    in the order in which it sent them.
    """

    name: str
    ranks: tuple[int, ...]
    dispatch: Mapping[int, tuple[int, ...]]
    computes: Mapping[int, tuple[int, ...]]
    combine: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class UpdatedElements:
    """Elements ``start .. stop`` of the flat buffer of a stage's gradients that the optimizer of a rank updates."""

    rank: int
    stage: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LoadedParameter:
    """On ``rank``, values for ``parameter`` are read into ``target``; the model computes with ``memory``.

    Both are names of memory: equal names are the same memory.
    """

    parameter: str
    rank: int
    target: str
    memory: str


@dataclass(frozen=True, slots=True)
class LayerNumber:
    """The ``place``-th layer of ``stage`` (from 0) computes as layer ``number`` of the model (from 0)."""

    stage: int
    place: int
    number: int


@dataclass(frozen=True, slots=True)
class Role:
    """A rank builds the embedding (the beginning of the first stage) or the loss (the end of the last one)."""

    rank: int
    what: Literal["embedding", "loss"]


@dataclass(frozen=True, slots=True)
class RngRegion:
    """A place in a layer that draws random numbers, and the mesh axes over which the draws must differ.

    Over every other axis the ranks hold the same values there and must draw
    the same numbers. Dropout on a tensor that is sharded along the sequence
    differs over ``tp``; dropout on a tensor that every TP rank holds does not.
    """

    name: str
    differs_over: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RngDraw:
    """One draw: ``key`` names the state of the generator, equal keys give equal numbers.

    ``replay`` marks the draw of a recomputation, which must repeat the forward's.
    """

    rank: int
    layer: str
    micro_batch: int
    region: str
    key: str
    replay: bool = False


@dataclass(frozen=True, slots=True)
class RngFacts:
    """All draws of a step, the regions that they are made in, and the mesh that gives ranks their coordinates."""

    mesh: Mesh
    regions: tuple[RngRegion, ...]
    draws: tuple[RngDraw, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts in addition to a graph; facts that are left out are not checked.

    ``num_layers`` is how many layers ``layer_numbers`` should number.
    ``group_creation`` lists for each rank the groups (indices into the graph's
    ``groups``) that it takes part in making, in its order. ``typed_programs``
    are layers as typed operations; ``held_tensors``, ``map_uses`` and
    ``loads`` are the elements that ranks hold, expect and load;
    ``expert_routings`` the experts to which rows are sent.
    ``gradients`` are the losses and parameters, ``updates`` the elements that
    ranks update, where STEP rows have no range; ``mesh`` gives the ranks of a
    graph without a plan their coordinates, else its groups do.
    """

    num_layers: int = 0
    layer_numbers: tuple[LayerNumber, ...] = ()
    roles: tuple[Role, ...] = ()
    rng: RngFacts | None = None
    group_creation: tuple[tuple[int, ...], ...] | None = None
    typed_programs: tuple[TypedProgram, ...] = ()
    held_tensors: tuple[HeldTensor, ...] = ()
    map_uses: tuple[MapUse, ...] = ()
    loads: tuple[LoadedParameter, ...] = ()
    expert_routings: tuple[ExpertRouting, ...] = ()
    gradients: GradientFacts | None = None
    updates: tuple[UpdatedElements, ...] = ()
    mesh: Mesh | None = None


NO_FACTS = Facts()
"""No facts."""
