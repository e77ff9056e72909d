"""Text and JSON for a map: the sources of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import filterfalse
from typing import Any

from pipeproof.state.aoa.expand import by_form
from pipeproof.state.aoa.tensor_families import is_state
from pipeproof.state.region_text import counted
from pipeproof.state.regions import Region
from pipeproof.state.tensor_map import RegionCopy, StateMap, identity_tensor

_MAX_COPIES = 8


def map_lines(state_map: StateMap, shapes: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield the sources of each changed tensor.

    Only the first of tensors that differ by numbers. ``shapes`` are the source's.

    Unchanged tensors are counted, and so are optimizer states, which follow their weights.
    """
    changed = {
        name
        for name, tensor in state_map.tensors.items()
        if not is_state(name) and tensor.copies != identity_tensor(name, tensor.dtype, tensor.shape).copies
    }
    num_states = sum(map(is_state, state_map.tensors))
    for similar in by_form(sorted(changed, key=_by_number)).values():
        tensor = state_map.tensors[similar[0]]
        more = _and_more(len(similar) - 1, "   ")
        head = f"{similar[0]}  {tensor.dtype} {list(tensor.shape)}"
        if len(tensor.copies) == 1:
            yield f"{head} = {_source_text(tensor.copies[0], shapes)}{more}"
            continue
        yield f"{head}{more}"
        for copy in tensor.copies[:_MAX_COPIES]:
            yield f"    {_range_text(copy.region, tensor.shape)} = {_source_text(copy, shapes)}"
        if len(tensor.copies) > _MAX_COPIES:
            yield f"    and {len(tensor.copies) - _MAX_COPIES} more; `--format json` has them all"
    for similar in by_form(sorted(filterfalse(is_state, state_map.removed), key=_by_number)).values():
        yield f"{similar[0]}{_and_more(len(similar) - 1, ' ')} {'is' if len(similar) == 1 else 'are'} left out"
    num_kept = len(state_map.tensors) - len(changed) - num_states
    yield f"{counted(num_kept, 'weight')} {'stays as it is' if num_kept == 1 else 'stay as they are'}"
    if num_states:
        they_go = "goes as its weight does" if num_states == 1 else "go as their weights do"
        yield f"{counted(num_states, 'tensor')} of the optimizer {they_go}"


def map_to_json(state_map: StateMap) -> dict[str, Any]:
    """Return every region copy of every tensor."""
    return {
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "slabs": [_copy_to_json(copy) for copy in tensor.copies],
            }
            for name, tensor in state_map.tensors.items()
        },
        "removed": sorted(state_map.removed),
    }


def _copy_to_json(copy: RegionCopy) -> dict[str, Any]:
    return {
        "offsets": copy.region.offsets,
        "extents": copy.region.extents,
        "source": copy.source,
        "source_offsets": copy.source_region.offsets,
        "permutation": copy.permutation,
        "casts": copy.casts,
    }


def _and_more(number: int, before: str) -> str:
    differ = "differs" if number == 1 else "differ"
    return f"{before}(and {number} more that {differ} by numbers)" if number else ""


def _by_number(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


def _source_text(copy: RegionCopy, shapes: dict[str, tuple[int, ...]]) -> str:
    if copy.source is None:
        return "zeros"
    text = f"{copy.source}{_range_text(copy.source_region, shapes[copy.source], leave_out_whole=True)}"
    if copy.permutation is not None:
        turned = copy.permutation == tuple(reversed(range(len(copy.permutation))))
        text += "^T" if turned else f" permuted {list(copy.permutation)}"
    return text + "".join(f" as {dtype}" for dtype in copy.casts)


def _range_text(region: Region, shape: tuple[int, ...], *, leave_out_whole: bool = False) -> str:
    """``[:, 0:16]``."""
    if leave_out_whole and region.extents == shape:
        return ""
    ranges = (
        ":" if extent == length else f"{start}:{start + extent}"
        for start, extent, length in zip(region.offsets, region.extents, shape, strict=True)
    )
    return f"[{', '.join(ranges)}]"
