"""FLOPs of matrix products and attention, counted while PyTorch runs them; tensors need no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Tensors with values; a ``DTensor`` asks for shapes with others."""


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    rows, heads, num_queries, head_size = query.shape
    return int(2 * rows * heads * num_queries * key.shape[-2] * (head_size + value.shape[-1]))


def _attention_backward(
    _: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any
) -> int:
    rows, heads, num_queries, head_size = query.shape
    return int(2 * rows * heads * num_queries * key.shape[-2] * (3 * head_size + 2 * value.shape[-1]))


_FUSED = [
    f"_scaled_dot_product_{name}"
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
]
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    **{getattr(torch.ops.aten, name): _attention for name in _FUSED},
    **{getattr(torch.ops.aten, f"{name}_backward"): _attention_backward for name in _FUSED},
}
"""FLOPs of an operation by its arguments. PyTorch 2.11 has none for attention on processors or with grouped heads."""


class ProductCounter(TorchDispatchMode):  # type: ignore[misc]  # without types in PyTorch
    """Counter of FLOPs.

    It has the formulas of ``torch.utils.flop_counter``, in which attention counts all pairs of positions. A
    recomputation counts. Operations without a formula (kernels of other libraries) count as nothing. Of a ``DTensor``
    the local part counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        """FLOPs so far."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of PyTorch and count it; a tensor that wraps others issues its own on them."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = _FORMULAS.get(getattr(func, "overloadpacket", func))
        if formula is not None and all(kind in _PLAIN for kind in types):
            self.total += formula(*args, **kwargs, out_val=result)
        return result

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count everything inside of this block; compiled modules run uncompiled in it."""
        with torch.compiler.set_stance("force_eager"), self:
            yield
