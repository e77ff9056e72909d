"""A stage whose layers run as three graphs: F, I and W.

The stage's own Python runs once for each size of micro-batches, on what AOTAutograd traces, with its weights as inputs.
So all that the layers do is in the graphs, and no guard runs in a step. Lookups of tokens are outside of them: their
gradients are rows of a table, which the buffer gets as they are. Collectives, and experts whose numbers of tokens the
host reads, are calls that the graphs make in the order of the layers (``graph_calls``). In an overlapped pair F and I
give each other the turn in these calls, and W is in parts, by the calls before which they are ready.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.embedding_and_head import Positions
from pipeproof.stages.common.stage import RoutedItem
from pipeproof.stages.common.weights import GatheredInput, source_of
from pipeproof.stages.common.work_items import MtpStream, WorkItem
from pipeproof.stages.describe.boundary import MicroBatchSize, micro_batch_size
from pipeproof.stages.describe.layer import Layer, is_empty, layer_order
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.layers.layer_operations import width_after
from pipeproof.stages.describe.mtp_streams import mtp_streams_into, num_modules
from pipeproof.stages.describe.synthetic import DropoutKeys
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.backward_graphs import Addend
from pipeproof.stages.torch.device_masks import DeviceMasks
from pipeproof.stages.torch.functional import Groups, grouped_product, is_one_kernel, wide_type
from pipeproof.stages.torch.graph_calls import GraphCalls, GraphCollectives, Island
from pipeproof.stages.torch.graph_capture import (
    KeptBytes,
    NotCapturedError,
    add_factors,
    captured_graphs,
    values_of,
)
from pipeproof.stages.torch.graph_errors import GraphOperationError
from pipeproof.stages.torch.stage import TorchStage
from pipeproof.stages.torch.weights import (
    SplitWeights,
    View,
    Weight,
    WeightGradients,
    each_column,
    normalized,
    wider_type,
)

Tensor: TypeAlias = torch.Tensor


class TracedWeights(SplitWeights):
    """``SplitWeights`` that are plain operations on traced tensors, by weight, within ``traced``."""

    def __init__(self, device: torch.device, stage: int, calls: GraphCalls) -> None:
        super().__init__(device)
        self._stage, self._calls = stage, calls
        self._leaves: Mapping[int, Tensor] | None = None

    @contextmanager
    def traced(self, weights: Sequence[Weight], leaves: Sequence[Tensor]) -> Iterator[None]:
        """Use ``leaves`` in place of the values of ``weights``."""
        self._leaves = dict(zip(map(id, weights), leaves, strict=True))
        try:
            yield
        finally:
            self._leaves = None

    def product(
        self, activation: Tensor, weight: Weight, *, transposed: bool = False, dtype: str | None = None
    ) -> Tensor:
        """Implement ``SplitWeights.product``."""
        if self._leaves is None:
            return super().product(activation, weight, transposed=transposed, dtype=dtype)
        wide = wider_type(activation, dtype)
        leaf, source = self._leaves[id(weight)].to(wide), source_of(activation)
        if source is not None:
            return _RegatheredProduct.apply(activation, leaf, transposed, source, self._calls)
        output = torch.mm(activation.reshape(-1, activation.shape[-1]).to(wide), leaf.t() if transposed else leaf)
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
        """Implement ``SplitWeights.grouped``."""
        if self._leaves is None:
            return super().grouped(activation, weight, groups)
        return grouped_product(activation, self._leaves[id(weight)], groups)

    def deferred(self, weight: Weight) -> Tensor:
        """Implement ``SplitWeights.deferred``."""
        return super().deferred(weight) if self._leaves is None else self._leaves[id(weight)]

    def fixed(self, weight: Weight) -> Tensor:
        """Implement ``SplitWeights.fixed``."""
        return super().fixed(weight) if self._leaves is None else self._leaves[id(weight)].detach()

    def rows(self, indices: Tensor, weight: Weight) -> Tensor:
        """Implement ``SplitWeights.rows``.

        Raises:
            NotCapturedError: the buffer is wider than the gradient.
        """
        if self._leaves is None:
            return super().rows(indices, weight)
        if not _has_same_type(weight):
            kind = str(weight.gradient.dtype).removeprefix("torch.")
            raise NotCapturedError(f"gradients of lookups of an MTP module are added in {kind}")
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
    try:
        yield
    except GraphOperationError as error:
        raise GraphOperationError(f"{where}: {error}") from error.__cause__


def _has_same_type(weight: Weight) -> bool:
    """Return False if a graph would round the gradient to the type of the run before the buffer adds it."""
    return bool(weight.gradient.dtype == weight.value.dtype)


class _RegatheredProduct(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(
        ctx: Any, activation: Tensor, weight: Tensor, transposed: bool, source: GatheredInput, calls: GraphCalls
    ) -> Tensor:
        source.use()
        ctx.save_for_backward(weight)
        ctx.transposed, ctx.source, ctx.calls = transposed, source, calls
        rows = activation.reshape(-1, activation.shape[-1])
        ctx.dtype = rows.dtype
        output = torch.mm(rows.to(weight.dtype), weight.t() if transposed else weight)
        return output.view(*activation.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (weight,), transposed = ctx.saved_tensors, ctx.transposed
        outputs = gradient.reshape(-1, gradient.shape[-1])
        with ctx.calls.deferred(outputs):
            inputs = ctx.source.take().flatten(0, -2).to(weight.dtype)
        back = torch.mm(outputs, weight if transposed else weight.t()).to(ctx.dtype)
        left, right = (outputs, inputs) if transposed else (inputs, outputs)
        return back.view(*gradient.shape[:-1], back.shape[-1]), torch.mm(left.t(), right), None, None, None


class GraphStage(TorchStage):
    """Stage ``number``, a ``TorchStage`` whose layers run as graphs after ``capture``. ``run.compiler`` makes them.

    ``coords`` are the rank's coordinates by axis; ``collectives`` are those of all axes, None for a single rank.
    """

    def __init__(
        self, plan: PlanSpec, layers: Sequence[Layer], device: torch.device, number: int,
        lent: Mapping[str, Weight] | None = None, coords: Mapping[str, int] | None = None, collectives: Any = None,
    ) -> None:  # fmt: skip
        assert plan.run.compiler is not None, "the plan has no run.compiler"
        topology, self._calls = plan.topology, GraphCalls()
        weights = TracedWeights(device, number, self._calls)
        sizes = {"tp": topology.tp, "ep": topology.ep, "cp": topology.cp}
        coords = dict.fromkeys(sizes, 0) if coords is None else coords
        of_graphs = None if collectives is None else GraphCollectives(self._calls, collectives, sizes)
        super().__init__(
            plan, layers, device, coords["tp"], of_graphs, coords["ep"], of_graphs, lent, of_graphs, weights
        )
        self._traced_weights, self._compiler, self._device = weights, plan.run.compiler, device
        self._number, self._split = number, coords["cp"]
        self._before = [layer for layer in layers if layer.name == "embed"]
        self._captured = [layer for layer in layers if layer.name != "embed"]
        self._used = self._held.used()
        self._end = "head" if layers[-1].name == "head" else ""
        self._graphs: dict[torch.Size, Callable[..., Any]] = {}
        self._traced_masks: Tensor | None = None
        self._work_item_number = 0, 0
        self.kept: list[KeptBytes] = []
        """Memory that a forward keeps, of each size of micro-batches, without what runs operation by operation."""
        self.reason = ""
        """Why the stage does not run as graphs, empty if it does."""

    def capture(self) -> None:
        """Make the graphs of all sizes of micro-batches, or give ``reason``."""
        try:
            self._require_layers()
            indices = range(self._plan.schedule.num_micro_batches)
            first = {micro_batch_size(self._plan, index): index for index in reversed(indices)}
            for size, index in first.items():
                with self._calls.tracing():
                    self._capture(size, index)
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything, and the stage runs without it
            self._graphs.clear()
            self.kept.clear()
            self.reason = _reason(error)

    def _require_layers(self) -> None:
        if all(is_empty(layer.name) for layer in self._captured):
            raise NotCapturedError("its layers compute nothing but lookups")

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
        self._work_item_number = step, index
        with _errors_at(f"stage {self._number}, micro-batch {index}"):
            output, *losses = graphs(*self._inputs([w.value for w in self._used], activation, work_item, index))
        if self._end == "head":
            self.losses = losses[0] if losses else output.detach()
        result: Tensor = output
        return result

    def _inputs(self, weights: Sequence[Tensor], activation: Tensor, work_item: WorkItem, index: int) -> list[Tensor]:
        masks = [self._mask_states.of(index)] if self._draws_on_device else []
        streams = [ids for stream in work_item.streams for ids in (stream.tokens, stream.labels)]
        constants = [] if self._compressed_attention is None else self._compressed_attention.constants
        return [*weights, *self._tables, activation, work_item.scale, *streams, *constants, *masks]

    def _capture(self, size: MicroBatchSize, index: int) -> None:
        """Make the graphs of one size; ``index`` is a micro-batch that has it."""
        model, region = self._plan.gpt, self._region
        length = size.seq_length // self._plan.topology.cp
        shape = (size.num_rows, length) if self._batch_first else (length, size.num_rows)
        dtype, num_streams = getattr(torch, self._plan.run.dtype), 1 + num_modules(model)
        ids = [torch.zeros(shape, dtype=torch.int64, device=self._device) for _ in range(2 * num_streams)]
        scale = torch.ones((), dtype=wide_type(dtype), device=self._device)
        work_item = WorkItem(tuple(map(MtpStream, ids[::2], ids[1::2])), scale)
        first = self._captured[0].name
        joined, before = list(shape), layer_order(model)[: layer_order(model).index(first)]
        joined[self._rows_dim] *= mtp_streams_into(model, first)
        if region.sequence_dim is not None:
            joined[region.sequence_dim] //= region.num_ranks
        width = width_after(model, before)
        activation = torch.zeros(*joined, width, dtype=dtype, device=self._device, requires_grad=True)
        weights = [nn.Parameter(w.value) for w in self._used]
        example = self._inputs(weights, activation, work_item, index)
        run, kept = captured_graphs(
            _graph_of(partial(self._traced, index), example, 2 if self._end == "head" and num_streams > 1 else 1),
            example, self._compiler, self._traced_weights.defer, _adder,
            weights=dict(enumerate(self._used)), in_product=True, at_calls=self._plan.schedule.turns is not None,
        )  # fmt: skip
        self._graphs[work_item.tokens.shape] = run
        self.kept.append(kept)

    def _traced(self, index: int, *inputs: Tensor) -> list[Tensor]:
        """The stage from its inputs to its output, for a trace; with MTP modules also the losses."""
        num, num_ids = len(self._used), 2 * (1 + num_modules(self._plan.gpt))
        cos, sin, activation, scale, *rest = inputs[num:]
        attention = self._compressed_attention
        first = num_ids + (0 if attention is None else len(attention.constants))
        ids, constants, states = rest[:num_ids], rest[num_ids:first], rest[first:]
        in_graph = nullcontext() if attention is None else attention.with_constants(constants)
        work_item = WorkItem(tuple(map(MtpStream, ids[::2], ids[1::2])), scale)
        positions, self._positions = self._positions, Positions(OPS, self._plan, self._traced_weights, (cos, sin))
        self._traced_masks = states[0] if states else None
        self._calls.begin()
        try:
            with self._traced_weights.traced(self._used, inputs[:num]), in_graph, _in_module(self._end):
                output = super()._run_layers(self._captured, activation, work_item, 0, index, self._split, None)
            return [output, self.losses] if self.losses is not None and self.losses.dim() else [output]
        finally:
            self._positions, self._traced_masks, self.losses = positions, None, None

    def _dropout_keys(self, step: int, index: int) -> DropoutKeys:
        if self._traced_masks is None:
            return super()._dropout_keys(step, index)
        return DeviceMasks(self._plan, step, index, self._traced_masks, self._mask_states.positions)

    def _is_island(self, activation: Tensor, name: str) -> bool:
        """True for experts that a graph cannot have: they run operation by operation."""
        weight = self.parameters.get(f"{name}.experts.gate.weight")
        if weight is None:
            return False
        moe, topology = self._plan.gpt.moe, self._plan.topology
        assert moe is not None
        keeps_for_replays = self._plan.run.replay and (topology.experts_over_tp or moe.dispatcher == "all_gather")
        has_fixed_rows = keeps_for_replays or (topology.ep == 1 and not topology.experts_over_tp)
        is_fixed = has_fixed_rows and is_one_kernel(activation, weight.value)
        return not is_fixed or not _has_same_type(weight) or self.balance.has_values

    def _on_island(self, activation: Tensor, name: str) -> Tensor:
        """Experts of the graph that is traced, which run as those of a ``TorchStage`` do."""
        if f"{name}.hash_router.weight" in self.parameters:
            raise NotCapturedError("experts that run operation by operation do not get the ids of their tokens")
        if self._plan.memory.sequence_parallel_activations == "regather" and self._region.sequence_dim is not None:
            raise NotCapturedError("W gathers inputs of its experts again, operation by operation")

        def compute(own: Tensor) -> Tensor:
            step, index = self._work_item_number
            dropouts = Dropouts(OPS, self._dropout_keys(step, index), self._split, self._region)
            return super(GraphStage, self)._mlp(own, name, (index, self._split, None), dropouts)

        island = Island(self._calls, compute)
        (output,) = OPS.autograd_node(island.forward, island.backward, activation)
        return output

    # The names of modules, as errors of the graphs have them.

    def _block(
        self, activation: Tensor, name: str, index: int, split: int, token_ids: Tensor | None, dropouts: Dropouts
    ) -> Tensor:
        with _in_module(name):
            return super()._block(activation, name, index, split, token_ids, dropouts)

    def _attention(self, activation: Tensor, name: str, index: int, split: int, dropouts: Dropouts) -> Tensor:
        with _in_module(name):
            return super()._attention(activation, name, index, split, dropouts)

    def _mlp(self, activation: Tensor, name: str, work_item: RoutedItem, dropouts: Dropouts) -> Tensor:
        with _in_module(name):
            if self._calls.is_tracing and self._is_island(activation, name):
                return self._on_island(activation, name)
            return super()._mlp(activation, name, work_item, dropouts)

    def _norm(self, activation: Tensor, name: str) -> Tensor:
        with _in_module(name):
            return super()._norm(activation, name)

    def _product(self, activation: Tensor, name: str) -> Tensor:
        with _in_module(name):
            return super()._product(activation, name)


def _adder(addend: Addend) -> Callable[[Weight, Sequence[Tensor]], None]:

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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if isinstance(error, NotCapturedError) else f"{type(error).__name__}: {text}"
