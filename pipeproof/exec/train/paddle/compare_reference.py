"""Comparison of a step with the unpartitioned model, which the first rank builds from the same list of layers.

The model runs the micro-batches one by one in plain autograd. A weight that several stages share has a copy in each
stage, so the gradients of its uses are added in the plan's order too: every bit must be equal.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
from paddle import nn

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.paddle.arrays import PaddleArrays
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.comparison import Comparison, GradientDifference, comparison_of, gradient_difference
from pipeproof.exec.train.paddle.boundary_inference import unchanged_state
from pipeproof.exec.train.paddle.record_layers import to_numpy
from pipeproof.exec.train.paddle.stage_layers import ListStages, trained
from pipeproof.exec.train.paddle.start_phases import Placed
from pipeproof.exec.train.paddle.step_data import MicroBatchSizes, StepData, step_data
from pipeproof.exec.train.paddle.step_runner import StepRunner, drawn_step
from pipeproof.schedule.ops import OpKind
from pipeproof.stages.reference.ordered import OrderedSum

Tensor: TypeAlias = paddle.Tensor
_ADDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of a rank: the value of a weight or buffer, or a gradient.

    It is tensor ``name`` of the layer at ``position`` of the list. ``planned`` is the plan's name of a trained weight.
    """

    stage: int
    position: int
    name: str
    planned: str | None
    is_gradient: bool
    is_missing: bool
    """True for zeros in place of a gradient that no backward computed."""
    shape: list[int]
    dtype: str


@dataclass(frozen=True, slots=True)
class _Shard:
    """The tensors of one rank."""

    rank: int
    parts: list[_Part]
    tensors: list[Tensor]


def drawn_whole(placed: Placed, data: Any, loss_index: int, sizes: MicroBatchSizes) -> StepData:
    """The micro-batches of a step that this rank needs, from data that can be read again.

    Raises:
        PipelineError: the data is neither ``(inputs, labels)`` nor None.
    """
    if data is not None and not isinstance(data, tuple | list):
        raise PipelineError("compare runs the micro-batches twice: pass (inputs, labels) instead of an iterator")
    return drawn_step(placed, data, loss_index, sizes, is_training=True)


def compare_step(runner: StepRunner, step: StepData, data: Any) -> Comparison:
    """Run one step, and compare it with the unpartitioned model; see ``Pipeline.compare``.

    ``step`` has the part of ``data`` that this rank needs.

    Raises:
        PipelineError: the first rank has no labels, or a layer raised.
    """
    layers = runner.placed.stages.layers
    with _gradients_aside(list(trained(layers).values())), unchanged_state(layers):
        loss = runner.train(step, whole=True)
        shards = _shards(runner, *_own_parts(runner))
    losses = loss if isinstance(loss, list) else [loss]
    own_loss = losses[step.loss_index or 0]

    def compared() -> dict[str, Any] | None:
        if runner.ranks.rank:
            return None
        if data[1] is None:
            raise PipelineError("the first rank compares with the unpartitioned model: pass the labels there too")
        whole = step_data(data, runner.sizes, is_first=True, is_last=True)
        whole.loss_index = step.loss_index
        return asdict(_compared(runner, shards, whole, own_loss.item()))

    agreement = runner.ranks.agreement
    with runner.watch.calling("the unpartitioned model of compare"):
        return comparison_of(agreement.gather(f"comparison {runner.num_steps}", compared)[0])


@contextmanager
def _gradients_aside(weights: Sequence[Tensor]) -> Iterator[None]:
    """Run a step on weights without gradients, and put the earlier gradients back."""
    if any(getattr(weight, "main_grad", None) is not None for weight in weights):
        raise PipelineError("compare reads `grad` of the weights, and some have a main_grad: compare without it")
    before = [None if weight.grad is None else weight.grad.clone() for weight in weights]
    try:
        for weight in weights:
            weight.grad = None
        yield
    finally:
        for weight, gradient in zip(weights, before, strict=True):
            weight.grad = gradient


def _own_parts(runner: StepRunner) -> tuple[list[_Part], list[Tensor]]:
    parts: list[_Part] = []
    tensors: list[Tensor] = []

    def add(tensor: Tensor, key: tuple[int, int, str, str | None], *, is_gradient: bool, is_missing: bool) -> None:
        dtype = str(tensor.dtype).removeprefix("paddle.")
        parts.append(_Part(*key, is_gradient, is_missing, list(tensor.shape), dtype))
        tensors.append(tensor)

    for number, stage in runner.modules.items():
        planned = {id(weight): name for name, weight in stage.parameters.items()}
        for item in runner.placed.stages.items(number):
            for name, tensor in _tensors(item.module).items():
                key = number, item.position, name, planned.get(id(tensor))
                add(tensor, key, is_gradient=False, is_missing=False)
                if id(tensor) in planned:
                    gradient = paddle.zeros_like(tensor) if tensor.grad is None else tensor.grad
                    add(gradient, key, is_gradient=True, is_missing=tensor.grad is None)
    return parts, tensors


def _tensors(module: nn.Layer | None) -> dict[str, Tensor]:
    return {} if module is None else {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _shards(runner: StepRunner, parts: list[_Part], tensors: list[Tensor]) -> list[_Shard]:
    """The tensors of every rank, each sent to all: only the first rank keeps the others' tensors."""
    arrays, agreement, everyone = PaddleArrays(), runner.ranks.agreement, runner.world.everyone
    if everyone is None:
        return [_Shard(0, parts, [tensor.detach().clone() for tensor in tensors])]
    call = f"compared {runner.num_steps}"
    own = np.concatenate([np.zeros(0, np.uint8), *map(arrays.to_bytes, tensors)])
    reports = agreement.gather(call, lambda: [own.size, [asdict(part) for part in parts]])
    shards: list[_Shard] = []
    with runner.watch.calling("the exchange of gradients for compare"):
        for rank, (size, content) in enumerate(reports):
            sent = paddle.to_tensor(own if rank == runner.ranks.rank else np.zeros(size, np.uint8))
            everyone.broadcast(sent, rank)
            agreement.gather(f"{call}, of rank {rank}", lambda: None)  # nobody is a copy ahead
            if runner.ranks.rank == 0:
                of_rank = [_Part(**each) for each in content]
                shards.append(_Shard(rank, of_rank, _split(arrays, sent.numpy(), of_rank)))
    return shards


def _split(arrays: PaddleArrays, content: npt.NDArray[np.uint8], parts: Sequence[_Part]) -> list[Tensor]:
    tensors, start = [], 0
    for part in parts:
        empty = arrays.to_bytes(arrays.zeros(part.shape, part.dtype))
        tensors.append(arrays.zeros(part.shape, part.dtype))
        if empty.size:
            values = np.frombuffer(content[start : start + empty.size].tobytes(), tensors[-1].numpy().dtype)
            tensors[-1].set_value(values.reshape(part.shape))
        start += empty.size
    return tensors


def _compared(runner: StepRunner, shards: Sequence[_Shard], data: StepData, loss: float) -> Comparison:
    """Run the unpartitioned model on the shards' weights, and compare the gradients of every rank with its own."""
    model = _Unpartitioned(runner, shards)
    expected = _Gradients(runner.plan.lowered, shards)
    for index in range(data.count):
        expected.put(index, model.run(data, index))
    differences: list[GradientDifference] = []
    seen: set[tuple[int, str]] = set()
    names: set[str] = set()
    received: set[str] = set()
    for shard in shards:
        for part, gradient in zip(shard.parts, shard.tensors, strict=True):
            if not part.is_gradient or part.planned is None:
                continue
            names.add(part.planned)
            received |= set() if part.is_missing else {part.planned}
            if (shard.rank, part.planned) in seen:
                continue
            seen.add((shard.rank, part.planned))
            total = expected.total(part.planned)
            if not bool(paddle.equal_all(gradient, total)):
                (x, dtype), (y, _) = map(to_numpy, (gradient, total))
                differences.append(gradient_difference(part.planned, part.stage, (x, y), dtype))
    differences.sort(key=lambda each: (each.stage, each.name))
    return Comparison(loss, model.loss().item(), len(seen), tuple(differences), tuple(sorted(names - received)))


class _Unpartitioned:
    """All stages of the list of layers in one process, each with separate layers, on the weights of the shards."""

    def __init__(self, runner: StepRunner, shards: Sequence[_Shard]) -> None:
        placed, self._fleet = runner.placed, runner.ranks.fleet
        self._count, self._losses = runner.sizes.count, placed.stages.losses
        self._each: list[Tensor] = []
        self._edges = placed.edges
        parts = placed.stages.parts
        self._stages = [
            ListStages(_copied(placed.described, parts[number], parts[number + 1]), parts, [number], self._losses)
            for number in range(placed.num_stages)
        ]
        modules = {item.position: item.module for n, stage in enumerate(self._stages) for item in stage.items(n)}
        self._trained: dict[tuple[int, str], Tensor] = {}
        """The trained weights by stage and their names in the plan."""
        for shard in shards:
            for part, value in zip(shard.parts, shard.tensors, strict=True):
                if not part.is_gradient:
                    tensor = _tensors(modules[part.position])[part.name]
                    tensor.set_value(value)
                    if part.planned is not None:
                        self._trained[part.stage, part.planned] = tensor

    def run(self, data: StepData, index: int) -> dict[tuple[int, str], Tensor]:
        """Run one micro-batch forward and backward; return the gradients of trained weights by stage and name."""
        value = self._output(data.inputs[index])
        loss_function = self._losses[data.loss_index or 0]
        assert loss_function is not None, "a step without one is refused"
        loss = loss_function(value, data.labels[index])
        with paddle.amp.auto_cast(enable=False):
            if not self._fleet.delay_scale_loss and self._count > 1:
                loss = loss / self._count
            self._each.append(loss.detach())
            loss.backward()
        gradients = {}
        for key, weight in self._trained.items():
            gradients[key] = paddle.zeros_like(weight) if weight.grad is None else weight.grad.clone()
            weight.grad = None
        return gradients

    def _output(self, value: Any) -> Any:
        """The output of the last stage. A stage reads each edge by one copy: then its gradient is one addend."""
        held: dict[str, Tensor] = {}
        for number, stage in enumerate(self._stages):
            used = {name: held[name].clone() for name, (_, users, _) in self._edges.edges.items() if number in users}
            value = stage.call(number, value, **used)
            for name in [name for name, (producer, *_) in self._edges.edges.items() if producer == number]:
                if isinstance(value, dict):
                    held[name] = value[name]
                    value = {key: tensor for key, tensor in value.items() if key != name}
                else:
                    held[name], value = value, value.clone()
            following = self._edges.of_stage(number + 1)
            if following is not None and following.is_named and isinstance(value, dict) and len(value) == 1:
                (value,) = value.values()
        return value

    def loss(self) -> Tensor:
        """The mean of the losses of micro-batches."""
        total = reduce(paddle.add, self._each)
        return total / self._count if self._fleet.delay_scale_loss else total


def _copied(described: Sequence[Any], first: int, end: int) -> list[Any]:
    """The list of layers, with copies of layers that the script has built and only one stage uses.

    A split backward has replaced the forward of linear layers, see ``SplitBackward``; copies have their own.
    """
    layers = list(described)
    built = [layer for layer in layers[first:end] if isinstance(layer, nn.Layer)]
    linear = {id(each): each for layer in built for each in layer.sublayers(include_self=True)
              if type(each) is nn.Linear}  # fmt: skip
    replaced = [(each, each.__dict__.pop("forward")) for each in linear.values() if "forward" in each.__dict__]
    try:
        memo: dict[int, Any] = {}
        for position in range(first, end):
            if isinstance(layers[position], nn.Layer):
                layers[position] = copy.deepcopy(layers[position], memo)
    finally:
        for each, forward in replaced:
            each.forward = forward
    return layers


class _Gradients:
    """The gradients of a step, by the plan's names, added as the ranks of the plan add them.

    A rank adds the gradients of its stages in the order of its program; the sums of ranks that share a weight are added
    in the order of the ranks.
    """

    def __init__(self, plan: LoweredPlan, shards: Sequence[_Shard]) -> None:
        self._num_stages = len(plan.stages)
        self._sums: dict[str, list[tuple[set[int], OrderedSum[Tensor]]]] = {}
        for shard in shards:
            stages: dict[str, set[int]] = {}
            for part in shard.parts:
                if part.planned is not None:
                    stages.setdefault(part.planned, set()).add(part.stage)
            for name, own in stages.items():
                order = [
                    self._use(op.stage, op.micro_batch or 0)
                    for op in plan.programs[shard.rank]
                    if op.kind in _ADDS and op.stage in own
                ]
                self._sums.setdefault(name, []).append((own, OrderedSum(order)))

    def put(self, index: int, gradients: Mapping[tuple[int, str], Tensor]) -> None:
        """Add the gradients of one micro-batch."""
        for (stage, name), gradient in gradients.items():
            for own, total in self._sums[name]:
                if stage in own:
                    total.put(self._use(stage, index), [gradient])

    def total(self, name: str) -> Tensor:
        """The gradient of the step."""
        return reduce(paddle.add, [total.total[0] for _, total in self._sums[name]])

    def _use(self, stage: int, index: int) -> int:
        return index * self._num_stages + stage
