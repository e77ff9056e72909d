"""Statistics of measured times: from samples in nanoseconds to the spreads of a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, quantiles
from typing import TypeVar

from pipeproof.specs.profile_file import SizedSpread, Spread

_Spread = TypeVar("_Spread", bound=Spread)


def spread_of(form: type[_Spread], times_ns: Sequence[int], /, **others: object) -> _Spread | None:
    """Quartiles and mean in microseconds, to the nanosecond; None without samples."""
    if not times_ns:
        return None
    quartiles = quantiles(times_ns, n=4, method="inclusive") if len(times_ns) > 1 else [times_ns[0]] * 3
    q1, median, q3 = (round(time) / 1000 for time in quartiles)
    figures = {"q1_us": q1, "median_us": median, "q3_us": q3, "mean_us": round(fmean(times_ns)) / 1000}
    return form.model_validate({**others, "count": len(times_ns), **figures})


def by_size(samples: Iterable[tuple[int, int]]) -> tuple[SizedSpread, ...]:
    """Return the spread of each size in samples of (bytes, nanoseconds)."""
    times: dict[int, list[int]] = defaultdict(list)
    for num_bytes, time_ns in samples:
        times[num_bytes].append(time_ns)
    spreads = (spread_of(SizedSpread, of_size, bytes=size) for size, of_size in sorted(times.items()))
    return tuple(spread for spread in spreads if spread is not None)
