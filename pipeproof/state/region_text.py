"""Text for regions of tensors: rows and columns, and their meaning in the model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeproof.specs.model import ModelSpec
from pipeproof.state.regions import Region, whole_region

_NAMED = {1: ("elements",), 2: ("rows", "columns")}
_BLOCK = r"(?:layer|mtp)\.\d+"
_OWN_NAME = re.compile(
    rf"(?:optimizer/\w+/)?({_BLOCK}\.(?:attn|mlp|\w+_norm|\w+_streams|proj)\S*|(?:embed|head|norm)\.weight)"
)
_NUMBER_OF_EXPERT = re.compile(r"experts\.(\d+)(?!\d)")
_SHOWN = 3


def weight_name(name: str) -> str | None:
    """Return pipeproof's name of the weight that a tensor, or a moment, belongs to; None for other names."""
    match = _OWN_NAME.fullmatch(name)
    return None if match is None else match[1]


def number_of_expert(name: str, region: Region) -> int | None:
    """Return the expert that a region belongs to: by its name, or by its index in a tensor of all experts."""
    match = _NUMBER_OF_EXPERT.search(name)
    if match is not None:
        return int(match[1])
    return region.offsets[0] if "experts" in name and region.offsets else None


def range_text(region: Region, shape: Sequence[int]) -> str:
    """``rows 0..3, columns 64..95``, without dims that the region covers whole."""
    dims = [dim for dim, size in enumerate(shape) if (region.offsets[dim], region.extents[dim]) != (0, size)]
    if not dims:
        return "the whole of it"
    names = _NAMED.get(len(shape))
    if names is None:
        ranges = [f"{start}..{stop - 1}" for start, stop in zip(region.offsets, region.stops, strict=True)]
        return f"[{', '.join(ranges)}]"
    return ", ".join(f"{names[dim]} {region.offsets[dim]}..{region.stops[dim] - 1}" for dim in dims)


def and_more(number: int, what: str) -> str:
    """`` (and 3 more tensors)``; empty for zero."""
    return f" (and {number} more {what}{'s' if number > 1 else ''})" if number > 0 else ""


def counted(number: int, what: str) -> str:
    """``1 tensor``, ``1,200 tensors``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def tensor_range_text(name: str, region: Region, shape: Sequence[int], meaning: str | None = None) -> str:
    """``layer.3.attn.qkv.weight columns 64..95 (key of group 2)``: name, range unless all of it, and ``meaning``."""
    range_part = "" if region == whole_region(shape) else f" {range_text(region, shape)}"
    return f"{name}{range_part}" + (f" ({meaning})" if meaning else "")


def region_meaning(name: str, region: Region, model: ModelSpec) -> str | None:
    """Return the meaning in the model of a region of one of pipeproof's tensors; None if there is none to report.

    The fused ``qkv`` has, for each group of heads, the columns of its queries, of its key and of its value.
    """
    weight = weight_name(name)
    if weight is None or not region.offsets:
        return None
    last = region.offsets[-1], region.stops[-1]
    first = region.offsets[0], region.stops[0]
    if weight.endswith("attn.qkv.weight"):
        return _heads(*last, model)
    if weight == "embed.weight":
        return _ids(*first, model)
    if weight == "head.weight":
        return _ids(*last, model)
    if model.moe is None or ".mlp." not in weight:
        return None
    if ".mlp.experts." in weight:
        return _experts(*first, model.moe.num_experts)
    return _experts(*last, model.moe.num_experts) if ".mlp.router" in weight else None


def role_of_column(column: int, model: ModelSpec) -> tuple[str, int, int]:
    """Return query, key or value, the head (numbered by role) and the group of a column of the fused ``qkv``."""
    per_group = model.num_heads // model.kv_heads
    head, _ = divmod(column, model.size_of_head)
    group, inside = divmod(head, per_group + 2)
    if inside < per_group:
        return "query", group * per_group + inside, group
    return ("key" if inside == per_group else "value"), group, group


def _heads(start: int, stop: int, model: ModelSpec) -> str:
    size = model.size_of_head
    roles = list(dict.fromkeys(role_of_column(column, model) for column in (*range(start, stop, size), stop - 1)))
    words: list[str] = []
    while roles:
        kind, first, group = roles.pop(0)
        last = first
        while roles and kind == "query" and roles[0] == (kind, last + 1, group):
            last = roles.pop(0)[1]
        if kind != "query":
            words.append(f"{kind} of group {group}")
        else:
            words.append(f"{f'query {first}' if first == last else f'queries {first} to {last}'} of group {group}")
    return ", ".join(words) if len(words) <= _SHOWN else f"{words[0]} to {words[-1]}"


def _ids(start: int, stop: int, model: ModelSpec) -> str:
    ids = model.num_token_ids
    if start >= ids:
        return "padding"
    return f"ids {start}..{min(stop, ids) - 1}" + (" and padding" if stop > ids else "")


def _experts(start: int, stop: int, num_experts: int) -> str:
    named = f"expert {start}" if stop == start + 1 else f"experts {start} to {stop - 1}"
    return f"{named} (of {num_experts})"
