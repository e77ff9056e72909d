"""What a map makes of what, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeproof.state.aoa.optimizer import is_state
from pipeproof.state.aoa.patterns import by_form
from pipeproof.state.boxes import Box
from pipeproof.state.mapping import Slab, StateMap, TensorMap
from pipeproof.state.reshard.words import counted

_MOST_SLABS = 8


def map_lines(state_map: StateMap, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Which tensor is made of what; of those that differ by numbers alone, the first. ``shapes`` are the source's.

    What stays as it is, is counted, and so are states of the optimizer, which go the ways of their weights.
    """
    changed = {name for name, tensor in state_map.tensors.items() if not is_state(name) and not _stays(name, tensor)}
    num_states = sum(map(is_state, state_map.tensors))
    for alike in by_form(sorted(changed, key=_by_number)).values():
        tensor = state_map.tensors[alike[0]]
        more = _and_more(len(alike) - 1, "   ")
        head = f"{alike[0]}  {tensor.dtype} {list(tensor.shape)}"
        if len(tensor.slabs) == 1:
            yield f"{head} = {_made_of(tensor.slabs[0], shapes)}{more}"
            continue
        yield f"{head}{more}"
        for slab in tensor.slabs[:_MOST_SLABS]:
            yield f"    {_place(slab.box, tensor.shape)} = {_made_of(slab, shapes)}"
        if len(tensor.slabs) > _MOST_SLABS:
            yield f"    and {len(tensor.slabs) - _MOST_SLABS} more; `--format json` has them all"
    for alike in by_form(sorted(filter(_is_weight, state_map.removed), key=_by_number)).values():
        yield f"{alike[0]}{_and_more(len(alike) - 1, ' ')} {'is' if len(alike) == 1 else 'are'} left out"
    num_kept = len(state_map.tensors) - len(changed) - num_states
    yield f"{counted(num_kept, 'weight')} {'stays as it is' if num_kept == 1 else 'stay as they are'}"
    if num_states:
        they_go = "goes as its weight does" if num_states == 1 else "go as their weights do"
        yield f"{counted(num_states, 'tensor')} of the optimizer {they_go}"


def map_to_json(state_map: StateMap) -> dict[str, Any]:
    """Every slab of every tensor."""
    return {
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "slabs": [_slab_to_json(slab) for slab in tensor.slabs],
            }
            for name, tensor in state_map.tensors.items()
        },
        "removed": sorted(state_map.removed),
    }


def _slab_to_json(slab: Slab) -> dict[str, Any]:
    return {
        "offsets": slab.box.offsets,
        "extents": slab.box.extents,
        "source": slab.source,
        "source_offsets": slab.source_box.offsets,
        "permutation": slab.permutation,
        "casts": slab.casts,
    }


def _stays(name: str, tensor: TensorMap) -> bool:
    slab = tensor.slabs[0] if tensor.slabs else None
    kept = slab is not None and len(tensor.slabs) == 1 and (slab.source, slab.source_box) == (name, slab.box)
    return kept and slab is not None and slab.permutation is None and not slab.casts


def _is_weight(name: str) -> bool:
    return not is_state(name)


def _and_more(number: int, before: str) -> str:
    differ = "differs" if number == 1 else "differ"
    return f"{before}(and {number} more that {differ} by numbers)" if number else ""


def _by_number(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


def _made_of(slab: Slab, shapes: dict[str, tuple[int, ...]]) -> str:
    if slab.source is None:
        return "zeros"
    text = f"{slab.source}{_place(slab.source_box, shapes[slab.source], leave_out_whole=True)}"
    if slab.permutation is not None:
        turned = slab.permutation == tuple(reversed(range(len(slab.permutation))))
        text += "^T" if turned else f" permuted {list(slab.permutation)}"
    return text + "".join(f" as {dtype}" for dtype in slab.casts)


def _place(box: Box, shape: tuple[int, ...], *, leave_out_whole: bool = False) -> str:
    """``[:, 0:16]``."""
    if leave_out_whole and box.extents == shape:
        return ""
    ranges = (
        ":" if extent == length else f"{start}:{start + extent}"
        for start, extent, length in zip(box.offsets, box.extents, shape, strict=True)
    )
    return f"[{', '.join(ranges)}]"
