"""F, I and W of a stage as three graphs, of any module that ``torch.compile`` captures as one.

Dynamo captures the stage, the last one with its loss function, and guards what it assumed about Python. The rest is
in ``stages.torch.graph_capture``. A plain B is I, then W.

With ``eager`` the graphs have the bits of eager mode. With ``inductor`` they are compiled, and W adds matrix products
inside of the product.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

from pipeproof.exec.train.torch.step_loss import detached_metrics
from pipeproof.stages.torch.backward_graphs import Addend
from pipeproof.stages.torch.graph_capture import (
    Adder,
    Compiler,
    KeptBytes,
    NotCapturedError,
    add_factors,
    captured_graphs,
    values_of,
)

_numbers = itertools.count()


class GraphSplit:
    """The graphs of one stage. ``loss_fn`` is called on the output and the target; None for what returns its output.

    The outputs ``unused`` get no gradient.
    """

    def __init__(
        self, module: nn.Module, loss_fn: Callable[..., Any] | None, compiler: Compiler, unused: Sequence[int] = ()
    ) -> None:
        self._module, self._loss_fn, self._compiler, self.unused = module, loss_fn, compiler, frozenset(unused)
        self._hooks: list[Any] | None = None
        self._deferred: list[Callable[[], None]] = []
        self.kept: list[KeptBytes] = []
        """Of each graph. There is one for each length of micro-batches."""

    def begin(self) -> None:
        """Begin a step: forget graphs that were captured with other hooks, which no guard looks at.

        Raises:
            NotCapturedError: the stage has a feature that graphs would leave out.
        """
        hooks = _hooks(self._module)
        if hooks == self._hooks:
            return
        _require_capturable(self._module)
        self._hooks, self.kept = hooks, []
        self._call = torch.compile(
            _entry(self._module, self._loss_fn, self.unused), backend=partial(_captured, weakref.ref(self)),
            fullgraph=True, dynamic=False,
        )  # fmt: skip

    def forward(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any = None, loss_kwargs: Mapping[str, Any] = {},
    ) -> Any:  # fmt: skip
        """The output of the stage, or what its loss function returns.

        Raises:
            NotCapturedError: nothing ran.
            GraphOperationError: an operation raised.
        """
        try:
            return self._call(tuple(args), dict(kwargs), target, dict(loss_kwargs))
        except _CAPTURE_ERRORS as error:
            raise NotCapturedError(_reason(error)) from error

    def backward(self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Callable[[], None]:
        """Set the gradients of the inputs; return W, which adds those of weights."""
        self._deferred = []
        torch.autograd.backward(roots, gradients)
        return partial(_run_all, self._deferred)

    def capture(self, graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        """The callable of what Dynamo captured, for these shapes."""
        add, own = partial(_adder, can_own=self._compiler == "eager"), weakref.ref(self)
        run, kept = captured_graphs(
            graph, example, self._compiler, lambda work: _alive(own).defer(work), add,
            in_product=self._compiler == "inductor",
        )  # fmt: skip
        self.kept.append(kept)
        return run

    def defer(self, work: Callable[[], None]) -> None:
        """Leave work of a backward to its W."""
        self._deferred.append(work)


def _captured(own: weakref.ref[GraphSplit], graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
    return _alive(own).capture(graph, example)


def _alive(own: weakref.ref[GraphSplit]) -> GraphSplit:
    """The split, one of whose calls is under way. Dynamo keeps backends and graphs for ever: they do not hold it."""
    split = own()
    assert split is not None
    return split


def _adder(addend: Addend, *, can_own: bool) -> Adder:
    return partial(_add, addend, can_own=can_own and addend.is_fresh)


def _add(addend: Addend, weight: nn.Parameter, found: Sequence[torch.Tensor], *, can_own: bool) -> None:
    """Add one addend to ``grad`` of a weight; ``can_own`` is True if nothing else holds its memory.

    A new ``grad`` has the layout of its weight, as autograd's has.
    """
    values = values_of(addend, found)
    if len(values) == 1:
        value = values[0]
        if weight.grad is not None:
            weight.grad.add_(value)
        elif can_own and value.dtype == weight.dtype and (value.is_sparse or value.stride() == weight.stride()):
            weight.grad = value
        else:
            weight.grad = _own_gradient(weight, value)
        return
    left, right = values
    if weight.grad is None:
        if left.dtype == weight.dtype:
            weight.grad = torch.matmul(left, right, out=torch.empty_like(weight))
            return
        weight.grad = torch.zeros_like(weight)
    add_factors(weight.grad, left, right)


def _own_gradient(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient, with the type and memory layout of its weight, as autograd's first one has."""
    return gradient.to(weight.dtype, copy=True) if gradient.is_sparse else torch.empty_like(weight).copy_(gradient)


def _run_all(works: list[Callable[[], None]]) -> None:
    with torch.no_grad():
        for work in works:
            work()
    works.clear()


def _entry(module: nn.Module, loss_fn: Callable[..., Any] | None, unused: AbstractSet[int]) -> Callable[..., Any]:
    """The function that is captured; its code is its own, as Dynamo keeps and counts graphs by code."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, loss_kwargs: dict[str, Any]) -> Any:
        output = module(*args, **kwargs)
        if unused:
            output = _detached(output, unused)
        return output if loss_fn is None else detached_metrics(loss_fn(output, target, **loss_kwargs))

    code = run.__code__.replace(co_name=f"stage_graph_{next(_numbers)}")
    return FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)


def _detached(output: Any, positions: AbstractSet[int]) -> Any:
    """The output of a stage, with those of its tensors detached that get no gradient."""
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {key: x.detach() if n in positions else x for n, (key, x) in enumerate(output.items())}
    leaves = [x.detach() if n in positions else x for n, x in enumerate(output)]
    return tuple(leaves) if isinstance(output, tuple) else leaves


_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def _hooks(module: nn.Module) -> list[Any]:
    """All hooks of modules and parameters."""
    tables = [getattr(part, name) for part in module.modules() for name in _HOOKS]
    tables += [getattr(weight, name, None) for weight in module.parameters() for name in _WEIGHT_HOOKS]
    return [hook for table in tables if table for hook in table.values()]


_WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _require_capturable(module: nn.Module) -> None:
    """Refuse what Dynamo would capture without its effect.

    Raises:
        NotCapturedError: names the feature.
    """
    if torch._dynamo.config.disable:  # noqa: SLF001 - the name of the setting
        raise NotCapturedError("torch.compile is disabled (TORCHDYNAMO_DISABLE)")
    for name, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:  # noqa: SLF001 - no public query
            raise NotCapturedError(f"module `{name}` has a backward hook")
    for name, weight in module.named_parameters():
        if any(getattr(weight, hooks, None) for hooks in _WEIGHT_HOOKS):
            raise NotCapturedError(f"`{name}` has a hook on its gradient")
        if type(weight) not in (nn.Parameter, torch.Tensor):
            raise NotCapturedError(f"`{name}` is a {type(weight).__name__}")


_dynamo = torch._dynamo.exc  # noqa: SLF001 - its errors have no other name
_CAPTURE_ERRORS = (_dynamo.TorchDynamoException, _dynamo.FailOnRecompileLimitHit)


def _reason(error: BaseException) -> str:
    """The first line of why a capture failed."""
    inner = getattr(error, "inner_exception", None) or error
    if isinstance(inner, _dynamo.FailOnRecompileLimitHit) and inner.__cause__ is not None:
        inner = inner.__cause__  # it names the limit
    if isinstance(inner, NotCapturedError):
        return str(inner)
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return f"{type(inner).__name__}: {lines[0] if lines else ''}"
