"""F, I and W of a stage as three graphs, of any module that ``torch.compile`` captures as one.

Dynamo captures the stage, the last one with its loss function, and guards what it assumed about Python. AOTAutograd
makes its forward and backward, and the backward is cut into I and W (``backward_graphs``). F is one node of autograd,
whose backward is I. I returns no gradients of weights, but leaves W, which adds them. A plain B is I, then W.

With ``eager`` the graphs run the operations of eager mode, in its order, and have its bits. With ``inductor`` they are
compiled, and W adds matrix products inside of the product.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import fx, nn

from pipeproof.exec.train.torch.backward_graphs import Addend, BackwardGraphs, base_of, bytes_of, split_backward
from pipeproof.exec.train.torch.graph_errors import named_errors
from pipeproof.exec.train.torch.split_linear import own_gradient
from pipeproof.stages.torch.weights import add_product

Compiler = Literal["inductor", "eager"]
Compiled = Callable[[list[Any]], Sequence[Any]]
"""A graph that runs. It empties the list of its inputs, so that their memory is free after their last use."""

_BUDGETS = (0.75, 0.5, 0.25, 0.0)
"""Shares of the activations that the partitioner may keep, tried until a graph keeps no more than autograd does."""

_numbers = itertools.count()


class NotCapturedError(Exception):
    """A stage has no graphs; the text is the reason."""


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Memory that one forward keeps for its backward: as a graph, and in eager mode. Weights are not counted."""

    by_graph: int
    by_eager: int


class GraphSplit:
    """The graphs of one stage. ``loss_fn`` is called on the output and the target; None for what returns its output."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any] | None, compiler: Compiler) -> None:
        self._module, self._loss_fn, self._compiler = module, loss_fn, compiler
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
            _entry(self._module, self._loss_fn), backend=self._backend, fullgraph=True, dynamic=False
        )

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Any:
        """The output of the stage, or its loss.

        Raises:
            NotCapturedError: nothing ran.
            GraphOperationError: an operation raised.
        """
        try:
            return self._call(tuple(args), dict(kwargs), target)
        except _CAPTURE_ERRORS as error:
            raise NotCapturedError(_reason(error)) from error

    def backward(
        self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
    ) -> Callable[[], None]:
        """Set the gradients of ``inputs``; return W, which adds those of weights."""
        self._deferred = []
        torch.autograd.backward(roots, gradients)
        return partial(_run_all, self._deferred)

    def _backend(self, graph: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        """The callable of what Dynamo captured, for these shapes."""
        _require_tensors(example)
        with _settings():
            if self._compiler == "eager":
                capture = _Capture(example, self._deferred_work, _boxed, in_product=False)
                run = _eager_autograd(graph, example, capture)
                self.kept.append(KeptBytes(capture.kept, capture.kept))
                return run
            by_eager = _eager_bytes(graph, example)
            first = torch._functorch.config.activation_memory_budget  # noqa: SLF001 - the name of the setting
            for budget in (first, *(share for share in _BUDGETS if share < first)):
                capture = _Capture(example, self._deferred_work, _inductor, in_product=True, most=by_eager)
                with torch._functorch.config.patch(activation_memory_budget=budget):  # noqa: SLF001
                    try:
                        run = _compiled_autograd(graph, example, capture)
                    except _KeepsMoreError:
                        continue
                self.kept.append(KeptBytes(capture.kept, by_eager))
                return run
        raise NotCapturedError(f"its graph would keep {capture.kept} bytes, and eager mode keeps {by_eager}")

    def _deferred_work(self, work: Callable[[], None]) -> None:
        self._deferred.append(work)


class _KeepsMoreError(Exception):
    """A partition keeps more than eager mode does."""


class _Capture:
    """Compiles the forward and the backward of one graph.

    ``example`` are the forward's inputs. ``defer`` gets the W of each backward, ``most`` is a limit of ``kept``.
    """

    def __init__(
        self, example: Sequence[Any], defer: Callable[[Callable[[], None]], None],
        compile_graph: Callable[..., Compiled], *, in_product: bool, most: int | None = None,
    ) -> None:  # fmt: skip
        self._num_inputs = len(example)
        self._positions = [n for n, x in enumerate(example) if isinstance(x, nn.Parameter) and x.requires_grad]
        self._fixed = {n for n, x in enumerate(example) if isinstance(x, nn.Parameter)}
        self._defer, self._compile, self._in_product, self._most = defer, compile_graph, in_product, most
        self._weights: dict[int, nn.Parameter] = {}
        self._bases: dict[str, tuple[str, int]] = {}
        self.kept = 0

    def forward(self, graph: fx.GraphModule, example: Sequence[Any], **options: Any) -> Compiled:
        """F; it notes which weights it was called with, as a stage may get others between steps."""
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        if len(places) != self._num_inputs:
            raise NotCapturedError("PyTorch changed the number of its arguments, as for tensor subclasses")
        _require_local(graph)
        fixed = {places[n] for n in self._fixed}
        for node in graph.graph.nodes:
            if isinstance(node.meta.get("val"), torch.Tensor):
                base = base_of(node)
                self._bases[node.name] = base.name, 0 if base in fixed else bytes_of(base)
        run: Compiled = named_errors(self._compile(graph, example, **options), graph, "forward")

        def call(inputs: list[Any]) -> Sequence[Any]:
            self._weights = {n: inputs[n] for n in self._positions}
            return run(inputs)

        return _marked(call)

    def backward(self, graph: fx.GraphModule, example: Sequence[Any], **options: Any) -> Compiled:
        """I, which leaves W."""
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        self.kept = sum(dict(self._bases[name] for name in names if name in self._bases).values())
        if self._most is not None and self.kept > self._most:
            raise _KeepsMoreError
        if len(graph.graph.output_node().args[0]) != self._num_inputs:
            raise NotCapturedError("PyTorch changed the number of its gradients, as for random numbers on a device")
        graphs = split_backward(graph, {*self._positions}, in_product=self._in_product)
        of_inputs = graphs.input_graph
        run_input = named_errors(self._compile(of_inputs, example, **options), of_inputs, "input gradients")
        run_weight = self._weight_part(graphs, example, options)
        number, positions, direct = self._num_inputs, graphs.gradients, graphs.direct
        addends = [(a.weight, partial(_add, a, can_own=a.is_fresh and not self._in_product)) for a in graphs.addends]

        def call(inputs: list[Any]) -> Sequence[Any]:
            saved = [inputs[n] for n in direct]
            found = run_input(inputs)
            gradients: list[Any] = [None] * number
            for n, gradient in zip(positions, found, strict=False):
                gradients[n] = gradient
            read = [*saved, *found[len(positions) :]]
            self._defer(partial(_weight_work, run_weight, read, addends, self._weights))
            return gradients

        return _marked(call)

    def _weight_part(self, graphs: BackwardGraphs, example: Sequence[Any], options: Mapping[str, Any]) -> Compiled:
        """W. What I computed for it has the layouts of the graph, as an output that is visible to a user has."""
        graph = graphs.weight_graph
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        given = [example[n] for n in graphs.direct]
        given += [node.meta["val"] for node in places[len(given) :]]
        fixed = {**options, "static_input_idxs": ()} if options else {}
        return named_errors(self._compile(graph, given, **fixed), graph, "weight gradients")


def _weight_work(
    run: Compiled, inputs: list[Any], addends: Sequence[tuple[int, Callable[..., None]]],
    weights: Mapping[int, nn.Parameter],
) -> None:  # fmt: skip
    """W of one micro-batch."""
    found = run(inputs)
    for number, add in addends:
        add(weights[number], found)


def _add(addend: Addend, weight: nn.Parameter, found: Sequence[torch.Tensor], *, can_own: bool) -> None:
    """Add one addend to ``grad`` of a weight; ``can_own`` is True if nothing else holds its memory.

    A new ``grad`` has the layout of its weight, as autograd's has.
    """
    values = [found[n] for n in addend.outputs]
    if addend.is_transposed:
        values = [value.t() for value in reversed(values)]
    if len(values) == 1:
        value = values[0]
        if weight.grad is not None:
            weight.grad.add_(value)
        elif can_own and value.dtype == weight.dtype and (value.is_sparse or value.stride() == weight.stride()):
            weight.grad = value
        else:
            weight.grad = own_gradient(weight, value)
        return
    left, right = values
    if weight.grad is None:
        if left.dtype == weight.dtype:
            weight.grad = torch.matmul(left, right, out=torch.empty_like(weight))
            return
        weight.grad = torch.zeros_like(weight)
    if left.dim() == 2:
        add_product(weight.grad, left, right)
    elif left.dtype == weight.grad.dtype:
        weight.grad.baddbmm_(left, right)
    else:
        weight.grad.add_(left @ right)


def _run_all(works: list[Callable[[], None]]) -> None:
    with torch.no_grad():
        for work in works:
            work()
    works.clear()


def _marked(call: Callable[[list[Any]], Sequence[Any]]) -> Compiled:
    call._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001 - AOTAutograd's mark of a call with a list
    return call


def _boxed(graph: fx.GraphModule, example: Sequence[Any]) -> Compiled:
    """A graph that runs as Python."""
    boxed = getattr(fx.graph, "_BoxedCodeGen", None)
    if boxed is None:  # an older PyTorch: inputs stay until the graph ends
        unboxed = fx.GraphModule(graph, graph.graph).forward
        return _marked(lambda inputs: unboxed(*inputs))
    graph.graph.set_codegen(boxed())
    run: Compiled = fx.GraphModule(graph, graph.graph).forward
    return run


def _inductor(graph: fx.GraphModule, example: Sequence[Any], **options: Any) -> Compiled:
    from torch._inductor.compile_fx import compile_fx_inner

    run: Compiled = compile_fx_inner(graph, example, **options)
    return run


def _eager_autograd(graph: fx.GraphModule, example: Sequence[Any], capture: _Capture) -> Callable[..., Any]:
    """Forward and backward of the operations of eager mode; the forward keeps what autograd keeps."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    run: Callable[..., Any] = aot_autograd(
        fw_compiler=capture.forward, bw_compiler=capture.backward, partition_fn=default_partition
    )(graph, example)
    return run


def _compiled_autograd(graph: fx.GraphModule, example: Sequence[Any], capture: _Capture) -> Callable[..., Any]:
    """Forward and backward of Inductor, which chooses what is kept and what is computed again."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback, require_contiguous

    def compile_graph(part: fx.GraphModule, given: Sequence[Any], **options: Any) -> Compiled:
        return (capture.backward if options.get("is_backward") else capture.forward)(part, given, **options)

    # An embedding's gradient stays one operation: W has it then, and its kernel adds in one order.
    table = {op: rule for op, rule in select_decomp_table().items() if op is not _EMBEDDING}
    if _EMBEDDING not in lowerings:  # PyTorch 2.11 calls no kernel by itself for what its own table decomposes
        make_fallback(_EMBEDDING, require_contiguous, warn=False, override_decomp=True)
    with torch._subclasses.fake_tensor.unset_fake_temporarily():  # noqa: SLF001 - it copies constants
        own = copy.deepcopy(graph)  # Inductor changes it
    run: Callable[..., Any] = compile_fx(own, example, inner_compile=compile_graph, decompositions=table)
    return run


_EMBEDDING = torch.ops.aten.embedding_dense_backward.default


class _MeasuredError(Exception):
    """Ends a capture that was made for its size."""


def _eager_bytes(graph: fx.GraphModule, example: Sequence[Any]) -> int:
    """Bytes that the forward keeps in eager mode."""
    capture = _Capture(example, lambda _: None, _boxed, in_product=False, most=-1)
    try:
        _eager_autograd(graph, example, capture)
    except _KeepsMoreError:
        return capture.kept
    return 0  # no backward


def _settings() -> AbstractContextManager[Any]:
    """AOTAutograd's settings, of those that this version has.

    I must not reuse memory that W reads; a backward runs without autocast, as in eager mode; both are compiled at once,
    so that a failure is one of the capture.
    """
    config = torch._functorch.config  # noqa: SLF001 - the name of the settings
    wanted = {
        "enable_autograd_cache": False, "donated_buffer": False, "backward_pass_autocast": "off",
        "force_non_lazy_backward_lowering": True,
    }  # fmt: skip
    patch: AbstractContextManager[Any] = config.patch({key: x for key, x in wanted.items() if hasattr(config, key)})
    return patch


def _entry(module: nn.Module, loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function that is captured; its code is its own, as Dynamo keeps and counts graphs by code."""

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        output = module(*args, **kwargs)
        return output if loss_fn is None else loss_fn(output, target)

    code = run.__code__.replace(co_name=f"stage_graph_{next(_numbers)}")
    return FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)


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


def _require_tensors(example: Sequence[Any]) -> None:
    for value in example:
        if not isinstance(value, torch.Tensor):
            raise NotCapturedError(f"an argument is a {type(value).__name__} that changes: pass a tensor")


def _require_local(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        namespace = str(getattr(node.target, "namespace", ""))
        if "c10d" in namespace or namespace in ("_dtensor", "symm_mem"):
            raise NotCapturedError(f"it communicates with other ranks ({node.target})")


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
