"""Consecutive ranges of blocks for the stages of a model that is cut, and the weights that several stages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from torch import nn


def stage_ranges(num_blocks: int, sizes: int | Sequence[int], *, argument: str, may_be_empty: bool) -> list[range]:
    """The block numbers of each stage: ``sizes`` is the number of stages, or the number of blocks of each.

    A number of stages makes sizes that differ by one at most, the larger ones first. ``argument`` is the name of the
    sizes in messages. ``may_be_empty`` allows stages without blocks: they hold something else, or pass their input on.

    Raises:
        ValueError: There are no stages, fewer blocks than stages, or sizes that do not fit the number of blocks.
    """
    if isinstance(sizes, int):
        if not 1 <= sizes <= num_blocks:
            hint = f" ({argument} can leave stages without blocks)" if may_be_empty else ""
            raise ValueError(f"num_stages must be from 1 to {num_blocks}, the number of blocks, found {sizes}{hint}")
        sizes = [num_blocks // sizes + (number < num_blocks % sizes) for number in range(sizes)]
    if sum(sizes) != num_blocks:
        raise ValueError(f"{argument} {list(sizes)} adds up to {sum(sizes)}, and the model has {num_blocks} blocks")
    for number, size in enumerate(sizes):
        if size < (0 if may_be_empty else 1):
            least = "0 or more" if may_be_empty else "at least one"
            raise ValueError(f"{argument} {list(sizes)} leaves stage {number} {size} blocks: give it {least}")
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def chosen_sizes(num_stages: int, sizes: Sequence[int] | None, *, argument: str) -> int | Sequence[int]:
    """``sizes`` where they are given, else ``num_stages``.

    Raises:
        ValueError: There are more or fewer sizes than stages.
    """
    if sizes is None:
        return num_stages
    if len(sizes) != num_stages:
        raise ValueError(f"{argument} has {len(sizes)} sizes, and num_stages is {num_stages}: give one for each stage")
    return sizes


def shared_weights(stages: Sequence[nn.Module]) -> list[dict[int, str]]:
    """The parameters that are the same object in several stages: their names in ``named_parameters`` of each stage."""
    return shared_objects({number: dict(stage.named_parameters()) for number, stage in enumerate(stages)})


def shared_objects(named: Mapping[int, Mapping[str, nn.Parameter]]) -> list[dict[int, str]]:
    """The parameters that are one object in several stages, as names by stage; ``named`` has those of each stage."""
    names: dict[int, dict[int, str]] = {}
    for number, parameters in named.items():
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), {})[number] = name
    return [by_stage for by_stage in names.values() if len(by_stage) > 1]
