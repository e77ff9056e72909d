"""Measured times of known devices as fitted curves, exact and monotone in every size.

Products and collectives of H100, H200 and B200 are fits to the tables of ai-dynamo/aiconfigurator (systems data,
Apache-2.0; TensorRT-LLM 1.3.0rc20, NCCL 2.29.2) by ``benchmarks/fit_device_tables.py``, which prints these rows and
their residuals: in the median 3 to 6 % of products from 256 x 256 x 256 on, and 2 to 8 % of collectives. Other devices
have the curves of a measured one, which ``source`` names. ``docs/costs.md`` has the sources of all other figures.

A product [m, k] x [k, n] takes ``start_us`` and 2 (m n + spare elements) (k + spare inner) FLOPs at its share of peak.
Tiles of the result are spread over the processors of the chip: in the mean the last wave lacks the spare elements (tile
and wave quantisation; NVIDIA, Matrix Multiplication Background User's Guide). A tile fills and drains its pipeline in
the time of the spare steps along k. Products of milliseconds run at a lower clock, at the limit of power: their time
grows by up to ``slowdown``, by half of it where the peak would take ``_POWER_MS``.

A collective that moves x bytes through each rank takes latency + ramp x / (x + ramp bytes) + x / bandwidth, with the
bytes of a ring (``network_times``), or (n - 1) / n of the data for an all-to-all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache

from pipeproof.specs.cost import DeviceName
from pipeproof.specs.cost_table import (
    AttentionCurve,
    CollectiveCurve,
    CollectiveType,
    CostTable,
    ProductCurve,
    ProductType,
)
from pipeproof.stages.describe.op_work import ProductShape

_TABLES = "tables of ai-dynamo/aiconfigurator (Apache-2.0), fitted"

_PRODUCTS: Mapping[str, tuple[tuple[ProductType, float, float, float, float, float], ...]] = {
    "h100": (
        ("bfloat16", 0.847, 2.73e5, 172, 0.13, 2.8),
        ("float8", 0.798, 0, 396, 0.09, 11.7),
        ("float8_block", 0.702, 6.33e5, 680, 0.11, 3.3),
    ),
    # at the clock of its peak: an A100 keeps 1,410 MHz
    "a100": (("bfloat16", 0.847, 2.73e5, 172, 0, 2.8),),
    "h200": (
        ("bfloat16", 0.849, 1.92e5, 149, 0.16, 2.9),
        ("float8", 0.792, 1.30e5, 332, 0.07, 11.7),
        ("float8_block", 0.725, 5.66e5, 713, 0.17, 3.2),
    ),
    "b200": (
        ("bfloat16", 0.733, 3.98e5, 117, 0.17, 2.4),
        ("float8", 0.742, 6.34e5, 329, 0.18, 15.1),
        ("float8_block", 0.842, 1.16e6, 717, 0.64, 5.5),
        ("float4", 0.631, 3.34e6, 1024, 0.52, 5.7),
    ),
    # fitted to trainings of dense models: 1,400 W, and no slowdown
    "gb300": (
        ("bfloat16", 0.80, 3.98e5, 117, 0, 2.4),
        ("float8", 0.80, 6.34e5, 329, 0, 15.1),
        ("float8_block", 0.842, 1.16e6, 717, 0, 5.5),
        ("float4", 0.631, 3.34e6, 1024, 0, 5.7),
    ),
}  # fmt: skip
"""(type, efficiency, spare elements, spare inner, slowdown, start in us), as in ``ProductCurve``."""

_COLLECTIVES: Mapping[str, tuple[tuple[CollectiveType, int, float, float, float, float], ...]] = {
    "a100": (
        ("ALL_REDUCE", 2, 38.0, 62.7, 7.19e7, 197), ("ALL_REDUCE", 4, 38.0, 42.1, 1.67e7, 220),
        ("ALL_REDUCE", 8, 68.0, 122.0, 1.90e8, 233),
    ),
    "h100": (
        ("ALL_GATHER", 2, 5.6, 26.1, 2.79e6, 261), ("ALL_GATHER", 4, 7.6, 33.3, 5.40e6, 326),
        ("ALL_GATHER", 8, 11.0, 16.6, 2.54e6, 328),
        ("ALL_REDUCE", 2, 6.5, 27.5, 4.23e6, 313), ("ALL_REDUCE", 4, 10.0, 28.9, 8.28e6, 353),
        ("ALL_REDUCE", 8, 16.5, 73.4, 2.04e7, 469),
        ("ALL_TO_ALL", 2, 6.1, 8.2, 2.44e4, 270), ("ALL_TO_ALL", 4, 6.9, 7.6, 7.55e4, 280),
        ("ALL_TO_ALL", 8, 8.1, 6.3, 2.18e5, 293),
        ("REDUCE_SCATTER", 2, 5.7, 18.2, 2.59e6, 239), ("REDUCE_SCATTER", 4, 7.4, 19.5, 4.22e6, 309),
        ("REDUCE_SCATTER", 8, 10.7, 30.4, 1.37e7, 347),
    ),
    "h200": (
        ("ALL_GATHER", 2, 5.5, 23.8, 2.60e6, 262), ("ALL_GATHER", 4, 7.7, 28.7, 5.06e6, 327),
        ("ALL_GATHER", 8, 12.3, 20.2, 4.59e6, 339),
        ("ALL_REDUCE", 2, 6.5, 22.5, 3.72e6, 312), ("ALL_REDUCE", 4, 10.1, 24.4, 7.81e6, 352),
        ("ALL_REDUCE", 8, 17.1, 75.7, 2.08e7, 487),
        ("ALL_TO_ALL", 2, 6.2, 7.0, 1.89e4, 278), ("ALL_TO_ALL", 4, 6.6, 6.8, 5.18e4, 299),
        ("ALL_TO_ALL", 8, 8.2, 5.7, 1.19e5, 292),
        ("REDUCE_SCATTER", 2, 5.5, 15.2, 2.05e6, 240), ("REDUCE_SCATTER", 4, 7.4, 20.7, 4.86e6, 317),
        ("REDUCE_SCATTER", 8, 11.6, 28.7, 1.26e7, 350),
    ),
    "b200": (
        ("ALL_GATHER", 2, 9.2, 14.6, 2.04e6, 462), ("ALL_GATHER", 4, 11.8, 32.9, 8.26e6, 635),
        ("ALL_GATHER", 8, 17.7, 80.0, 2.72e7, 762),
        ("ALL_REDUCE", 2, 10.4, 22.4, 6.50e6, 563), ("ALL_REDUCE", 4, 15.5, 61.4, 2.45e7, 707),
        ("ALL_REDUCE", 8, 26.1, 156.5, 7.61e7, 832),
        ("ALL_TO_ALL", 2, 8.8, 7.6, 2.50e4, 328), ("ALL_TO_ALL", 4, 9.9, 8.3, 7.98e4, 479),
        ("ALL_TO_ALL", 8, 11.2, 9.2, 1.89e5, 532),
        ("REDUCE_SCATTER", 2, 9.1, 12.3, 2.37e6, 423), ("REDUCE_SCATTER", 4, 12.0, 29.0, 8.17e6, 610),
        ("REDUCE_SCATTER", 8, 16.8, 75.8, 2.65e7, 747),
    ),
}  # fmt: skip
"""(kind, ranks, latency in us, ramp in us, bytes of the ramp, bandwidth in GB/s), as in ``CollectiveCurve``.

Bandwidth is for the bytes of a ring. An all-reduce of 8 ranks exceeds the links' bandwidth: switches add (NVLS)."""

_HOPPER = AttentionCurve(forward=0.6, backward=0.49, spare_keys=256)
"""H200 at 8,192 tokens: 0.58 and 0.50 of peak, and 0.52 and 0.46 (``docs/costs.md``); H800 at 4,096 in the DeepSeek
profile (deepseek-ai/profile-data): 0.56 and 0.43."""

_GRADIENT_SLOWDOWN = {"h100": 0.05, "h200": 0.05}
"""For products in ``float8`` for gradients: the tables are for inference, with fast accumulation, which training has
only in forward. Six products of a block of Llama 3.1 405B on one H100 take 4.90 and 4.65 ms
(``benchmarks/gpu/product_sums.py``)."""

_ELEMENTWISE_US = 4.5
"""H800 in the DeepSeek profile: 130 elementwise kernels of at most one block for each processor take 2.5 us in the
mean, and 4.5 us to the start of the next kernel of the stream (``benchmarks/fit_smallest_kernel.py``)."""


@dataclass(frozen=True)
class _Source:
    """The curves of a device: sources of products and of collectives, the ratio of link speeds, and the rest.

    ``measured`` names the collectives that were measured on the device itself.
    """

    text: str
    products: str
    collectives: str
    memory_efficiency: float
    host_us: float
    link_ratio: float = 1.0
    measured: str = ""

    def table(self) -> CostTable:
        """The table; collectives that were measured on the device replace others of their kind."""
        own = _COLLECTIVES.get(self.measured, ())
        kinds = {kind for kind, *_ in own}
        others = [
            (*row[:-1], row[-1] * self.link_ratio) for row in _COLLECTIVES[self.collectives] if row[0] not in kinds
        ]
        products = [
            ProductCurve(dtype=dtype, efficiency=share, spare_elements=elements, spare_inner=inner, slowdown=slower,
                         start_us=start,
                         gradient_slowdown=_GRADIENT_SLOWDOWN.get(self.products, 0) if dtype == "float8" else 0)
            for dtype, share, elements, inner, slower, start in _PRODUCTS[self.products]
        ]  # fmt: skip
        collectives = [
            CollectiveCurve(kind=kind, num_ranks=ranks, latency_us=latency, ramp_us=ramp, ramp_bytes=size,
                            bandwidth=bandwidth)
            for kind, ranks, latency, ramp, size, bandwidth in (*own, *others)
        ]  # fmt: skip
        return CostTable(
            source=self.text,
            products=tuple(products),
            attention=_HOPPER,
            memory_efficiency=self.memory_efficiency,
            host_us=self.host_us,
            elementwise_us=_ELEMENTWISE_US,
            collectives=tuple(collectives),
        )


_SOURCES: Mapping[DeviceName, _Source] = {
    "a100": _Source(f"H100 in {_TABLES}, at a constant clock; all-reduces of VIA-Research/vTrain (MIT), fitted; other "
                    "collectives by the ratio of links", "a100", "h100", 0.6, 64, 300 / 450, measured="a100"),
    "h100": _Source(_TABLES, "h100", "h100", 0.55, 105),
    "h200": _Source(_TABLES, "h200", "h200", 0.55, 105),
    "h800": _Source(f"H100 in {_TABLES}; collectives by the ratio of links", "h100", "h100", 0.55, 105, 200 / 450),
    "b200": _Source(_TABLES, "b200", "b200", 0.4, 140),
    "gb200": _Source(f"B200 in {_TABLES}", "b200", "b200", 0.4, 140),
    "b300": _Source(f"B200 in {_TABLES}, products as gb300", "gb300", "b200", 0.4, 140),
    "gb300": _Source(f"B200 in {_TABLES}, at a constant clock", "gb300", "b200", 0.4, 140),
}  # fmt: skip
"""By device. Shares of memory bandwidth and times of the host are fits: ``docs/costs.md`` has their sources."""


@cache
def device_table(name: DeviceName) -> CostTable | None:
    """The table of a device; None without measurements: its shares are then flat."""
    source = _SOURCES.get(name)
    return None if source is None else source.table()


@lru_cache(maxsize=4096)
def exact(value: float) -> Fraction:
    """The decimal that a number prints as: 0.7 is 7/10."""
    return Fraction(repr(value))


_POWER_MS = 1
_RAGGED_ROWS = 64
"""Mean number of rows that the last tile of an expert lacks: half of a tile of 128."""


def product_us(curve: ProductCurve, shape: ProductShape, peak: float, *, is_hot: bool = True) -> Fraction:
    """Microseconds of products at ``peak`` TFLOP/s, without a bound by memory.

    In a training the chip ``is_hot``: it never leaves the limit of power, and all products have the clock that a
    product alone reaches after milliseconds.
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
