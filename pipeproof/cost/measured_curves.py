"""Times of products, attention and collectives by the curves of a ``CostTable``, exact and monotone in every size.

A product [m, k] x [k, n] takes ``start_us`` and 2 (m n + spare elements) (k + spare inner) FLOPs at its share of peak.
Tiles of the result are spread over the processors of the chip: in the mean the last wave lacks the spare elements (tile
and wave quantisation; NVIDIA, Matrix Multiplication Background User's Guide). A tile fills and drains its pipeline in
the time of the spare steps along k. Products of milliseconds run at a lower clock, at the limit of power: their time
grows by up to ``slowdown``, by half of it where the peak would take ``_POWER_MS``.

A collective that moves x bytes through each rank takes latency + ramp x / (x + ramp bytes) + x / bandwidth, with the
bytes of a ring (``network_times``), or (n - 1) / n of the data for an all-to-all.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache

from pipeproof.specs.cost_table import AttentionCurve, CollectiveCurve, ProductCurve
from pipeproof.stages.describe.op_work import ProductShape


@lru_cache(maxsize=4096)
def exact(value: float) -> Fraction:
    """The decimal that a number prints as: 0.7 is 7/10."""
    return Fraction(repr(value))


_POWER_MS = 1
_RAGGED_ROWS = 64
"""Rows that the last tile of an expert lacks in the mean: half of a tile of 128."""


def product_us(curve: ProductCurve, shape: ProductShape, peak: float, *, is_hot: bool = True) -> Fraction:
    """Microseconds of products at ``peak`` TFLOP/s, without a bound by memory.

    In a training the chip ``is_hot``: it never leaves the limit of power, so that all products have the clock that a
    product alone has after milliseconds.
    """
    rows, inner, columns, number, ragged = shape
    flops_per_us = exact(peak) * 10**6
    padded = number * (rows + (_RAGGED_ROWS if ragged else 0)) * columns + exact(curve.spare_elements)
    flops = 2 * number * rows * inner * columns
    time = 2 * padded * (inner + exact(curve.spare_inner)) / (flops_per_us * exact(curve.efficiency))
    share = 1 if is_hot else flops / (flops + flops_per_us * 1000 * _POWER_MS)
    return exact(curve.start_us) + time * (1 + exact(curve.slowdown) * share)


def attention_share(curve: AttentionCurve, keys: Fraction, *, is_forward: bool) -> Fraction:
    """Share of peak of flash attention to ``keys`` keys."""
    return exact(curve.forward if is_forward else curve.backward) * keys / (keys + exact(curve.spare_keys))


def moved_us(curve: CollectiveCurve, num_bytes: Fraction) -> Fraction:
    """Microseconds of a collective that moves ``num_bytes`` through each rank."""
    ramp = exact(curve.ramp_us) * num_bytes / (num_bytes + exact(curve.ramp_bytes))
    return exact(curve.latency_us) + ramp + num_bytes / (exact(curve.bandwidth) * 1000)
