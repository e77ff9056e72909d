"""Curves of this machine's GPU for ``cost.analytic.table``, measured with PyTorch: products, attention, memory, host.

Collectives and eight-bit products keep the curves that are known of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property
from statistics import fmean, harmonic_mean, median
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from pipeproof.cost.device_tables import device_table
from pipeproof.cost.devices import DEVICES, Device
from pipeproof.specs.cost import DeviceName
from pipeproof.specs.cost_table import MAX_SIZE, AttentionCurve, CostTable, ProductCurve
from pipeproof.specs.load_plan import plan_from_dict

if TYPE_CHECKING:
    import torch

PRODUCTS = (
    (256, 256, 256), (512, 4096, 4096), (1024, 1024, 1024), (2048, 2048, 2048), (2048, 2048, 16384),
    (4096, 4096, 512), (4096, 4096, 4096), (4096, 512, 4096), (4096, 14336, 4096), (8192, 8192, 8192),
)  # fmt: skip
"""Sizes m, n and k of the timed products."""
_NUM_CALLS = 8
"""Calls that a GPU is timed with together: its clock is coarse where a call takes a few microseconds."""
KEYS = (2048, 4096, 8192)
"""Numbers of tokens of the timed attentions."""
_HEADS, _HEAD_SIZE = 32, 128
_ROW = 4096
_BLOCKS, _SMALL, _TOKENS = 4, 128, 64
"""Blocks of the timed host, their hidden size and tokens: so few that no device takes longer than the host."""
_BUSY, _NUM_BUSY = 8192, 12
"""Size and number of the square products before what is timed: the host has started it when they end, and the clock is
what power allows in a training."""


class UnknownDeviceError(Exception):
    """A GPU without a data sheet; the message has the remedy."""


def device_named(name: str) -> DeviceName:
    """Return the device of a data sheet in the name that a driver gives, such as ``NVIDIA H100 80GB HBM3``.

    Raises:
        UnknownDeviceError: there is none.
    """
    parts = name.lower().replace("-", " ").split()
    for device in get_args(DeviceName):
        if device in parts:
            known: DeviceName = device
            return known
    raise UnknownDeviceError(
        f"pipeproof has no data sheet of {name}, whose peaks the shares of a table refer to; give cost.analytic the "
        f"nearest of {', '.join(get_args(DeviceName))} with efficiencies of your own"
    )


def measure_costs(
    place: torch.device, name: DeviceName, *, products: Sequence[tuple[int, int, int]] = PRODUCTS,
    keys: Sequence[int] = KEYS, rows: int = 2**16, seconds: float = 1.0,
) -> CostTable:  # fmt: skip
    """Measure the device ``place`` and express its times as shares of the data sheet of ``name``.

    Args:
        place: a GPU, or the CPU.
        name: the data sheet.
        products: sizes of products.
        keys: numbers of tokens of attention.
        rows: rows of 4,096 elements that memory is measured with.
        seconds: time for which products first warm the device.
    """
    import torch

    sheet, clock = DEVICES[name], _Clock(torch, place)
    clock.warm(seconds, max(products, key=lambda size: size[0] * size[1] * size[2]))
    known = device_table(name)
    others = () if known is None else tuple(curve for curve in known.products if curve.dtype != "bfloat16")
    kept = "" if known is None else "; collectives and narrower products: " + known.source
    return CostTable(
        source=f"measured with PyTorch {torch.__version__} on {clock.name}{kept}",
        products=(product_curve([(size, clock.product_us(*size)) for size in products], sheet.bfloat16), *others),
        attention=_attention(clock, sheet, keys),
        memory_efficiency=min(1.0, harmonic_mean(clock.memory_rates(rows)) / (sheet.memory * 1000)),
        host_us=clock.block_us() / float(block_operations()),
        elementwise_us=clock.smallest_us(),
        collectives=() if known is None else known.collectives,
    )


def product_curve(times: Sequence[tuple[tuple[int, int, int], float]], peak: float) -> ProductCurve:
    """Fit the curve of ``device_tables`` to times in microseconds, on a device that is warm, by least squares.

    The time c (m n + spare) (k + inner) + start is linear in c, c inner, c spare and the rest. Negative terms are left
    out, the most negative first; c is kept.
    """
    sizes = np.array([size for size, _ in times], dtype=float)
    measured = np.array([us for _, us in times])
    m, n, k = sizes.T
    columns = np.stack([m * n * k, m * n, k, np.ones_like(k)], axis=1) / measured[:, None]
    kept = [0, 1, 2, 3]
    while True:
        values = np.linalg.lstsq(columns[:, kept], np.ones_like(measured), rcond=None)[0]
        parts = columns[:, kept].mean(axis=0) * values  # of the time
        if parts.min() >= 0 and parts[0] > 0:
            break
        if parts[0] > 0:
            del kept[int(np.argmin(parts))]
        else:  # another term has taken the place of the work itself
            del kept[1 + int(np.argmax(parts[1:]))]
    c, inner, spare, rest = (dict(zip(kept, values.tolist(), strict=True)).get(i, 0.0) for i in range(4))
    return ProductCurve(
        dtype="bfloat16",
        efficiency=min(1.0, 2 / (c * peak * 1e6)),
        spare_elements=min(spare / c, MAX_SIZE),
        spare_inner=min(inner / c, MAX_SIZE),
        slowdown=0.0,
        start_us=max(0.0, rest - inner * spare / c),
    )


def _attention(clock: _Clock, sheet: Device, keys: Sequence[int]) -> AttentionCurve:
    """Shares by 1 / share = (1 + spare / keys) / largest share of the forward; the backward by its longest sequence."""
    forward, backward = [], []
    for number in keys:
        forward_us, backward_us = clock.attention_us(number)
        flops = 4 * (number * (number + 1) / 2) * _HEADS * _HEAD_SIZE
        forward.append(flops / (forward_us * sheet.bfloat16 * 1e6))
        backward.append(2.5 * flops / (backward_us * sheet.bfloat16 * 1e6))
    slope, largest = np.polyfit(1 / np.array(keys), 1 / np.array(forward), 1)
    spare = max(0.0, float(slope / largest)) if largest > 0 else 0.0
    last = 1 + spare / keys[-1]
    return AttentionCurve(
        forward=min(1.0, forward[-1] * last), backward=min(1.0, backward[-1] * last), spare_keys=spare
    )


def block_operations() -> Fraction:
    """Operations of one block, forward and backward, as ``cost.analytic.host_us`` counts them."""
    from pipeproof.cost.analytic_times import AnalyticCosts

    def host_us(num_layers: int) -> Fraction:
        model = {
            "num_layers": num_layers, "hidden_size": _SMALL, "num_heads": 1, "ffn_size": 4 * _SMALL,
            "vocab_size": _TOKENS, "seq_length": _TOKENS,
        }  # fmt: skip
        analytic = {"device": "h100", "host_us": 1}
        spec = plan_from_dict({
            "pipeproof": 1, "model": {"kind": "gpt", **model}, "topology": {"pp": 1},
            "schedule": {"kind": "gpipe", "num_micro_batches": 1, "micro_batch_size": 1},
            "cost": {"analytic": analytic},
        }).spec  # fmt: skip
        assert spec.cost.analytic is not None
        (stage,) = AnalyticCosts(spec, spec.cost.analytic).stages
        return sum((phase.host_us for phase in stage.values()), Fraction())

    return host_us(2) - host_us(1)


class _Clock:
    """Times of calls on one device, in microseconds: medians of five.

    A GPU is busy while the host starts the calls, so that their time is the device's alone.
    """

    def __init__(self, framework: Any, place: torch.device) -> None:
        self._torch, self._place = framework, place
        self._is_gpu = place.type == "cuda"
        self.name: str = framework.cuda.get_device_name(place) if self._is_gpu else "the CPU"

    def product_us(self, m: int, n: int, k: int) -> float:
        left, right = self._random(m, k), self._random(k, n)
        return self._us(lambda: left @ right)

    def attention_us(self, keys: int) -> tuple[float, float]:
        """Forward and backward."""
        attend = self._torch.nn.functional.scaled_dot_product_attention
        q, k, v = (self._random(1, _HEADS, keys, _HEAD_SIZE).requires_grad_() for _ in range(3))
        mixed = attend(q, k, v, is_causal=True)
        gradient = self._torch.ones_like(mixed)

        def backward() -> None:
            self._torch.autograd.grad(mixed, (q, k, v), gradient, retain_graph=True)

        return self._us(lambda: attend(q, k, v, is_causal=True)), self._us(backward)

    def memory_rates(self, rows: int) -> list[float]:
        """Bytes per microsecond of a copy, of an addition and of a norm."""
        size = 2.0 * rows * _ROW
        return [number * size / self._us(call) for number, call in self._passes(rows)]

    def smallest_us(self) -> float:
        """Time from the start of a small copy, addition or norm to that of the next, in the mean."""
        return fmean(self._us(call) for _, call in self._passes(1))

    def _passes(self, rows: int) -> list[tuple[int, Callable[[], object]]]:
        """A copy, an addition and a norm, each with the number of times that it reads or writes ``rows``."""
        left, right = self._random(rows, _ROW), self._random(rows, _ROW)
        norm = self._torch.nn.functional.layer_norm
        return [(2, left.clone), (3, lambda: left + right), (2, lambda: norm(left, (_ROW,)))]

    def block_us(self) -> float:
        """Time of the host for one block of a GPT, forward and backward, with gradients added to those that are there.

        It waits for nothing but the end of the blocks.
        """
        F, shapes = self._torch.nn.functional, (3, 1, 4, 4, 4)  # noqa: N806 - its usual name
        blocks = [
            [self._random(size * _SMALL, _SMALL).requires_grad_() for size in shapes]
            + [self._random(_SMALL).requires_grad_() for _ in range(2)]
            for _ in range(_BLOCKS)
        ]
        cos, sin = self._random(2, _TOKENS, _SMALL // 2)

        def turned(x: Any) -> Any:
            left, right = x.chunk(2, dim=-1)
            return self._torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

        def step() -> None:
            x = tokens
            for qkv, out, gate, up, down, first, second in blocks:
                q, k, v = F.linear(F.rms_norm(x, (_SMALL,), first), qkv).view(1, _TOKENS, 3, 1, _SMALL).unbind(2)
                q, k, v = (part.transpose(1, 2) for part in (q, k, v))
                mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
                x = x + F.linear(mixed.transpose(1, 2).reshape(x.shape), out)
                normed = F.rms_norm(x, (_SMALL,), second)
                x = x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down.view(_SMALL, -1))
            x.sum().backward()

        tokens = self._random(1, _TOKENS, _SMALL)
        step()  # loads kernels and makes the gradients
        times = []
        for _ in range(5):
            self._synchronize()
            start = time.perf_counter()
            step()
            self._synchronize()
            times.append(time.perf_counter() - start)
        return median(times) * 1e6 / _BLOCKS

    def warm(self, seconds: float, size: tuple[int, int, int]) -> None:
        """Keep the device busy until its clock has fallen to what its power allows."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.product_us(*size)

    def _random(self, *shape: int) -> Any:
        return self._torch.randn(*shape, device=self._place, dtype=self._torch.bfloat16)

    def _synchronize(self) -> None:
        if self._is_gpu:
            self._torch.cuda.synchronize(self._place)

    def _us(self, call: Callable[[], object]) -> float:
        self._timed(call)  # loads kernels
        return median(self._timed(call) for _ in range(5))

    def _timed(self, call: Callable[[], object]) -> float:
        if not self._is_gpu:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._synchronize()
        for _ in range(_NUM_BUSY):
            self._torch.mm(self._busy, self._busy)
        begin.record()
        for _ in range(_NUM_CALLS):
            call()
        end.record()
        end.synchronize()
        elapsed: float = begin.elapsed_time(end) * 1000
        return elapsed / _NUM_CALLS

    @cached_property
    def _busy(self) -> Any:
        """A factor of products whose own time is not in the result."""
        return self._random(_BUSY, _BUSY)
