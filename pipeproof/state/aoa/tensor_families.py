"""Type, shape and sharding of tensors that statements need, and families of a weight and its optimizer states.

Statements name weights, and optimizer states follow them. A moment, and Paddle's main weight in float32, has the shape
of its weight: it is split, merged and transposed in the same way, and keeps its own type. A counter is a scalar: a
tensor that is merged from several gets the first one's counter, because one optimizer has stepped them all. Names are
pipeproof's (``optimizer/moment1/NAME``) or Paddle's (``NAME.moment1_0``, as in OPTIMIZER_STATE_NAME of its
aoa_engine.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import Finding
from pipeproof.state.aoa.tensor_values import TensorValue
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.regions import Region, subtract, whole_region
from pipeproof.state.state_codes import SIZE_MISMATCH, UNKNOWN_TENSOR, AoaError
from pipeproof.state.state_index import Shard, TensorEntry
from pipeproof.state.state_layout import files_of, whole_state
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Type and shape of a whole tensor, and the number of its shards.

    ``num_shards`` counts the distinct offsets of shards, which is the degree of tensor parallelism if that shards the
    tensor. Only ``fused_ffn`` and ``fused_qkv_old`` depend on it: their layout repeats for each shard. Copies of a
    shard, on data-parallel ranks, count once.
    """

    dtype: str
    shape: tuple[int, ...]
    num_shards: int = 1


def metas_of_checkpoint(checkpoint: Checkpoint) -> dict[str, TensorMeta]:
    """Return all tensors on disk."""
    return metas_of(checkpoint.tensors, (stored.shard for held in checkpoint.shards.values() for stored in held))


def metas_of_plan(plan: LoweredPlan) -> dict[str, TensorMeta]:
    """Return all tensors that runs of a plan save."""
    return metas_of(whole_state(plan), (shard for shards in files_of(plan).values() for shard in shards))


def metas_of(tensors: Mapping[str, TensorEntry], shards: Iterable[Shard]) -> dict[str, TensorMeta]:
    """Return tensors with the number of their shards."""
    offsets: dict[str, set[tuple[int, ...]]] = {}
    for shard in shards:
        offsets.setdefault(shard.tensor, set()).add(shard.offsets)
    return {
        name: TensorMeta(entry.dtype, entry.shape, max(1, len(offsets.get(name, ()))))
        for name, entry in tensors.items()
    }


_OWN_FORM = re.compile(r"(optimizer/([^/]+)/)(.+)")
_PADDLE_SUFFIXES = (".w_0", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
_COUNTERS = ("beta1_power", "beta2_power", "step", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
_ZERO_COUNTERS = ("step",)
"""Counters that are zero before the first step."""


class StateNameForm(NamedTuple):
    """Form of a state's name: prefix and suffix of the weight's name, and the slot."""

    prefix: str
    suffix: str
    slot: str

    def of(self, weight: str) -> str:
        """Return the state's name."""
        return f"{self.prefix}{weight}{self.suffix}"


@dataclass(slots=True)
class Family:
    """A weight and its states, which share the shape of ``weight``.

    If ``exists`` is False, there are only its states.
    """

    weight: TensorMeta
    exists: bool
    states: dict[StateNameForm, TensorMeta] = field(default_factory=dict)


def families(tensors: Mapping[str, TensorMeta]) -> dict[str, Family]:
    """Group tensors by their weight."""
    by_weight = {name: Family(meta, exists=True) for name, meta in tensors.items() if _form(name) is None}
    for name, meta in tensors.items():
        split = _form(name)
        if split is not None:
            weight, form = split
            family = by_weight.setdefault(weight, Family(meta, exists=False))
            family.states[form] = meta
            if not family.exists and form.slot not in _COUNTERS and family.weight.shape != meta.shape:
                family.weight = meta
    return by_weight


def is_state(name: str) -> bool:
    """Return True if a name belongs to an optimizer state."""
    return _form(name) is not None


def _form(name: str) -> tuple[str, StateNameForm] | None:
    """Return the weight and the form of its state's name; None for a weight."""
    ours = _OWN_FORM.fullmatch(name)
    if ours is not None:
        return ours[3], StateNameForm(ours[1], "", ours[2])
    suffix = next((suffix for suffix in _PADDLE_SUFFIXES if name.endswith(suffix) and name != suffix), None)
    return None if suffix is None else (name.removesuffix(suffix), StateNameForm("", suffix, suffix))


def weights_of(tensors: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
    """Return the weights alone."""
    return {name: family.weight for name, family in families(tensors).items()}


def with_optimizer_states(
    made: Mapping[str, TensorValue],
    left_out: tuple[frozenset[str], Mapping[str, Sequence[Region]]],
    source_families: Mapping[str, Family],
    target_families: Mapping[str, Family] | None,
) -> StateMap:
    """Return the map of all tensors, from the target's weights and from source tensors left out, whole or in part.

    Raises:
        AoaError: PP181, PP182.
    """
    tensors: dict[str, TensorMap] = {}
    findings: dict[tuple[str, str], Finding] = {}
    unused_counters, used_counters = set[str](), set[str]()
    for name, value in made.items():
        sources = list(dict.fromkeys(copy.source for copy in value.copies if copy.source is not None))
        if _has_weight(name, sources, source_families, target_families):
            tensors[name] = TensorMap(value.dtype, value.shape, value.copies)
        for form in _wanted_forms(name, sources, source_families, target_families):
            state = _state(name, form, value, sources, source_families, target_families)
            if isinstance(state, Finding):
                findings.setdefault((form.slot, state.code), state)
                continue
            tensors[form.of(name)] = state
            if form.slot in _COUNTERS:
                used_counters.update(copy.source for copy in state.copies if copy.source is not None)
                unused_counters.update(form.of(source) for source in sources)
    if findings:
        raise AoaError(*findings.values())
    removed = {form.of(name) for name in left_out[0] for form in source_families[name].states}
    removed |= {name for name in left_out[0] if source_families[name].exists}
    return _with_exceptions(tensors, removed | (unused_counters - used_counters), left_out[1], source_families)


def _has_weight(
    name: str, sources: list[str], source_families: Mapping[str, Family], target_families: Mapping[str, Family] | None
) -> bool:
    if target_families is not None:
        return target_families[name].exists
    return all(source_families[source].exists for source in sources)


def _wanted_forms(
    name: str, sources: list[str], source_families: Mapping[str, Family], target_families: Mapping[str, Family] | None
) -> list[StateNameForm]:
    """Return the states of a target tensor: its states in the target, or the states of all its sources."""
    if target_families is not None:
        return list(target_families[name].states)
    return list(dict.fromkeys(form for source in sources for form in source_families[source].states))


def _state(
    name: str,
    form: StateNameForm,
    value: TensorValue,
    sources: list[str],
    source_families: Mapping[str, Family],
    target_families: Mapping[str, Family] | None,
) -> TensorMap | Finding:
    target_meta = None if target_families is None else target_families[name].states[form]
    missing = [source for source in sources if form not in source_families[source].states]
    if missing:
        message = f"nothing makes `{form.of(name)}`: the source has no `{form.of(missing[0])}`"
        return UNKNOWN_TENSOR.finding(message, None, "move weights alone: `--weights-only`")
    metas = [source_families[source].states[form] for source in sources] or (
        [target_meta] if target_meta is not None else []
    )
    meta = metas[0]
    is_counter = form.slot in _COUNTERS
    shape = meta.shape if is_counter else value.shape
    if is_counter and not sources and form.slot not in _ZERO_COUNTERS:
        message = f"`{form.of(name)}` of an added tensor does not begin at zero"
        return SIZE_MISMATCH.finding(message, None, "move weights alone: `--weights-only`")
    for other_meta in (*metas[1:], *([target_meta] if target_meta is not None else [])):
        if other_meta.dtype != meta.dtype:
            message = f"`{form.of(name)}` becomes {meta.dtype} and {other_meta.dtype}: states keep their type"
            return SIZE_MISMATCH.finding(message, None)
    if target_meta is not None and target_meta.shape != shape:
        message = f"`{form.of(name)}` becomes {list(shape)}, and the target has {list(target_meta.shape)}"
        return SIZE_MISMATCH.finding(message, None)
    if is_counter:
        region = whole_region(shape)
        return TensorMap(meta.dtype, shape, (RegionCopy(region, form.of(sources[0]) if sources else None, region),))
    copies = (
        copy if copy.source is None else replace(copy, source=form.of(copy.source), casts=()) for copy in value.copies
    )
    return TensorMap(meta.dtype, shape, tuple(copies))


def _with_exceptions(
    tensors: dict[str, TensorMap],
    removed: set[str],
    dropped: Mapping[str, Sequence[Region]],
    source_families: Mapping[str, Family],
) -> StateMap:
    """Return the map with duplicated tensors, and the dropped regions that nothing reads."""
    readers = StateMap(tensors).readers()
    volumes = {name: sum(reader.region.numel for reader in of_tensor) for name, of_tensor in readers.items()}
    wholes = {name: family.weight for name, family in source_families.items() if family.exists}
    wholes |= {form.of(name): meta for name, family in source_families.items() for form, meta in family.states.items()}
    duplicated = {name for name, volume in volumes.items() if volume > whole_region(wholes[name].shape).numel}
    forms = ((name, form) for name in dropped for form in _forms_of_its_shape(source_families[name]))
    unread = {form.of(name): dropped[name] for name, form in forms}
    gone = {
        name: tuple(_without(regions, [reader.region for reader in readers.get(name, ())]))
        for name, regions in unread.items()
    }
    whole = {name for name, regions in gone.items() if regions and name not in readers}
    rest = {name: regions for name, regions in gone.items() if regions and name not in whole}
    return StateMap(tensors, frozenset(removed | whole), rest, frozenset(duplicated))


def _forms_of_its_shape(family: Family) -> Iterator[StateNameForm]:
    if family.exists:
        yield StateNameForm("", "", "")
    yield from (form for form in family.states if form.slot not in _COUNTERS)


def _without(regions: Sequence[Region], others: list[Region]) -> Iterator[Region]:
    for region in regions:
        yield from subtract(region, others)
