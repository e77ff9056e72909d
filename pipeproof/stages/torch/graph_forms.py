"""The form in which a compiled graph takes its tensors: shape, strides and type.

Code of Inductor reads the memory of its inputs in the form of the example that it was compiled for. Another graph's
output can have another form: PyTorch 2.11 returns the sum of a fused reduction without the dims that it kept, and may
pad or permute the memory of what no user sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


def in_form(
    run: Callable[[list[Any]], Sequence[Any]], graph: fx.GraphModule, example: Sequence[Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """The call of a graph, with inputs brought into the form of ``example``.

    Raises:
        ValueError: an input has another number of elements, or its shape has another order of dims.
    """
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    forms = [
        (n, _Form(names[n], tuple(map(int, x.shape)), tuple(map(int, x.stride())), x.dtype))
        for n, x in enumerate(example)
        if isinstance(x, torch.Tensor) and x.layout == torch.strided
    ]

    def call(inputs: list[Any]) -> Sequence[Any]:
        for n, form in forms:
            value = inputs[n]
            if value.stride() != form.stride or value.shape != form.shape or value.dtype != form.dtype:
                inputs[n] = form.of(value)
        return run(inputs)

    return call


@dataclass(frozen=True, slots=True)
class _Form:
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """The tensor itself if only strides of dims of size 1 differ, a view if only the dims do, or a copy."""
        shape = tuple(value.shape)
        if shape != self.shape:
            is_flat = len(shape) == 1 and value.numel() == torch.Size(self.shape).numel()
            if not is_flat and _without_ones(shape, shape) != _without_ones(self.shape, self.shape):
                raise ValueError(
                    f"`{self.name}` came as {list(shape)}, and the graph was compiled for {list(self.shape)}"
                )
            value = value.reshape(self.shape)
        has_stride = _without_ones(self.shape, value.stride()) == _without_ones(self.shape, self.stride)
        if has_stride and value.dtype == self.dtype:
            return value
        is_repeated = [stride == 0 for stride in self.stride]
        each = value[tuple(slice(0, 1) if repeated else slice(None) for repeated in is_repeated)]
        copy = torch.empty_strided(each.shape, self.stride, dtype=self.dtype, device=value.device)
        return copy.copy_(each).expand(self.shape)


def _without_ones(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Those of ``sizes`` whose dim has more than one element."""
    return [size for length, size in zip(shape, sizes, strict=True) if length != 1]
