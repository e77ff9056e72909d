"""F, I and W of a captured stage: its forward, and its backward cut into I and W, as graphs that run.

AOTAutograd makes forward and backward of a graph, and the backward is cut into I and W (``backward_graphs``). F is one
node of autograd, whose backward is I. I returns no gradients of weights, but leaves W, which adds them.

With ``eager`` the graphs run the operations of eager mode, in its order. With ``inductor`` they are compiled.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import fx, nn
from torch._functorch import config as aot_config

from pipeproof.stages.torch.backward_graphs import Addend, BackwardGraphs, base_of, bytes_of, split_backward
from pipeproof.stages.torch.graph_errors import named_errors
from pipeproof.stages.torch.weights import add_product


def in_form(
    run: Callable[[list[Any]], Sequence[Any]], graph: fx.GraphModule, example: Sequence[Any]
) -> Callable[[list[Any]], Sequence[Any]]:
    """The call of a graph, with inputs brought into the form of ``example``: its shape, strides and type.

    Code of Inductor reads the memory of its inputs in the form of the example that it was compiled for. Another graph's
    output can have another form: PyTorch 2.11 returns the sum of a fused reduction without the dims that it kept, and
    may pad or permute the memory of what no user sees.

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
    """The entries of ``sizes`` whose dim has more than one element."""
    return [size for length, size in zip(shape, sizes, strict=True) if length != 1]


Compiler = Literal["inductor", "eager"]
Compiled = Callable[[list[Any]], Sequence[Any]]
"""A graph that runs. It empties the list of its inputs: their memory is free after their last use."""

_BUDGETS = (0.75, 0.5, 0.25, 0.0)
"""Shares of the activations that the partitioner may keep, tried until a graph keeps no more than autograd does."""


class NotCapturedError(Exception):
    """A stage has no graphs; the text is the reason."""


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Memory that one forward keeps for its backward: as a graph, and in eager mode. Weights are not counted."""

    by_graph: int
    by_eager: int


Defer: TypeAlias = Callable[[Callable[[], None]], None]
"""Takes the W of a backward."""
Adder: TypeAlias = Callable[[Any, Sequence[torch.Tensor]], None]
"""Adds one addend to a weight's gradient: the weight, and the outputs of W."""


def captured_graphs(
    graph: fx.GraphModule, example: Sequence[Any], compiler: Compiler, defer: Defer,
    adder: Callable[[Addend], Adder], *, in_product: bool,
) -> tuple[Callable[..., Any], KeptBytes]:  # fmt: skip
    """The graphs of a stage for inputs like ``example``, as one callable of tensors, and a forward's kept memory.

    Trained weights are the parameters among ``example`` that require a gradient. ``adder`` makes the function that adds
    an addend to the gradient of one of them, an input of the call. With ``in_product`` W leaves the factors of matrix
    products to the adder.

    Raises:
        NotCapturedError: the stage has a feature that graphs would leave out, or a graph would keep more memory than
            eager mode does.
    """
    _require_tensors(example)
    make = partial(_Capture, example, defer, adder)
    with _settings():
        if compiler == "eager":
            capture = make(_boxed, in_product=in_product)
            run = _eager_autograd(graph, example, capture)
            return run, KeptBytes(capture.kept, capture.kept)
        by_eager = _eager_bytes(graph, example, make)
        first = aot_config.activation_memory_budget
        for budget in (first, *(share for share in _BUDGETS if share < first)):
            capture = make(_inductor, in_product=True, most=by_eager)
            with aot_config.patch(activation_memory_budget=budget):
                try:
                    run = _compiled_autograd(graph, example, capture)
                except _KeepsMoreError:
                    continue
            return run, KeptBytes(capture.kept, by_eager)
    raise NotCapturedError(f"its graph would keep {capture.kept} bytes, and eager mode keeps {by_eager}")


def values_of(addend: Addend, graph_outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradient, or the two factors of it, among the outputs of W."""
    values = [graph_outputs[n] for n in addend.outputs]
    return [value.t() for value in reversed(values)] if addend.is_transposed else values


def add_factors(buffer: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``buffer += left @ right``, of matrices or of batches of them, inside the product where its type allows."""
    if left.dim() == 2:
        add_product(buffer, left, right)
    elif left.dtype == buffer.dtype:
        buffer.baddbmm_(left, right)
    else:
        buffer.add_(left @ right)


class _KeepsMoreError(Exception):
    """A partition keeps more than eager mode does."""


class _Capture:
    """Compiles the forward and the backward of one graph.

    ``example`` are the forward's inputs. ``defer`` gets the W of each backward, ``most`` is a limit of ``kept``.
    """

    def __init__(
        self, example: Sequence[Any], defer: Defer, adder: Callable[[Addend], Adder],
        compile_graph: Callable[..., Compiled], *, in_product: bool, most: int | None = None,
    ) -> None:  # fmt: skip
        self._num_inputs = len(example)
        self._positions = [n for n, x in enumerate(example) if isinstance(x, nn.Parameter) and x.requires_grad]
        self._fixed = {n for n, x in enumerate(example) if isinstance(x, nn.Parameter)}
        self._defer, self._adder, self._compile = defer, adder, compile_graph
        self._in_product, self._most = in_product, most
        self._weights: Mapping[int, Any] = {}
        self._bases: dict[str, tuple[str, int]] = {}
        self.kept = 0

    def forward(self, graph: fx.GraphModule, example: Sequence[Any], **options: Any) -> Compiled:
        """F; it notes which weights it was called with, as a stage may get others between steps.

        It does not hold them: Dynamo keeps graphs for ever.
        """
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
            self._weights = weakref.WeakValueDictionary((n, inputs[n]) for n in self._positions)
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
        leave, number, positions = self._weight_part(graphs, example, options), self._num_inputs, graphs.gradients

        def call(inputs: list[Any]) -> Sequence[Any]:
            saved = [inputs[n] for n in graphs.direct]
            graph_outputs = run_input(inputs)
            gradients: list[Any] = [None] * number
            for n, gradient in zip(positions, graph_outputs, strict=False):
                gradients[n] = gradient
            leave([*saved, *graph_outputs[len(positions) :]])
            return gradients

        return _marked(call)

    def _weight_part(
        self, graphs: BackwardGraphs, example: Sequence[Any], options: Mapping[str, Any]
    ) -> Callable[[list[Any]], None]:
        """A function that leaves W with its inputs."""
        places = [node for node in graphs.weight_graph.graph.nodes if node.op == "placeholder"]
        examples = [example[n] for n in graphs.direct]
        examples += [node.meta["val"] for node in places[len(examples) :]]
        fixed = {**options, "static_input_idxs": ()} if options else {}
        of_weights = graphs.weight_graph
        run = named_errors(self._compile(of_weights, examples, **fixed), of_weights, "weight gradients")
        addends = [(addend.weight, self._adder(addend)) for addend in graphs.addends]
        return lambda inputs: self._defer(partial(_weight_work, run, inputs, addends, self._weights))


def _weight_work(
    run: Compiled, inputs: list[Any], addends: Sequence[tuple[int, Adder]], weights: Mapping[int, Any],
) -> None:  # fmt: skip
    graph_outputs = run(inputs)
    for number, add in addends:
        add(weights[number], graph_outputs)


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

    if not options.get("is_backward"):
        run: Compiled = compile_fx_inner(graph, example, **options)
        return run
    output = graph.graph.output_node()
    # W reads I's values: Inductor keeps the layout of outputs that a user sees.
    output.meta["user_visible_output_idxs"] = [n for n, x in enumerate(output.args[0]) if isinstance(x, fx.Node)]
    return in_form(compile_fx_inner(graph, example, **options), graph, example)


def _eager_autograd(graph: fx.GraphModule, example: Sequence[Any], capture: _Capture) -> Callable[..., Any]:
    """Forward and backward of the operations of eager mode; the forward keeps what autograd keeps."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    run: Callable[..., Any] = aot_autograd(
        fw_compiler=capture.forward, bw_compiler=capture.backward, partition_fn=default_partition
    )(graph, example)
    return run


def _compiled_autograd(graph: fx.GraphModule, example: Sequence[Any], capture: _Capture) -> Callable[..., Any]:
    """Forward and backward of Inductor, which chooses the kept and the recomputed values."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import lowerings, make_fallback, require_contiguous

    def compile_graph(part: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Compiled:
        return (capture.backward if options.get("is_backward") else capture.forward)(part, examples, **options)

    # An embedding's gradient stays one operation: W has it then, and its kernel adds in one order.
    table = {op: rule for op, rule in select_decomp_table().items() if op is not _EMBEDDING}
    if _EMBEDDING not in lowerings:  # PyTorch 2.11 calls no kernel by itself for what its own table decomposes
        make_fallback(_EMBEDDING, require_contiguous, warn=False, override_decomp=True)
    with torch._subclasses.fake_tensor.unset_fake_temporarily():  # noqa: SLF001 - it copies constants
        own = copy.deepcopy(graph)  # Inductor changes it
    run: Callable[..., Any] = compile_fx(own, example, inner_compile=compile_graph, decompositions=table)
    return run


_EMBEDDING = torch.ops.aten.embedding_dense_backward.default


def _eager_bytes(graph: fx.GraphModule, example: Sequence[Any], make: Callable[..., _Capture]) -> int:
    capture = make(_boxed, in_product=False, most=-1)
    try:
        _eager_autograd(graph, example, capture)
    except _KeepsMoreError:
        return capture.kept
    return 0  # no backward


def _settings() -> AbstractContextManager[Any]:
    """AOTAutograd's settings, of those that this version has.

    I must not reuse memory that W reads; a backward runs without autocast, as in eager mode; both are compiled at once,
    and a failure is a failure of the capture.
    """
    wanted = {
        "enable_autograd_cache": False, "donated_buffer": False, "backward_pass_autocast": "off",
        "force_non_lazy_backward_lowering": True,
    }  # fmt: skip
    patch: AbstractContextManager[Any] = aot_config.patch(
        {key: x for key, x in wanted.items() if hasattr(aot_config, key)}
    )
    return patch


def _require_tensors(example: Sequence[Any]) -> None:
    for value in example:
        if not isinstance(value, torch.Tensor):
            raise NotCapturedError(f"an argument is a {type(value).__name__} that changes: pass a tensor")


def _require_local(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        namespace = str(getattr(node.target, "namespace", ""))
        if "c10d" in namespace or namespace in ("_dtensor", "symm_mem"):
            raise NotCapturedError(f"it communicates with other ranks ({node.target})")
