"""Python code that graphs call: collectives, and parts of a stage that run operation by operation.

A call is one operation of a graph. Each call returns a token that the next call of its order takes, so no compiler
changes their order, joins equal calls, or leaves out one that others follow. Partitioners keep what a call returns,
and repeat none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _ForceDispatchKeyGuard,
)
from torch.utils.checkpoint import CheckpointPolicy

from pipeproof.stages.common.experts import Used

Tensor: TypeAlias = torch.Tensor

_LIBRARY = torch.library.Library("pipeproof", "DEF")
_SCHEMA = "(Tensor[] inputs, Tensor? after, int number) -> Tensor[]"
_NAMES = ORDERED, DEFERRED = "ordered_call", "deferred_call"
"""Names of the operations: calls of F and I, and calls of W."""


class _Call:
    """A call of one graph: what runs with its first inputs, and what it returns of fake ones.

    ``take`` gets its other inputs before.
    """

    def __init__(
        self, num_inputs: int, run: Callable[..., Sequence[Tensor]], like: Callable[..., Sequence[Tensor]]
    ) -> None:
        self.num_inputs, self.run, self.like = num_inputs, run, like
        self.take: Callable[[Sequence[Tensor]], None] | None = None


_CALLS: WeakValueDictionary[int, _Call] = WeakValueDictionary()
_numbers = itertools.count()


def _run(inputs: Sequence[Tensor], after: Tensor | None, number: int) -> list[Tensor]:
    call = _CALLS[number]
    if call.take is not None:
        call.take(inputs[call.num_inputs :])
    return [*call.run(*inputs[: call.num_inputs]), inputs[0].new_empty(0)]


def _fake(inputs: Sequence[Tensor], after: Tensor | None, number: int) -> list[Tensor]:
    call = _CALLS[number]
    return [*call.like(*inputs[: call.num_inputs]), inputs[0].new_empty(0)]


for _name in _NAMES:
    _LIBRARY.define(_name + _SCHEMA)
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pipeproof::{_name}", _fake, lib=_LIBRARY)


def is_ordered_call(node: fx.Node) -> bool:
    """Return True for a call of F or I."""
    return getattr(node.target, "_opname", None) == ORDERED


def number_of(call: fx.Node) -> int:
    """Return the number of a call."""
    number: int = call.args[2]
    return number


def give_also(call: fx.Node, values: Sequence[fx.Node]) -> None:
    """Give more inputs to a call of a graph, which do not change what it returns."""
    inputs, *rest = call.args
    call.args = ([*inputs, *values], *rest)
    if _TRACED in call.meta:  # Inductor goes through these side by side with the inputs
        (examples, *others), named = call.meta[_TRACED]
        call.meta[_TRACED] = ([*examples, *(node.meta["val"] for node in values)], *others), named


_TRACED = "eager_input_vals"
"""PyTorch's key for the inputs with which an operation was traced, of which Inductor keeps the strides."""


def take_at(number: int, take: Callable[[Sequence[Tensor]], None]) -> None:
    """Have ``take`` called with the values of ``give_also``, before the call itself runs."""
    _CALLS[number].take = take


class GraphCalls:
    """The calls of one stage's graphs, which live as long as this object."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._last: dict[str, Tensor] = {}
        self._gradient: Tensor | None = None
        self.is_tracing = False
        """True while graphs are made: then collectives are calls."""

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Make graphs."""
        self.is_tracing = True
        try:
            yield
        finally:
            self.is_tracing = False
            self._last.clear()

    def begin(self) -> None:
        """Begin a trace: its first call follows none."""
        self._last.clear()

    @contextmanager
    def deferred(self, gradient: Tensor) -> Iterator[None]:
        """Leave the calls that are traced within the context to W. They wait for ``gradient``, which W reads."""
        self._gradient = gradient
        try:
            yield
        finally:
            self._gradient = None

    def call(
        self, run: Callable[..., Sequence[Tensor]], like: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """The results of ``run``, which may not be its inputs, in the graph that is traced.

        ``like`` returns fake results for fake inputs.
        """
        self._calls.append(call := _Call(len(inputs), run, like))
        _CALLS[number := next(_numbers)] = call
        order, given = (ORDERED, [*inputs]) if self._gradient is None else (DEFERRED, [*inputs, self._gradient])
        with _saved():
            found: list[Tensor] = getattr(torch.ops.pipeproof, order)(given, self._last.get(order), number)
        self._last[order] = found.pop()
        return found


@contextmanager
def _saved() -> Iterator[None]:
    """Have partitioners keep what is traced within the context for the backward, or what follows from it."""
    meta = fx.traceback.get_current_meta()
    before = meta.get("recompute")
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        if before is None:
            del meta["recompute"]
        else:
            meta["recompute"] = before


class GraphCollectives:
    """The collectives of a stage's layers, which are calls of the graph that is traced.

    ``sizes`` are the numbers of ranks by axis. ``collectives`` are those of ``stages.common``, of all axes.
    """

    def __init__(self, calls: GraphCalls, collectives: Any, sizes: dict[str, int]) -> None:
        self._calls, self._collectives, self._sizes = calls, collectives, sizes

    def all_reduce(self, tensor: Tensor, *, label: str, reduction: str = "sum") -> Tensor:
        """Implement ``TensorParallelCollectives.all_reduce``."""

        def run(own: Tensor) -> Sequence[Tensor]:
            return [self._collectives.all_reduce(own, label=label, reduction=reduction)]

        (result,) = self._issue(run, [tensor], [tensor.shape])
        return result

    def all_gather(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """Implement ``TensorParallelCollectives.all_gather``, and that of the other axes."""

        def run(own: Tensor) -> Sequence[Tensor]:
            return [self._collectives.all_gather(own, dim, label=label, axis=axis)]

        (result,) = self._issue(run, [tensor], [_resized(tensor, dim, tensor.shape[dim] * self._sizes[axis])])
        return result

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """Implement ``TensorParallelCollectives.reduce_scatter``, and that of the other axes."""

        def run(own: Tensor) -> Sequence[Tensor]:
            return [self._collectives.reduce_scatter(own, dim, label=label, axis=axis)]

        (result,) = self._issue(run, [tensor], [_resized(tensor, dim, tensor.shape[dim] // self._sizes[axis])])
        return result

    def all_gather_each(self, tensors: Sequence[Tensor], *, labels: Sequence[str], axis: str) -> Sequence[Tensor]:
        """Implement ``ExpertCollectives.all_gather_each``."""

        def run(*own: Tensor) -> Sequence[Tensor]:
            gathered: Sequence[Tensor] = self._collectives.all_gather_each(own, labels=labels, axis=axis)
            return gathered

        return self._issue(run, tensors, [_resized(x, 0, len(x) * self._sizes[axis]) for x in tensors])

    def reduce_scatter_each(self, tensors: Sequence[Tensor], *, labels: Sequence[str], axis: str) -> Sequence[Tensor]:
        """Implement ``ExpertCollectives.reduce_scatter_each``."""

        def run(*own: Tensor) -> Sequence[Tensor]:
            parts: Sequence[Tensor] = self._collectives.reduce_scatter_each(own, labels=labels, axis=axis)
            return parts

        return self._issue(run, tensors, [_resized(x, 0, len(x) // self._sizes[axis]) for x in tensors])

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str) -> Tensor:
        """Implement ``ExpertCollectives.all_to_all``; the host knows the numbers of rows, so it is in no graph."""
        result: Tensor = self._collectives.all_to_all(tensor, send, receive, label=label)
        return result

    def announce(
        self, counts: Tensor, sizes: Sequence[int], use: Callable[[Tensor], Used], *, label: str
    ) -> Callable[[], Used]:
        """Implement ``ExpertCollectives.announce``; the host reads the counts, so it is in no graph."""
        announced: Callable[[], Used] = self._collectives.announce(counts, sizes, use, label=label)
        return announced

    def _issue(
        self, run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Sequence[Tensor]:
        def contiguous(*own: Tensor) -> Sequence[Tensor]:
            return run(*(each.contiguous() for each in own))

        def like(*own: Tensor) -> Sequence[Tensor]:
            return [each.new_empty(shape) for each, shape in zip(own, shapes, strict=True)]

        return self._calls.call(contiguous, like, tensors) if self._calls.is_tracing else run(*tensors)


def _resized(tensor: Tensor, dim: int, size: int) -> list[int]:
    shape = list(tensor.shape)
    shape[dim] = size
    return shape


class Island:
    """A part of a stage that runs operation by operation inside of its graphs.

    The host may read values in it, and its shapes inside may change. Its weights add their gradients as
    ``SplitWeights`` does. ``compute`` takes a tensor and returns one of the same shape.
    """

    def __init__(self, calls: GraphCalls, compute: Callable[[Tensor], Tensor]) -> None:
        self._calls, self._compute = calls, compute
        self._forwards: dict[int, tuple[Tensor, Tensor]] = {}
        self._numbers = itertools.count()
        self._ticket: Tensor | None = None

    def forward(self, activation: Tensor) -> Sequence[Tensor]:
        """The output, in the graph that is traced."""
        output, self._ticket = self._calls.call(self._run_forward, _with_ticket, [activation])
        return (output,)

    def backward(self, gradient: Tensor) -> Sequence[Tensor]:
        """The gradient of the input, in the graph that is traced."""
        assert self._ticket is not None, "a backward is traced after its forward"
        return self._calls.call(
            self._run_backward, lambda given, _: [torch.empty_like(given)], [gradient, self._ticket]
        )

    def _run_forward(self, activation: Tensor) -> Sequence[Tensor]:
        # The part keeps its input: a copy, because a compiler reuses memory whose readers have run.
        leaf = activation.clone(memory_format=torch.contiguous_format).requires_grad_()
        with _autograd():
            output = self._compute(leaf)
        number = next(self._numbers)
        self._forwards[number] = leaf, output
        return output.detach().clone(), torch.tensor(number)

    def _run_backward(self, gradient: Tensor, ticket: Tensor) -> Sequence[Tensor]:
        leaf, output = self._forwards.pop(int(ticket))
        with _autograd():  # W may keep the gradient
            torch.autograd.backward([output], [gradient.clone(memory_format=torch.contiguous_format)])
        return [leaf.grad]


def _with_ticket(activation: Tensor) -> Sequence[Tensor]:
    return torch.empty_like(activation), torch.empty((), dtype=torch.int64)


@contextmanager
def _autograd() -> Iterator[None]:
    """Record operations for a backward, also below autograd, where graphs run."""
    excluded = _dispatch_tls_local_exclude_set() - DispatchKeySet(DispatchKey.AutogradFunctionality)
    with _ForceDispatchKeyGuard(_dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield
