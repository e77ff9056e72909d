"""Split backward of any module: weight gradients of ``nn.Linear`` are computed by W, all other work by I.

Each ``nn.Linear`` runs on a graph of its own, cut off from its weight: I asks it for the gradient of its input, W for
those of its weight and bias. Both come from autograd's own formulas, so that their bits are those of a whole backward.
All other weights get their gradient in I, which keeps it aside; W adds it. What is no weight of the module, such as a
parameter of a loss function, gets it in I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeproof.exec.store.train_errors import PipelineError

Deferred = list[tuple[GradientEdge, torch.Tensor, nn.Linear]]
"""Products on their own graphs, with the gradients that arrived at their results."""


class LinearSplit:
    """The split backward of one stage's module."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._is_running = module, False
        self._weights = [weight for weight in module.parameters() if weight.requires_grad]
        self._deferred: Deferred | None = None
        """Products of the backward that runs; None outside of one, where a module may itself use autograd."""
        for part in _eager_modules(module):
            if type(part) is nn.Linear and _is_own_forward(part.__dict__.get("forward")):
                part.forward = partial(self._linear, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; outside of this its layers are as they were."""
        self._is_running = True
        try:
            return self._module(*args, **kwargs)
        finally:
            self._is_running = False

    def backward(self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Callable[[], None]:
        """Set the gradients of the inputs; return the rest of the backward, which adds those of weights."""
        deferred = self._deferred = []
        with gradients_aside(self._weights):
            try:
                torch.autograd.backward(roots, gradients)
            finally:
                self._deferred = None
            aside = [(weight, weight.grad) for weight in self._weights if weight.grad is not None]
        return partial(_accumulate, deferred, aside)

    def _linear(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """The layer's own result, on a graph that bypasses its weight where W can have it."""
        weight = module.weight
        plain = (
            torch.compiler.is_compiling()
            or not self._is_running
            or not torch.is_grad_enabled()
            or not x.requires_grad  # nothing of I would reach it
            or not weight.requires_grad
            or not isinstance(weight, nn.Parameter)
            or _is_recomputed()
        )
        if plain:
            return F.linear(x, weight, module.bias)
        output: torch.Tensor = _Product.apply(x, module, self._defer)
        return output

    def _defer(self, module: nn.Linear, edge: GradientEdge, gradient: torch.Tensor) -> None:
        if self._deferred is not None:
            self._deferred.append((edge, gradient, module))


def require_splittable(number: int, module: nn.Module, *, is_sharded: bool) -> None:
    """Refuse a stage that relies on what a backward in two parts does not do.

    Raises:
        PipelineError: names the feature, and ``split='whole'``.
    """
    if is_sharded:
        raise PipelineError(f"stage {number}: split='linear' with fully_shard is not supported: use split='whole'")
    for name, weight in module.named_parameters():
        if getattr(weight, "_post_accumulate_grad_hooks", None):
            raise PipelineError(
                f"stage {number}: `{name}` has a hook after the accumulation of its gradient, which split='linear' "
                "does not call: use split='whole'"
            )


def _is_own_forward(forward: Any) -> bool:
    """False for a layer whose ``forward`` the script replaced; True for one of another ``LinearSplit``."""
    return forward is None or getattr(getattr(forward, "func", None), "__func__", None) is LinearSplit._linear  # noqa: SLF001


def _accumulate(deferred: Deferred, aside: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Add the gradients of one micro-batch; a weight that is used several times is added up first."""
    total = {id(weight): (weight, gradient) for weight, gradient in aside}
    for edge, gradient, module in deferred:
        weights = [weight for weight in (module.weight, module.bias) if weight is not None and weight.requires_grad]
        for weight, part in zip(weights, torch.autograd.grad([edge], weights, [gradient]), strict=True):
            known = total.get(id(weight))
            total[id(weight)] = weight, part if known is None else known[1] + part
    deferred.clear()
    for weight, gradient in total.values():
        if weight.grad is not None:
            weight.grad.add_(gradient)
        else:
            weight.grad = gradient


@contextmanager
def gradients_aside(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put gradients aside for other backwards, and back again."""
    aside = [weight.grad for weight in weights]
    try:
        for weight in weights:
            weight.grad = None
        yield
    finally:
        for weight, gradient in zip(weights, aside, strict=True):
            weight.grad = gradient


class _Product(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """One use of an ``nn.Linear`` as a function of its input alone."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, module: nn.Linear, defer: Callable[[nn.Linear, GradientEdge, torch.Tensor], None]
    ) -> torch.Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            value = F.linear(leaf, module.weight, module.bias)
        # The edge has the graph without the memory of the result.
        ctx.leaf, ctx.edge, ctx.module, ctx.defer = leaf, get_gradient_edge(value), module, defer
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.defer(ctx.module, ctx.edge, gradient)
        again = torch.is_grad_enabled()  # of a module that differentiates with create_graph=True
        (of_input,) = torch.autograd.grad([ctx.edge], [ctx.leaf], [gradient], retain_graph=True, create_graph=again)
        return of_input, None, None


def _is_recomputed() -> bool:
    """True inside of activation checkpointing, which keeps saved tensors by hooks of its own."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # noqa: SLF001 - no public query
    return top is None or top(True) is not None  # noqa: FBT003 - positional in C++


def _eager_modules(module: nn.Module) -> list[nn.Module]:
    """The module and its parts that run eagerly: none inside of a compiled one."""
    if is_compiled(module):
        return []
    return [module, *(part for child in module.children() for part in _eager_modules(child))]


def is_compiled(module: nn.Module) -> bool:
    """True for a module that ``torch.compile`` wrapped, or whose call it replaced."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
