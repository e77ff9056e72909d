"""Whether both sides have the same tensors: names, shapes and types, the map between them being what it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from pipeproof.specs.finding import Finding, Severity
from pipeproof.state.index import TensorEntry
from pipeproof.state.mapping import StateMap, TensorMap
from pipeproof.state.reshard.codes import OTHER_SHAPES, OTHER_TENSORS
from pipeproof.state.reshard.sides import Side
from pipeproof.state.reshard.words import and_more, weight_name

_SHOWN = 3


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
    types = [one for name in both if (one := _type_fault(name, made[name], asked[name], source.tensors)) is not None]
    if types:
        message = f"{types[0]}{and_more(len(types) - 1, 'tensor')}"
        mend = "take the type that the source has, or write the cast: `NAME -> NAME, dtype='..'` in an AOA file"
        yield Finding(OTHER_SHAPES.code, Severity.ERROR, message, help=mend)


def _missing(names: list[str], surplus: Collection[str], source: Side, target: Side) -> Finding:
    shown = []
    for name in names[:_SHOWN]:
        near = get_close_matches(name, surplus, 1)
        shown.append(f"`{name}`" + (f" (near: `{near[0]}`)" if near else ""))
    what = "a tensor" if len(names) == 1 else f"{len(names)} tensors"
    more = and_more(len(names) - len(shown), "")
    message = f"{target.name} needs {what} that {source.name} does not have: {', '.join(shown)}{more}"
    mend = "take the checkpoint of the same model, or write an AOA file that says what they are made of"
    return Finding(OTHER_TENSORS.code, Severity.ERROR, message, help=mend)


def _surplus(names: list[str], source: Side, target: Side) -> Finding:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN]) + and_more(len(names) - _SHOWN, "")
    what = "a tensor" if len(names) == 1 else f"{len(names)} tensors"
    message = f"{source.name} has {what} that {target.name} does not ask for: {shown}"
    mend = "take the plan of the same model, or remove them by name: `NAME -> _` in an AOA file"
    return Finding(OTHER_TENSORS.code, Severity.ERROR, message, help=mend)


def _shapes(shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], target: Side) -> Finding:
    name, (made, asked) = next(iter(shapes.items()))
    more = and_more(len(shapes) - 1, "tensor")
    mend = "take the checkpoint of a model of these sizes"
    if all(weight_name(one) in ("embed.weight", "head.weight") for one in shapes):
        mend = "where the vocabulary is only padded to another size, say in both plans how many ids there are: "
        mend += "model.unpadded_vocab_size"
    message = f"`{name}` is {list(made)}, and {target.name} needs {list(asked)}{more}"
    return Finding(OTHER_SHAPES.code, Severity.ERROR, message, help=mend)


def _type_fault(name: str, made: TensorMap, asked: TensorEntry, source: Mapping[str, TensorEntry]) -> str | None:
    """The first slab whose elements do not come in the type that is asked for, in words."""
    for slab in made.slabs:
        entry = None if slab.source is None else source.get(slab.source)
        comes = slab.casts[-1] if slab.casts else (made.dtype if entry is None else entry.dtype)
        if comes != made.dtype or made.dtype != asked.dtype:
            return f"`{name}` comes as {comes}, and {asked.dtype} is needed"
    return None
