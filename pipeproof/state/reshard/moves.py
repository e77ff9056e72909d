"""Whether a map makes each element of the target of one element, and leaves none of the source behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeproof.specs.finding import Finding, Severity
from pipeproof.state.boxes import Box, Fault, first_held, is_outside, tiling_fault, whole_box
from pipeproof.state.mapping import Slab, StateMap
from pipeproof.state.reshard.codes import LOST_ON_THE_WAY, SEVERAL_PLACES
from pipeproof.state.reshard.sides import Side
from pipeproof.state.reshard.words import and_more, box_words
from pipeproof.verify.layouts.maps import NO_BIJECTION

_Question = tuple[str, tuple[int, ...], tuple[Box, ...]]


@dataclass(frozen=True, slots=True)
class _Answers:
    """What is asked of boxes, answered once for all tensors that are alike."""

    known: dict[_Question, Fault | None] = field(default_factory=dict)

    def ask(self, what: str, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Fault | None:
        """The first box of a tensor of which ``what`` is true: ``not once``, ``never`` or ``again``."""
        key = what, shape, boxes
        if key not in self.known:
            if what == "not once":
                self.known[key] = tiling_fault(shape, boxes)
            else:
                self.known[key] = first_held(shape, boxes, lambda times: times > 1 if what == "again" else times == 0)
        return self.known[key]


def moves(source: Side, state_map: StateMap, target: Side) -> Iterator[Finding]:
    """PP210 for tensors that are made of too little or too much, PP215 and PP216 for what is read never or twice."""
    answers = _Answers()
    made = [one for name in state_map.tensors if (one := _made_wrong(name, state_map, source, answers)) is not None]
    if made:
        message = f"{target.name}: {made[0]}{and_more(len(made) - 1, 'tensor')}"
        mend = "every element of a tensor is made of one element, or is said to be zero"
        yield Finding(NO_BIJECTION.code, Severity.ERROR, message, help=mend)
    yield from _read_wrong(source, state_map, answers)


def _made_wrong(name: str, state_map: StateMap, source: Side, answers: _Answers) -> str | None:
    """What is wrong with the slabs of a tensor, in words."""
    tensor = state_map.tensors[name]
    for slab in tensor.slabs:
        wrong = _slab_fault(slab, source)
        if wrong is not None:
            return f"`{name}` {box_words(slab.box, tensor.shape)} {wrong}"
    if len(tensor.slabs) == 1 and tensor.slabs[0].box == whole_box(tensor.shape):
        return None
    fault = answers.ask("not once", tensor.shape, tuple(slab.box for slab in tensor.slabs))
    if fault is None:
        return None
    where = box_words(fault.box, tensor.shape)
    if not fault.times:
        return f"`{name}` {where} is made of nothing"
    if fault.times == 1:
        return f"`{name}` has no {where}, and it is made"
    first, second = (tensor.slabs[number].source for number in fault.holders[:2])
    return f"`{name}` {where} is made {fault.times} times, of `{first}` and of `{second}`"


def _slab_fault(slab: Slab, source: Side) -> str | None:
    """Why a slab cannot be carried out; what its source lacks altogether is said elsewhere."""
    entry = None if slab.source is None else source.tensors.get(slab.source)
    if entry is None:
        return None
    box = slab.source_box
    if is_outside(box, entry.shape):
        return None  # said with the shapes
    seen = box if slab.permutation is None else box.permuted(slab.permutation)
    if seen.extents != slab.box.extents:
        return f"is made of as many as {list(seen.extents)} of `{slab.source}`"
    return None


def _read_wrong(source: Side, state_map: StateMap, answers: _Answers) -> Iterator[Finding]:
    readers: dict[str, list[tuple[Box, str]]] = {}
    for name, tensor in state_map.tensors.items():
        for slab in tensor.slabs:
            if slab.source is not None:
                readers.setdefault(slab.source, []).append((slab.source_box, name))
    lost, twice = list[str](), list[str]()
    for name, found in readers.items():
        entry = source.tensors.get(name)
        if entry is None or any(is_outside(box, entry.shape) for box, _ in found):
            continue  # said already
        shape, whole = entry.shape, whole_box(entry.shape)
        boxes = tuple(box for box, _ in found)
        if boxes == (whole,):
            continue
        never = answers.ask("never", shape, (*dict.fromkeys(boxes), *state_map.dropped.get(name, ())))
        if never is not None:
            lost.append(f"`{name}` {box_words(never.box, shape)}")
        again = None if name in state_map.copied else answers.ask("again", shape, boxes)
        if again is not None:
            to = " and ".join(dict.fromkeys(f"`{found[number][1]}`" for number in again.holders))
            twice.append(f"`{name}` {box_words(again.box, shape)}: {again.times} times, for {to}")
    if lost:
        message = f"{source.name}: nothing is made of {lost[0]}{and_more(len(lost) - 1, 'tensor')}"
        mend = "take the checkpoint and the plan of one model; what is left out on purpose is removed by name: "
        mend += "`NAME -> _` in an AOA file"
        yield Finding(LOST_ON_THE_WAY.code, Severity.ERROR, message, help=mend)
    if twice:
        message = f"{source.name}: several tensors are made of {twice[0]}{and_more(len(twice) - 1, 'tensor')}"
        mend = "see that these are copies on purpose, such as a head that is the embedding"
        yield Finding(SEVERAL_PLACES.code, Severity.WARNING, message, help=mend)
