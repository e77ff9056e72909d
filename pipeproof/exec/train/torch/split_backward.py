"""Split backward of any module: W computes only weight gradients of ``nn.Linear``, or the stage runs as graphs.

``LinearSplit``: each ``nn.Linear`` runs on a graph of its own, cut off from its weight: I asks it for the gradient of
its input, W for the gradients of its weight and bias. Both come from autograd's own formulas, with the bits of a whole
backward. For all other weights I computes the gradient and keeps it aside; W adds it. Tensors outside of the module,
such as a parameter of a loss function, get their gradient in I.

``GraphSplit``: Dynamo captures the stage, the last one with its loss function, as one graph, and guards its assumptions
about Python values; F, I and W are parts of it (``stages.torch.graph_capture``). A plain B is I, then W. With ``eager``
they have the bits of eager mode. With ``inductor`` they are compiled, and W adds matrix products inside of the product.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeproof.exec.store.train_errors import PipelineError
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
        """Call the module; its layers are only changed during the call."""
        self._is_running = True
        try:
            return self._module(*args, **kwargs)
        finally:
            self._is_running = False

    def backward(self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Callable[[], None]:
        """Set the gradients of the inputs; return the rest of the backward, which adds the weight gradients."""
        deferred = self._deferred = []
        with gradients_aside(self._weights):
            try:
                torch.autograd.backward(roots, gradients)
            finally:
                self._deferred = None
            aside = [(weight, weight.grad) for weight in self._weights if weight.grad is not None]
        return partial(_accumulate, deferred, aside)

    def _linear(self, module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """The layer's own result, on a graph that bypasses its weight if W can compute the weight gradient."""
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
    """Refuse a stage that relies on a feature that a backward in two parts does not have.

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
            previous = total.get(id(weight))
            total[id(weight)] = weight, part if previous is None else previous[1] + part
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
        """For each graph. There is one graph for each length of micro-batches."""

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
        """The output of the stage, or the result of its loss function.

        Raises:
            NotCapturedError: nothing ran.
            GraphOperationError: an operation raised.
        """
        try:
            return self._call(tuple(args), dict(kwargs), target, dict(loss_kwargs))
        except _CAPTURE_ERRORS as error:
            raise NotCapturedError(_reason(error)) from error

    def backward(self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> Callable[[], None]:
        """Set the gradients of the inputs; return W, which adds the weight gradients."""
        self._deferred = []
        torch.autograd.backward(roots, gradients)
        return partial(_run_all, self._deferred)

    def capture(self, graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        """The callable of Dynamo's capture, for these shapes."""
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


def _add(addend: Addend, weight: nn.Parameter, graph_outputs: Sequence[torch.Tensor], *, can_own: bool) -> None:
    """Add one addend to ``grad`` of a weight; ``can_own`` is True if nothing else holds its memory.

    A new ``grad`` has the layout of its weight, as autograd's has.
    """
    values = values_of(addend, graph_outputs)
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
    """A copy of a gradient, with the type and memory layout of its weight, like autograd's first gradient."""
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
    """The output of a stage, in which tensors that get no gradient are detached."""
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
    tables = [getattr(part, name) for part in module.modules() for name in _HOOKS]
    tables += [getattr(weight, name, None) for weight in module.parameters() for name in _WEIGHT_HOOKS]
    return [hook for table in tables if table for hook in table.values()]


_WEIGHT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _require_capturable(module: nn.Module) -> None:
    """Refuse features that Dynamo would capture without their effect."""
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
