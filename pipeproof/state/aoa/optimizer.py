"""What an optimizer keeps of weights goes where the weights go: statements name weights alone.

A moment, and Paddle's weight in float32 beside one of 16 bits, has the shape of its weight: it is cut, merged and
transposed as that is, and keeps its own type. A counter is a number: it is that of the weight, and of a tensor that
is merged of several that of the first, since one optimizer has stepped them all. Names are ours
(``optimizer/moment1/NAME``) or Paddle's (``NAME.moment1_0``, as OPTIMIZER_STATE_NAME of its aoa_engine.py has them).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipeproof.specs.finding import Finding
from pipeproof.state.aoa.codes import DOES_NOT_FIT, NAMES_NOTHING, AoaError, fault
from pipeproof.state.aoa.meta import TensorMeta
from pipeproof.state.aoa.values import Value
from pipeproof.state.boxes import Box, minus, whole_box
from pipeproof.state.mapping import Slab, StateMap, TensorMap

_OURS = re.compile(r"(optimizer/([^/]+)/)(.+)")
_THEIRS = (".w_0", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
_COUNTERS = ("beta1_power", "beta2_power", "step", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
_STARTS_AT_ZERO = ("step",)
"""Of the counters, those that a tensor of zeros has before the first step."""


class Form(NamedTuple):
    """How the name of a state is made of the weight's, and which one it is."""

    before: str
    after: str
    slot: str

    def of(self, weight: str) -> str:
        """The state's name."""
        return f"{self.before}{weight}{self.after}"


@dataclass(slots=True)
class Family:
    """A weight and its states. ``weight`` is of the shape that they share; it ``is_there`` itself, or only they are."""

    weight: TensorMeta
    is_there: bool
    states: dict[Form, TensorMeta] = field(default_factory=dict)


def families(tensors: Mapping[str, TensorMeta]) -> dict[str, Family]:
    """Tensors by the weight that they are of."""
    found = {name: Family(meta, is_there=True) for name, meta in tensors.items() if _form(name) is None}
    for name, meta in tensors.items():
        split = _form(name)
        if split is not None:
            weight, form = split
            family = found.setdefault(weight, Family(meta, is_there=False))
            family.states[form] = meta
            if not family.is_there and form.slot not in _COUNTERS and family.weight.shape != meta.shape:
                family.weight = meta
    return found


def is_state(name: str) -> bool:
    """Whether a name is of what an optimizer keeps of a weight."""
    return _form(name) is not None


def _form(name: str) -> tuple[str, Form] | None:
    """The weight and the form of its state's name; None for a weight."""
    ours = _OURS.fullmatch(name)
    if ours is not None:
        return ours[3], Form(ours[1], "", ours[2])
    suffix = next((suffix for suffix in _THEIRS if name.endswith(suffix) and name != suffix), None)
    return None if suffix is None else (name.removesuffix(suffix), Form("", suffix, suffix))


def with_states(
    made: Mapping[str, Value],
    left_out: tuple[frozenset[str], Mapping[str, Sequence[Box]]],
    before: Mapping[str, Family],
    after: Mapping[str, Family] | None,
) -> StateMap:
    """The map of all tensors, from the values of the target's weights and from what was left out, whole or in part.

    Raises:
        AoaError: PP181, PP182.
    """
    tensors: dict[str, TensorMap] = {}
    found: dict[tuple[str, str], Finding] = {}
    spare, used = set[str](), set[str]()
    for name, value in made.items():
        sources = list(dict.fromkeys(slab.source for slab in value.slabs if slab.source is not None))
        if _has_weight(name, sources, before, after):
            tensors[name] = TensorMap(value.dtype, value.shape, value.slabs)
        for form in _forms(name, sources, before, after):
            state = _state(name, form, value, sources, before, after)
            if isinstance(state, Finding):
                found.setdefault((form.slot, state.code), state)
                continue
            tensors[form.of(name)] = state
            if form.slot in _COUNTERS:
                used.update(slab.source for slab in state.slabs if slab.source is not None)
                spare.update(form.of(source) for source in sources)
    if found:
        raise AoaError(*found.values())
    removed = {form.of(name) for name in left_out[0] for form in before[name].states}
    removed |= {name for name in left_out[0] if before[name].is_there}
    return _said(tensors, removed | (spare - used), left_out[1], before)


def _has_weight(
    name: str, sources: list[str], before: Mapping[str, Family], after: Mapping[str, Family] | None
) -> bool:
    return after[name].is_there if after is not None else all(before[source].is_there for source in sources)


def _forms(
    name: str, sources: list[str], before: Mapping[str, Family], after: Mapping[str, Family] | None
) -> list[Form]:
    """Which states a tensor of the target has: the target says, or they are those of all that it is made of."""
    if after is not None:
        return list(after[name].states)
    return list(dict.fromkeys(form for source in sources for form in before[source].states))


def _state(
    name: str,
    form: Form,
    value: Value,
    sources: list[str],
    before: Mapping[str, Family],
    after: Mapping[str, Family] | None,
) -> TensorMap | Finding:
    wanted = None if after is None else after[name].states[form]
    lacking = [source for source in sources if form not in before[source].states]
    if lacking:
        message = f"nothing makes `{form.of(name)}`: the source has no `{form.of(lacking[0])}`"
        return fault(NAMES_NOTHING, message, None, "move weights alone: `--weights-only`")
    metas = [before[source].states[form] for source in sources] or ([wanted] if wanted is not None else [])
    meta = metas[0]
    is_counter = form.slot in _COUNTERS
    shape = meta.shape if is_counter else value.shape
    if is_counter and not sources and form.slot not in _STARTS_AT_ZERO:
        message = f"`{form.of(name)}` of an added tensor does not begin at zero"
        return fault(DOES_NOT_FIT, message, None, "move weights alone: `--weights-only`")
    for other in (*metas[1:], *([wanted] if wanted is not None else [])):
        if other.dtype != meta.dtype:
            message = f"`{form.of(name)}` becomes {meta.dtype} and {other.dtype}: states keep their type"
            return fault(DOES_NOT_FIT, message, None)
    if wanted is not None and wanted.shape != shape:
        message = f"`{form.of(name)}` becomes {list(shape)}, and the target has {list(wanted.shape)}"
        return fault(DOES_NOT_FIT, message, None)
    if is_counter:
        box = whole_box(shape)
        return TensorMap(meta.dtype, shape, (Slab(box, form.of(sources[0]) if sources else None, box),))
    slabs = (
        slab if slab.source is None else replace(slab, source=form.of(slab.source), casts=()) for slab in value.slabs
    )
    return TensorMap(meta.dtype, shape, tuple(slabs))


def _said(
    tensors: dict[str, TensorMap],
    removed: set[str],
    dropped: Mapping[str, Sequence[Box]],
    before: Mapping[str, Family],
) -> StateMap:
    """The map with what is read twice, and what of the dropped boxes nothing reads."""
    volumes: dict[str, int] = {}
    for tensor in tensors.values():
        for slab in tensor.slabs:
            if slab.source is not None:
                volumes[slab.source] = volumes.get(slab.source, 0) + slab.box.numel
    wholes = {name: family.weight for name, family in before.items() if family.is_there}
    wholes |= {form.of(name): meta for name, family in before.items() for form, meta in family.states.items()}
    copied = {name for name, volume in volumes.items() if volume > whole_box(wholes[name].shape).numel}
    unread = {form.of(name): boxes for name, boxes in dropped.items() for form in _of_its_shape(before[name])}
    reads: dict[str, list[Box]] = {name: [] for name in unread}
    for tensor in tensors.values():
        for slab in tensor.slabs:
            if slab.source in reads:
                reads[slab.source].append(slab.source_box)
    gone = {name: tuple(_without(boxes, reads[name])) for name, boxes in unread.items()}
    whole = {name for name, boxes in gone.items() if boxes and not reads[name]}
    rest = {name: boxes for name, boxes in gone.items() if boxes and name not in whole}
    return StateMap(tensors, frozenset(removed | whole), rest, frozenset(copied))


def _of_its_shape(family: Family) -> Iterator[Form]:
    if family.is_there:
        yield Form("", "", "")
    yield from (form for form in family.states if form.slot not in _COUNTERS)


def _without(boxes: Sequence[Box], others: list[Box]) -> Iterator[Box]:
    for box in boxes:
        yield from minus(box, others)
