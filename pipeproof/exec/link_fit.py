"""The line through the times of messages: a latency, and a bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ROUNDS = 60
_LEAST_LOG = -40.0
"""Of a latency or a time per byte that is none."""
_LEAST_US = 1e-3
_LEAST_SHARE = 1e-3
"""Of the time of the largest message that its bytes have to take for a bandwidth to be seen."""


@dataclass(frozen=True, slots=True)
class LinkFit:
    """``latency_us`` are microseconds, ``bandwidth`` is in GB/s (10^9 bytes), neither negative.

    ``residual`` is by which share of its time the point that lies worst is off the line: 0.1 is a tenth.
    """

    latency_us: float
    bandwidth: float
    residual: float

    def time_us(self, num_bytes: int) -> float:
        """Of a message, by the line."""
        return self.latency_us + num_bytes / self.bandwidth / 1000


def fit_link(points: Sequence[tuple[int, float]]) -> LinkFit:
    """The line through (bytes, microseconds) that is least off by shares of times: twice counts as much as half.

    So the smallest messages say the latency and the largest the bandwidth. Where more bytes took no longer, all of
    the time of the largest message is for its bytes. Least squares of the logarithms, by Gauss and Newton's method
    on the logarithms of latency and time per byte, which keeps both above zero.
    """
    sizes = np.array([num_bytes for num_bytes, _ in points], dtype=float)
    times = np.maximum([time for _, time in points], _LEAST_US)
    line = np.log([times.min(), times[-1] / sizes[-1]])
    for _ in range(_ROUNDS):
        parts = np.exp(line) * np.stack([np.ones(len(points)), sizes], axis=1)
        by_line = parts.sum(axis=1)
        step = np.linalg.lstsq(parts / by_line[:, None], np.log(times / by_line), rcond=None)[0]
        line = np.maximum(line + np.clip(step, -1, 1), _LEAST_LOG)
    latency, per_byte = np.exp(line)
    if len(points) < 2 or per_byte * sizes[-1] < _LEAST_SHARE * times[-1]:
        latency, per_byte = 0.0, float(times[-1] / sizes[-1])
    rounded = LinkFit(round(float(latency), 3), _to_digits(1e-3 / float(per_byte)), 0.0)
    off = max(abs(rounded.time_us(int(n)) / t - 1) for n, t in zip(sizes, times, strict=True))
    return LinkFit(rounded.latency_us, rounded.bandwidth, round(float(off), 3))


def _to_digits(value: float) -> float:
    """Five digits of a number, however small."""
    return float(f"{value:.5g}")
