"""Where Fleet's ``PipelineLayer`` cuts a list of layers, by the two methods that its ``seg_method`` has.

Fleet: ``SegmentLayers`` in
python/paddle/distributed/fleet/meta_parallel/parallel_layers/pp_layers.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise


def cut_behind(names: Sequence[str], is_counted: Sequence[bool], shares: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Parts with ``shares`` counted layers each, in order.

    Each part ends right behind its last counted layer; what comes before the
    first counted layer joins the first part, what comes behind the last one
    the last part. The shares are positive and add up to the counted layers.
    """
    places = [place for place, counted in enumerate(is_counted) if counted]
    assert sum(shares) == len(places)
    assert min(shares) > 0
    ends = [places[last - 1] + 1 for last in accumulate(shares)]
    return _between(names, [0, *ends[:-1], len(names)])


def even_shares(number: int, num_parts: int) -> list[int]:
    """``number`` shared out, the remainder of the division to the first parts, one each."""
    share, remainder = divmod(number, num_parts)
    return [share + (part < remainder) for part in range(num_parts)]


def uniform_cut(names: Sequence[str], num_parts: int) -> tuple[tuple[str, ...], ...]:
    """All layers counted, the remainder of the division to the last parts, one each: Fleet's ``uniform``."""
    return _between(names, [0, *accumulate(reversed(even_shares(len(names), num_parts)))])


def is_matched(pattern: str, class_name: str) -> bool:
    """Whether Fleet counts a layer of that class: the pattern is anywhere in its name, in any case."""
    return re.search(pattern, class_name, re.IGNORECASE) is not None


def _between(names: Sequence[str], bounds: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(names[first:end]) for first, end in pairwise(bounds))
