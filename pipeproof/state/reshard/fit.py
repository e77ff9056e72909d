"""Whether both sides have the same tensors: names, shapes and types, the map between them being what it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from pipeproof.specs.finding import Finding, Severity
from pipeproof.state.boxes import Box, is_outside
from pipeproof.state.index import TensorEntry
from pipeproof.state.mapping import StateMap, TensorMap
from pipeproof.state.reshard.cast import CAST_DTYPES
from pipeproof.state.reshard.codes import OTHER_SHAPES, OTHER_TENSORS
from pipeproof.state.reshard.padding import DIM_OF_IDS
from pipeproof.state.reshard.sides import Side
from pipeproof.state.reshard.words import and_more, weight_name

_SHOWN = 3
_OPTIMIZER = "optimizer/"
_SIZES = "take the checkpoint and the plan of one model"


def fit(source: Side, state_map: StateMap, target: Side) -> Iterator[Finding]:
    """PP213 for names that only one side has, PP214 for tensors that both have otherwise."""
    made, asked = state_map.tensors, target.tensors
    read = {slab.source for tensor in made.values() for slab in tensor.slabs if slab.source is not None}
    unread = [name for name in source.tensors if name not in read and name not in state_map.removed]
    missing = [name for name in asked if name not in made] + sorted(read - source.tensors.keys())
    surplus = list(dict.fromkeys(name for name in (*unread, *made) if name not in asked))
    if missing:
        yield _missing(missing, surplus, source, target)
    if surplus:
        yield _surplus(surplus, source, target)
    both = [name for name in made if name in asked]
    shapes = {name: (made[name].shape, asked[name].shape) for name in both if made[name].shape != asked[name].shape}
    if shapes:
        yield _shapes(shapes, target)
    sizes = _other_sizes(state_map, source.tensors)
    if sizes:
        name, needed = next(iter(sizes.items()))
        message = f"`{name}` of {source.name} is {list(source.tensors[name].shape)}, and {target.name} needs it as "
        message += f"{list(needed)}{and_more(len(sizes) - 1, 'tensor')}"
        yield Finding(OTHER_SHAPES.code, Severity.ERROR, message, help=_SIZES)
    types = [one for name in both if (one := _type_fault(name, made[name], asked[name], source.tensors)) is not None]
    if types:
        message = f"{types[0]}{and_more(len(types) - 1, 'tensor')}"
        mend = "take the type that the source has, or write the cast: `NAME -> NAME, dtype='..'` in an AOA file; "
        mend += f"cast are {', '.join(CAST_DTYPES)}"
        yield Finding(OTHER_SHAPES.code, Severity.ERROR, message, help=mend)


def _missing(names: list[str], surplus: Collection[str], source: Side, target: Side) -> Finding:
    shown = []
    for name in names[:_SHOWN]:
        alike = [one for one in surplus if one.startswith(_OPTIMIZER) == name.startswith(_OPTIMIZER)]
        near = get_close_matches(name, alike, 1)
        shown.append(f"`{name}`" + (f" (near: `{near[0]}`)" if near else ""))
    what = "a tensor" if len(names) == 1 else f"{len(names)} tensors"
    message = f"{target.name} needs {what} that {source.name} does not have: {_listed(shown, len(names))}"
    mend = "take the checkpoint of the same model; where it has other names, say which (`--names CONVENTION`), or what "
    mend += "its tensors become (`--aoa FILE`)"
    return Finding(OTHER_TENSORS.code, Severity.ERROR, message, help=mend)


def _surplus(names: list[str], source: Side, target: Side) -> Finding:
    shown = _listed([f"`{name}`" for name in names[:_SHOWN]], len(names))
    what = "a tensor" if len(names) == 1 else f"{len(names)} tensors"
    message = f"{source.name} has {what} that {target.name} does not ask for: {shown}"
    mend = "take the plan of the same model, or remove them by name: `NAME -> _` in an AOA file"
    return Finding(OTHER_TENSORS.code, Severity.ERROR, message, help=mend)


def _listed(shown: list[str], number: int) -> str:
    return ", ".join(shown) + (f" and {number - len(shown)} more" if number > len(shown) else "")


def _shapes(shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], target: Side) -> Finding:
    name, (made, asked) = next(iter(shapes.items()))
    more = and_more(len(shapes) - 1, "tensor")
    mend = _SIZES
    if all(_only_ids_differ(one, *both) for one, both in shapes.items()):
        mend = "where the vocabulary is only padded to another size, say in both plans how many ids there are: "
        mend += "model.unpadded_vocab_size"
    message = f"`{name}` is {list(made)}, and {target.name} needs {list(asked)}{more}"
    return Finding(OTHER_SHAPES.code, Severity.ERROR, message, help=mend)


def _only_ids_differ(name: str, made: tuple[int, ...], asked: tuple[int, ...]) -> bool:
    dim = DIM_OF_IDS.get(weight_name(name) or "")
    differ = [place for place, (one, other) in enumerate(zip(made, asked, strict=False)) if one != other]
    return len(made) == len(asked) and dim is not None and differ == [dim]


def _other_sizes(state_map: StateMap, source: Mapping[str, TensorEntry]) -> dict[str, tuple[int, ...]]:
    """By name the shape that a tensor of the source has to have at least, where something is read that is not there."""
    boxes: dict[str, list[Box]] = {}
    for tensor in state_map.tensors.values():
        for slab in tensor.slabs:
            if slab.source is not None and slab.source in source:
                boxes.setdefault(slab.source, []).append(slab.source_box)
    return {
        name: tuple(map(max, zip(*(box.stops for box in read), strict=False)))
        for name, read in boxes.items()
        if any(is_outside(box, source[name].shape) for box in read)
    }


def _type_fault(name: str, made: TensorMap, asked: TensorEntry, source: Mapping[str, TensorEntry]) -> str | None:
    """The first slab whose elements do not come in the type that is asked for, in words."""
    for slab in made.slabs:
        entry = None if slab.source is None else source.get(slab.source)
        comes = slab.casts[-1] if slab.casts else (made.dtype if entry is None else entry.dtype)
        types = (*(() if entry is None else (entry.dtype,)), *slab.casts)
        if slab.casts and not set(types) <= set(CAST_DTYPES):
            return f"`{slab.source}` is {types[0]}, which is not cast to {slab.casts[-1]}"
        if comes != made.dtype or made.dtype != asked.dtype:
            return f"`{name}` comes as {comes}, and {asked.dtype} is needed"
    return None
