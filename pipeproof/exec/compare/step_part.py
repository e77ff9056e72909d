"""Comparison of some ranks' step with the reference, as small JSON data: all that the verdict on all ranks needs.

On several hosts each host has the gradients of its own ranks only. Its leader runs the whole reference, which is
deterministic, and compares its ranks' shards with the same regions of the reference. No tensor leaves a host:
``compare_gradients.merged_step`` makes the comparison of all ranks from the parts of all hosts.

With W weights of the plan and R pairs of a weight and a rank of the part that has a shard of it, the JSON of a part has
about 220 W + 170 R bytes, 60 R more with a sharded optimizer, and 100 for each router value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

import numpy as np

from pipeproof.analysis.align.array_digests import md5_of
from pipeproof.comm.op_graph import LoweredPlan, index_of, stage_weights
from pipeproof.exec.compare.compare_routers import RouterPart, router_part
from pipeproof.exec.compare.exact_values import ExactArray, ExactFloat, have_same_bits, largest, largest_difference
from pipeproof.exec.compare.step_losses import FiniteFacts, finite_facts, is_finite
from pipeproof.exec.rank.job_files import Loss, StepOutcome
from pipeproof.stages.describe.layer import Parameter
from pipeproof.stages.describe.layers.layer_operations import measured_with
from pipeproof.stages.describe.stage_memory import num_shards, shard_range

Index: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open range of a whole gradient, per dim."""


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a gradient that a rank has: a range per dim; with a sharded optimizer, a flat range of those."""

    index: Index
    elements: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's array."""
        if self.elements is not None:
            return (self.elements[1] - self.elements[0],)
        return tuple(stop - start for start, stop in self.index)

    def of(self, whole: np.ndarray) -> np.ndarray:
        """Return these elements of the whole gradient."""
        block = whole[tuple(slice(start, stop) for start, stop in self.index)]
        return block if self.elements is None else block.reshape(-1)[slice(*self.elements)]


def regions_of(plan: LoweredPlan, stage: int, parameter: Parameter) -> dict[int, Region]:
    """Region of each rank that has a part of a gradient, in the order of the ranks."""
    shards = num_shards(plan.spec)
    regions = {}
    for rank in plan.ranks_of_weight(stage, parameter.name):
        block = Region(index_of(plan, parameter, rank))
        dp_rank = plan.mesh.coords(rank)["dp"]
        elements = None if shards == 1 else shard_range(prod(block.shape), shards, dp_rank)
        regions[rank] = Region(block.index, elements)
    return regions


def deciding_ranks(regions: Mapping[int, Region]) -> set[int]:
    """Ranks whose shards make up the gathered gradient: of ranks with the same region the last."""
    return set({region: rank for rank, region in regions.items()}.values())


def dp_group(plan: LoweredPlan, rank: int) -> tuple[int, ...]:
    """Ranks of the dp group of a rank, in order."""
    coords = plan.mesh.coords(rank)
    return tuple(plan.mesh.rank({**coords, "dp": dp}) for dp in range(plan.mesh.size("dp")))


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """One rank's shard of a gradient, compared with the same region of the reference.

    ``reference_md5`` is that of the region, None where the bits are equal or the step has no reference. The differences
    are max|a - b| in float64, to the reference that adds in the plan's order and to the unpartitioned model. With a
    sharded optimizer ``joined`` has the MD5s of the dp group's joined shards, if the part has the whole group.
    """

    md5: str
    reference_md5: str | None = None
    difference: ExactFloat = 0.0
    unpartitioned_difference: ExactFloat = 0.0
    joined: tuple[str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class GradientPart:
    """Shards of one gradient by rank; ``md5`` is that of the gathered gradient if it is not the reference's.

    It is None where the part lacks some of the shards that make up the gathered gradient.
    """

    shards: Mapping[int, ShardFacts] = field(default_factory=dict)
    md5: str | None = None


@dataclass(frozen=True, slots=True)
class ReferenceGradient:
    """The reference's gradient: its MD5, and the units max|b| of differences to it and to the unpartitioned model."""

    md5: str
    scale: ExactFloat
    unpartitioned_scale: ExactFloat


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """Facts of the reference of a step that any host computes with the same bits.

    ``digest`` is the SHA-256 of all values of both models, by which references of several hosts are compared; a part
    that has all ranks needs none, and has an empty string.
    """

    loss: ExactArray
    unpartitioned_loss: ExactArray
    gradients: Mapping[str, ReferenceGradient]
    routers: Mapping[str, ExactArray]
    unpartitioned_routers: Mapping[str, ExactArray]
    digest: str


@dataclass(frozen=True, slots=True)
class StepPart:
    """Comparison of one step of some ranks; ``reference`` is None if the step has none on this host."""

    step: int
    ranks: tuple[int, ...]
    losses: Mapping[int, ExactArray]
    gradients: Mapping[str, GradientPart]
    routers: RouterPart
    finite: FiniteFacts
    reference: ReferenceFacts | None = None

    def loss(self, rank: int) -> Loss | None:
        """Return a rank's loss, None for a rank without one."""
        return self.losses[rank].loss() if rank in self.losses else None


def gradient_key(stage: int, name: str) -> str:
    """Key of a gradient in a part: an unsafe plan may have one layer on several stages."""
    return f"{stage}/{name}"


def compare_part(
    plan: LoweredPlan,
    step: int,
    ranks: Mapping[int, StepOutcome],
    ordered: StepOutcome | None,
    unpartitioned: StepOutcome | None,
) -> StepPart:
    """Compare the shards of some ranks with both references, which are None for a step without a reference.

    Raises:
        ValueError: a shard has another shape or dtype than the plan states.
    """
    models = None if ordered is None or unpartitioned is None else _Models(ordered, unpartitioned)
    gradients = {
        gradient_key(stage, parameter.name): _GradientComparison(plan, stage, parameter, ranks, models).part()
        for stage, parameter in stage_weights(plan)
    }
    return StepPart(
        step=step,
        ranks=tuple(ranks),
        losses={rank: ExactArray.of(own.loss) for rank, own in ranks.items() if own.loss is not None},
        gradients=gradients,
        routers=router_part(
            {rank: own.routers for rank, own in ranks.items()}, None if ordered is None else ordered.routers
        ),
        finite=finite_facts(ranks, unpartitioned),
        reference=None if models is None else models.facts(plan, has_all_ranks=len(ranks) == plan.mesh.num_ranks),
    )


class _Models:
    """Both references of a step, with what is computed of each gradient once."""

    def __init__(self, ordered: StepOutcome, unpartitioned: StepOutcome) -> None:
        self.ordered, self.unpartitioned = ordered, unpartitioned
        self.are_same = ordered is unpartitioned
        self._md5s: dict[tuple[str, Region | None], str] = {}
        self._scales: dict[tuple[str, bool], float] = {}

    def md5(self, name: str, region: Region | None = None) -> str:
        """MD5 of a region of the ordered reference's gradient; without a region, of the whole."""
        whole = self.ordered.gradients[name]
        if region is not None and region.shape == whole.shape:
            region = None
        if (name, region) not in self._md5s:
            self._md5s[name, region] = md5_of(whole if region is None else region.of(whole))
        return self._md5s[name, region]

    def facts(self, plan: LoweredPlan, *, has_all_ranks: bool) -> ReferenceFacts:
        """Facts of both references."""
        ordered, unpartitioned = self.ordered, self.unpartitioned
        assert ordered.loss is not None
        assert unpartitioned.loss is not None
        names = [parameter.name for _, parameter in stage_weights(plan)]
        return ReferenceFacts(
            loss=ExactArray.of(ordered.loss),
            unpartitioned_loss=ExactArray.of(unpartitioned.loss),
            gradients={
                name: ReferenceGradient(
                    self.md5(name),
                    self._scale(name, of_ordered=True),
                    max(self._scale(other, of_ordered=False) for other in (name, *measured_with(name))),
                )
                for name in names
            },
            routers={name: ExactArray.of(value) for name, value in ordered.routers.items()},
            unpartitioned_routers={name: ExactArray.of(value) for name, value in unpartitioned.routers.items()},
            digest="" if has_all_ranks else self._digest(names),
        )

    def _scale(self, name: str, *, of_ordered: bool) -> float:
        key = name, of_ordered or self.are_same
        if key not in self._scales:
            gradients = (self.ordered if key[1] else self.unpartitioned).gradients
            self._scales[key] = largest(gradients[name])
        return self._scales[key]

    def _digest(self, names: Sequence[str]) -> str:
        sha = hashlib.sha256()
        for model in (self.ordered,) if self.are_same else (self.ordered, self.unpartitioned):
            values = {"loss": np.asarray(model.loss), **model.routers}
            for name, value in sorted(values.items()):
                sha.update(f"{name} {md5_of(np.asarray(value))}\n".encode())
            for name in names:
                md5 = self.md5(name) if model is self.ordered else md5_of(model.gradients[name])
                sha.update(f"{name} {md5}\n".encode())
        return sha.hexdigest()


class _GradientComparison:
    """Comparison of the shards of one gradient. Shards with the reference's bits are not hashed."""

    def __init__(
        self,
        plan: LoweredPlan,
        stage: int,
        parameter: Parameter,
        ranks: Mapping[int, StepOutcome],
        models: _Models | None,
    ) -> None:
        self._plan, self._parameter, self._models, self._name = plan, parameter, models, parameter.name
        self._regions = regions_of(plan, stage, parameter)
        self._shards = {rank: ranks[rank].gradients[self._name] for rank in self._regions if rank in ranks}

    def part(self) -> GradientPart:
        """Compare each shard, then the joined and the gathered ones that this part has."""
        for rank, shard in self._shards.items():
            self._require_form(rank, shard)
        facts = {rank: self._facts(self._regions[rank], shard) for rank, shard in self._shards.items()}
        if any(region.elements is not None for region in self._regions.values()):
            facts = self._with_joined(facts)
        return GradientPart(facts, self._gathered_md5(facts))

    def _require_form(self, rank: int, shard: np.ndarray) -> None:
        """Check a shard's shape and dtype: numpy would broadcast and convert silently, and hide a wrong shard."""
        shape = self._regions[rank].shape
        dtype = shard.dtype if self._models is None else self._models.ordered.gradients[self._name].dtype
        if (shard.shape, shard.dtype) != (shape, dtype):
            raise ValueError(
                f"gradient of {self._name} on rank {rank}: {shard.dtype} {list(shard.shape)}, expected {dtype} "
                f"{list(shape)}"
            )

    def _facts(self, region: Region, shard: np.ndarray) -> ShardFacts:
        if self._models is None:
            return ShardFacts(md5_of(shard))
        ordered, unpartitioned = (
            region.of(model.gradients[self._name]) for model in (self._models.ordered, self._models.unpartitioned)
        )
        reference_md5 = self._models.md5(self._name, region)
        if have_same_bits(shard, ordered):
            md5, differing, difference = reference_md5, None, 0.0 if is_finite(shard) else np.nan
        else:
            md5, differing, difference = md5_of(shard), reference_md5, largest_difference(shard, ordered)
        to_unpartitioned = difference if self._models.are_same else largest_difference(shard, unpartitioned)
        return ShardFacts(md5, differing, float(difference), float(to_unpartitioned))

    def _with_joined(self, facts: Mapping[int, ShardFacts]) -> dict[int, ShardFacts]:
        """Add the MD5s of joined shards to the facts of the dp groups that this part has all ranks of."""
        joined: dict[int, tuple[str, str | None]] = {}
        for group in {dp_group(self._plan, rank) for rank in facts}:
            if facts.keys() >= {*group}:
                block = Region(self._regions[group[0]].index)
                reference_md5 = None if self._models is None else self._models.md5(self._name, block)
                if reference_md5 is not None and all(facts[rank].reference_md5 is None for rank in group):
                    joined |= dict.fromkeys(group, (reference_md5, None))
                else:
                    md5 = md5_of(np.concatenate([self._shards[rank] for rank in group]))
                    joined |= dict.fromkeys(group, (md5, reference_md5))
        return {rank: replace(own, joined=joined.get(rank)) for rank, own in facts.items()}

    def _gathered_md5(self, facts: Mapping[int, ShardFacts]) -> str | None:
        deciding = deciding_ranks(self._regions)
        if not facts.keys() >= deciding:
            return None
        if self._models is not None and all(facts[rank].reference_md5 is None for rank in deciding):
            return None
        gathered = np.empty(self._parameter.shape, dtype=next(iter(self._shards.values())).dtype)
        by_index: dict[Index, list[np.ndarray]] = {}
        for rank in sorted(deciding, key=lambda rank: self._regions[rank].elements or (0, 0)):
            by_index.setdefault(self._regions[rank].index, []).append(self._shards[rank].reshape(-1))
        for index, shards in by_index.items():
            block = Region(index)
            block.of(gathered)[...] = np.concatenate(shards).reshape(block.shape)
        return md5_of(gathered)
