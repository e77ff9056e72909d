"""A stage whose layers run as three graphs: F, I and W.

The stage's own Python runs once for each size of micro-batches, on what AOTAutograd traces, with its weights as inputs.
So all that the layers do is in the graphs, and no guard runs in a step. Lookups of tokens are outside of them: their
gradients are rows of a table, which the buffer gets as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.positions import Positions
from pipeproof.stages.common.work_items import MtpStream, WorkItem
from pipeproof.stages.describe.boundary import MicroBatchSize, micro_batch_size
from pipeproof.stages.describe.layer import Layer, is_empty, layer_order
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.mtp_streams import mtp_streams_into, num_modules
from pipeproof.stages.describe.residual_streams import width_after
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.backward_graphs import Addend
from pipeproof.stages.torch.functional import Groups, grouped_product, is_one_kernel, wide_type
from pipeproof.stages.torch.graph_capture import (
    KeptBytes,
    NotCapturedError,
    add_factors,
    captured_graphs,
    values_of,
)
from pipeproof.stages.torch.graph_errors import GraphOperationError
from pipeproof.stages.torch.stage import TorchStage
from pipeproof.stages.torch.weights import SplitWeights, View, Weight, WeightGradients, each_column, normalized

Tensor: TypeAlias = torch.Tensor


class TracedWeights(SplitWeights):
    """``SplitWeights`` that are plain operations on traced tensors, by weight, within ``traced``."""

    def __init__(self, device: torch.device, stage: int) -> None:
        super().__init__(device)
        self._stage = stage
        self._leaves: Mapping[int, Tensor] | None = None

    @contextmanager
    def traced(self, weights: Sequence[Weight], leaves: Sequence[Tensor]) -> Iterator[None]:
        """Use ``leaves`` in place of the values of ``weights``."""
        self._leaves = dict(zip(map(id, weights), leaves, strict=True))
        try:
            yield
        finally:
            self._leaves = None

    def product(self, activation: Tensor, weight: Weight, *, transposed: bool = False) -> Tensor:
        """Implement ``SplitWeights.product``."""
        if self._leaves is None:
            return super().product(activation, weight, transposed=transposed)
        leaf = self._leaves[id(weight)]
        output = torch.mm(activation.reshape(-1, activation.shape[-1]), leaf.t() if transposed else leaf)
        return output.view(*activation.shape[:-1], output.shape[-1])

    def norm(self, activation: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
        """Implement ``SplitWeights.norm``."""
        if self._leaves is None:
            return super().norm(activation, weight, bias)
        return normalized(activation, self._leaves[id(weight)], None if bias is None else self._leaves[id(bias)])

    def added(self, activation: Tensor, weight: Weight, view: View = lambda whole: whole) -> Tensor:
        """Implement ``SplitWeights.added``."""
        if self._leaves is None:
            return super().added(activation, weight, view)
        return activation + view(self._leaves[id(weight)])

    def scaled_and_shifted(self, activation: Tensor, scale: Weight, shift: Weight, sizes: Sequence[int]) -> Tensor:
        """Implement ``SplitWeights.scaled_and_shifted``."""
        if self._leaves is None:
            return super().scaled_and_shifted(activation, scale, shift, sizes)
        return activation * each_column(self._leaves[id(scale)], sizes) + self._leaves[id(shift)]

    def grouped(self, activation: Tensor, weight: Weight, groups: Groups) -> Tensor:
        """Implement ``SplitWeights.grouped``.

        Raises:
            NotCapturedError: the host would read the numbers of rows, or the buffer is wider than the gradient.
        """
        if self._leaves is None:
            return super().grouped(activation, weight, groups)
        _require_same_type(weight, "products of experts")
        if not is_one_kernel(activation, weight.value):
            raise NotCapturedError("the host reads the number of tokens of each expert")
        return grouped_product(activation, self._leaves[id(weight)], groups)

    def rows(self, indices: Tensor, weight: Weight) -> Tensor:
        """Implement ``SplitWeights.rows``.

        Raises:
            NotCapturedError: the buffer is wider than the gradient.
        """
        if self._leaves is None:
            return super().rows(indices, weight)
        _require_same_type(weight, "lookups of an MTP module")
        return F.embedding(indices, self._leaves[id(weight)])

    def backward(self, output: Tensor, gradient: Tensor | None) -> WeightGradients:
        """Implement ``SplitWeights.backward``."""
        with _errors_at(f"stage {self._stage}"):
            return super().backward(output, gradient)

    def defer(self, work: Callable[[], None]) -> None:
        """Leave the W of a graph to the gradients of the backward that runs."""

        def named() -> None:
            with _errors_at(f"stage {self._stage}"):
                work()

        self._defer(named)


@contextmanager
def _errors_at(where: str) -> Iterator[None]:
    """Name the stage in errors of its graphs."""
    try:
        yield
    except GraphOperationError as error:
        raise GraphOperationError(f"{where}: {error}") from error.__cause__


def _require_same_type(weight: Weight, what: str) -> None:
    """A graph would round these gradients to the type of the run before the buffer adds them."""
    if weight.gradient.dtype != weight.value.dtype:
        raise NotCapturedError(f"gradients of {what} are added in {str(weight.gradient.dtype).removeprefix('torch.')}")


class GraphStage(TorchStage):
    """Stage ``number``, a ``TorchStage`` whose layers run as graphs after ``capture``.

    ``run.compiler`` makes them. A plan that has it has no tensor, context or expert parallelism.
    """

    def __init__(
        self, plan: PlanSpec, layers: Sequence[Layer], device: torch.device, number: int,
        lent: Mapping[str, Weight] | None = None,
    ) -> None:  # fmt: skip
        assert plan.run.compiler is not None, "the plan has no run.compiler"
        weights = TracedWeights(device, number)
        super().__init__(plan, layers, device, lent=lent, weights=weights)
        self._traced_weights, self._compiler, self._device = weights, plan.run.compiler, device
        self._number = number
        self._before = [layer for layer in layers if layer.name == "embed"]
        self._captured = [layer for layer in layers if layer.name != "embed"]
        self._used = self._held.used()
        self._end = "head" if layers[-1].name == "head" else ""
        self._graphs: dict[torch.Size, Callable[..., Any]] = {}
        self.kept: list[KeptBytes] = []
        """Memory that a forward keeps, of each size of micro-batches."""
        self.reason = ""
        """Why the stage does not run as graphs, empty if it does."""

    def capture(self) -> None:
        """Make the graphs of all sizes of micro-batches, or give ``reason``."""
        try:
            self._require_layers()
            indices = range(self._plan.schedule.num_micro_batches)
            first = {micro_batch_size(self._plan, index): index for index in reversed(indices)}
            for size, index in first.items():
                self._capture(size, index)
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything, and the stage runs without it
            self._graphs.clear()
            self.kept.clear()
            self.reason = _reason(error)

    def _require_layers(self) -> None:
        if all(is_empty(layer.name) for layer in self._captured):
            raise NotCapturedError("its layers compute nothing but lookups")
        if self.balance.has_values and any(name.endswith(".router.weight") for name in self.parameters):
            raise NotCapturedError("its routers have losses or biases, which other code reads")

    def _run_layers(
        self, layers: Sequence[Layer], activation: Tensor | None, work_item: WorkItem, step: int, index: int,
        split: int, watch: LayerWatch | None,
    ) -> Tensor:  # fmt: skip
        """Run the graphs; layers that are watched run by themselves."""
        graphs = self._graphs.get(work_item.tokens.shape) if watch is None else None
        if graphs is None:
            return super()._run_layers(layers, activation, work_item, step, index, split, watch)
        if self._before:
            activation = super()._run_layers(self._before, activation, work_item, step, index, split, watch)
        assert activation is not None
        with _errors_at(f"stage {self._number}, micro-batch {index}"):
            output, *losses = graphs(*self._inputs([w.value for w in self._used], activation, work_item))
        if self._end == "head":
            self.losses = losses[0] if losses else output.detach()
        result: Tensor = output
        return result

    def _inputs(self, weights: Sequence[Tensor], activation: Tensor, work_item: WorkItem) -> list[Tensor]:
        """The inputs of a graph, in order."""
        streams = [ids for stream in work_item.streams for ids in (stream.tokens, stream.labels)]
        return [*weights, *self._tables, activation, work_item.scale, *streams]

    def _capture(self, size: MicroBatchSize, index: int) -> None:
        """Make the graphs of one size; ``index`` is a micro-batch that has it."""
        model = self._plan.gpt
        shape = (size.num_rows, size.seq_length) if self._batch_first else (size.seq_length, size.num_rows)
        dtype, num_streams = getattr(torch, self._plan.run.dtype), 1 + num_modules(model)
        ids = [torch.zeros(shape, dtype=torch.int64, device=self._device) for _ in range(2 * num_streams)]
        scale = torch.ones((), dtype=wide_type(dtype), device=self._device)
        work_item = WorkItem(tuple(map(MtpStream, ids[::2], ids[1::2])), scale)
        first = self._captured[0].name
        joined, before = list(shape), layer_order(model)[: layer_order(model).index(first)]
        joined[self._rows_dim] *= mtp_streams_into(model, first)
        width = width_after(model, before)
        activation = torch.zeros(*joined, width, dtype=dtype, device=self._device, requires_grad=True)
        example = self._inputs([nn.Parameter(w.value) for w in self._used], activation, work_item)
        run, kept = captured_graphs(
            _graph_of(partial(self._traced, index), example, 2 if self._end == "head" and num_streams > 1 else 1),
            example, self._compiler, self._traced_weights.defer, _adder,
            weights=dict(enumerate(self._used)), in_product=True,
        )  # fmt: skip
        self._graphs[work_item.tokens.shape] = run
        self.kept.append(kept)

    def _traced(self, index: int, *inputs: Tensor) -> list[Tensor]:
        """The stage from its inputs to its output, for a trace; with MTP modules also the losses."""
        num = len(self._used)
        cos, sin, activation, scale, *ids = inputs[num:]
        work_item = WorkItem(tuple(map(MtpStream, ids[::2], ids[1::2])), scale)
        positions, self._positions = self._positions, Positions(OPS, self._plan, self._traced_weights, (cos, sin))
        try:
            with self._traced_weights.traced(self._used, inputs[:num]), _in_module(self._end):
                output = super()._run_layers(self._captured, activation, work_item, 0, index, 0, None)
            return [output, self.losses] if self.losses is not None and self.losses.dim() else [output]
        finally:
            self._positions, self.losses = positions, None

    # The names of modules, as errors of the graphs have them.

    def _block(self, activation: Tensor, name: str, index: int, split: int, dropouts: Dropouts) -> Tensor:
        with _in_module(name):
            return super()._block(activation, name, index, split, dropouts)

    def _attention(self, activation: Tensor, name: str, index: int, split: int, dropouts: Dropouts) -> Tensor:
        with _in_module(name):
            return super()._attention(activation, name, index, split, dropouts)

    def _mlp(self, activation: Tensor, name: str, work_item: tuple[int, int], dropouts: Dropouts) -> Tensor:
        with _in_module(name):
            return super()._mlp(activation, name, work_item, dropouts)

    def _norm(self, activation: Tensor, name: str) -> Tensor:
        with _in_module(name):
            return super()._norm(activation, name)

    def _product(self, activation: Tensor, name: str) -> Tensor:
        with _in_module(name):
            return super()._product(activation, name)


def _adder(addend: Addend) -> Callable[[Weight, Sequence[Tensor]], None]:
    """Add one addend to a weight's gradient buffer."""

    def add(weight: Weight, found: Sequence[Tensor]) -> None:
        values = values_of(addend, found)
        if len(values) == 1:
            weight.add(values[0])
        else:
            add_factors(weight.gradient, *values)

    return add


def _graph_of(run: Callable[..., Sequence[Tensor]], example: Sequence[Tensor], num_outputs: int) -> fx.GraphModule:
    """A graph that calls ``run``: a compiler traces through it."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"input_{number}") for number in range(len(example))]

    def stage_layers(*values: Tensor) -> Sequence[Tensor]:
        return run(*values)

    found = graph.call_function(stage_layers, tuple(inputs))
    graph.output(tuple(graph.call_function(operator.getitem, (found, n)) for n in range(num_outputs)))
    return fx.GraphModule(nn.Module(), graph)


@contextmanager
def _in_module(name: str) -> Iterator[None]:
    """Name the module of the operations that are traced within the context."""
    meta = fx.traceback.get_current_meta()
    before = meta.get("nn_module_stack")
    meta["nn_module_stack"] = {name: (name, nn.Module)}
    try:
        yield
    finally:
        meta["nn_module_stack"] = before


def _reason(error: Exception) -> str:
    """The first line of why a capture failed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if isinstance(error, NotCapturedError) else f"{type(error).__name__}: {text}"
