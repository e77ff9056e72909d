"""What the executor needs of a framework, and nothing of any: tensors, communication, stages, optimizers.

``exec.paddle`` and ``exec.torch`` have one of each. Tensors and weights are
whatever the framework's are; beside the methods that both frameworks' tensors
have alike (``detach``, ``clone``, ``contiguous``, ``flatten``, ``reshape``,
ranges of the first dim), ``Arrays`` is all that is asked of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.schedule.optable import Channel
from pipeproof.specs.plan import RunSpec
from pipeproof.stages.describe.watch import LayerWatch

Tensor: TypeAlias = Any
Weight: TypeAlias = Any
"""What stages compute with and optimizers update: a tensor, or a tensor with a gradient buffer of its own."""
Value: TypeAlias = tuple[Tensor, ...]
"""What crosses a boundary, in the order of the edge's members."""
Array: TypeAlias = npt.NDArray[Any]


class Arrays(Protocol):
    """What is done with tensors. Types are named as plans name them."""

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor that is about to be written, on the device of the run."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor of zeros on the device of the run."""
        ...

    def shaped(self, memory: Tensor, shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor that shares the first of ``memory``, which is flat and of type uint8."""
        ...

    def copy_into(self, target: Tensor, source: Tensor) -> Tensor:
        """Write the values of ``source`` to ``target``, which is returned."""
        ...

    def numel(self, tensor: Tensor) -> int:
        """Number of elements."""
        ...

    def dtype(self, tensor: Tensor) -> str:
        """Type of the elements."""
        ...

    def to_numpy(self, tensor: Tensor) -> Array:
        """A copy of the values; the host waits for them. 16 bits are widened to float32."""
        ...

    def from_bytes(self, content: npt.NDArray[np.uint8], shape: Sequence[int], dtype: str) -> Tensor:
        """A tensor of these bytes, elements in C order, on the device of the run; nothing is computed for it."""
        ...

    def to_bytes(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """The bytes of a contiguous tensor; the host waits for them, and nothing is computed for it."""
        ...

    def synchronize(self) -> None:
        """The host waits until the device of the run has done what it was given; nothing to wait for on a CPU."""
        ...

    def want_gradient(self, tensor: Tensor, *, wanted: bool) -> None:
        """Make a tensor a leaf for which backward leaves a gradient, or one for which it does not."""
        ...

    def gradient(self, tensor: Tensor) -> Tensor:
        """What backward left for it."""
        ...

    def release(self, tensor: Tensor) -> None:
        """Give back the memory of the values; autograd goes on to need the tensor."""
        ...


class Transfer(Protocol):
    """A posted transfer: its buffer now, its times in nanoseconds once it is done."""

    buffer: Tensor
    posted_ns: int
    start_ns: int
    end_ns: int

    def wait(self) -> None:
        """Block until the transfer is done, on a GPU what is computed next in place of the host."""
        ...


class Channels(Protocol):
    """The ends that one rank has of every channel."""

    def post(self, channel: Channel, buffer: Tensor, after: Sequence[Any] = ()) -> Transfer:
        """Begin to move a contiguous buffer over this rank's end of ``channel``, behind ``after``; returns at once."""
        ...

    def close(self) -> None:
        """End what carries transfers out, once all are done."""
        ...


class Collectives(Protocol):
    """Collectives over one group of ranks. Each returns a new tensor, and takes a contiguous one."""

    ranks: tuple[int, ...]

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        """What every member put in, joined along ``dim`` in group order."""
        ...

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        """``sum`` or ``max`` over the members."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This member's part along ``dim`` of the sum over the members."""
        ...

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """``send[m]`` rows, in order, to each member m, and ``receive[m]`` from it, joined in group order."""
        ...


class World(Protocol):
    """One rank's communication, connected and ready."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def channels(self) -> Channels:
        """Its ends of channels."""
        ...

    @property
    def collectives(self) -> Mapping[int, Collectives]:
        """By index of the graph's groups, those that this rank is a member of."""
        ...

    def barrier(self) -> None:
        """No rank leaves before all have come."""
        ...


class StageCollectives(Protocol):
    """All collectives that layers may issue while they compute."""

    def all_reduce(self, tensor: Tensor, *, label: str, reduction: str = "sum") -> Tensor:
        """Over TP."""
        ...

    def all_gather(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """Over TP, or context-parallel ranks."""
        ...

    def reduce_scatter(self, tensor: Tensor, dim: int, *, label: str, axis: str = "tp") -> Tensor:
        """Over TP, or context-parallel ranks."""
        ...

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str) -> Tensor:
        """Over EP."""
        ...


class WeightGradients(Protocol):
    """What the input gradient left for the weight gradient to compute."""

    def accumulate(self) -> None:
        """Compute it, and add it to the gradients."""
        ...


class Routers(Protocol):
    """What the routers of one stage have to do at the borders of a step."""

    def begin(self) -> None:
        """Forget the step before, but for the biases."""
        ...

    def biased(self) -> Sequence[str]:
        """The experts whose routers have a bias that moves."""
        ...

    def load(self, experts: str) -> Tensor:
        """How many visits each expert of a router has had in the step, int64."""
        ...

    def set_load(self, experts: str, load: Tensor) -> None:
        """Put in place what was summed over ranks."""
        ...

    def move_biases(self) -> None:
        """The end of a step: each bias towards the mean load."""
        ...

    def bias(self, experts: str) -> Tensor:
        """The bias of one router that has one."""
        ...

    def put_bias(self, experts: str, bias: Tensor) -> None:
        """Replace it."""
        ...

    def shown(self) -> dict[str, Array]:
        """What there is to compare of the step, by name."""
        ...


class RankStage(Protocol):
    """One stage on one rank: its weights, and its computations from boundary to boundary."""

    parameters: dict[str, Weight]

    def forward(self, inputs: Value, *, step: int, index: int, piece: int, watch: LayerWatch | None) -> Value:
        """Run one unit of work; the caller keeps the result for backward.

        ``inputs`` has the members of the edge before the stage, those with a gradient as leaves that want one; it is
        empty for the first stage. ``step``, ``index`` (of the micro-batch, over all data ranks) and ``piece`` say
        which unit it is. The result has the members of the edge after the stage, or the loss, a scalar; where
        that has parts which are reported, they come behind it as one vector.
        """
        ...

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one unit of work back; sets the gradients of the inputs, and returns what weights are still to be given.

        ``gradients`` has one for each of ``outputs``, None for members without one, and for the loss.
        """
        ...

    def give_back(self) -> None:
        """Add what layers made of weights that were lent to them to those weights' own gradients."""
        ...


class Stages(Protocol):
    """What makes the stages of a rank."""

    def make(self, number: int, lent: Mapping[str, Weight]) -> RankStage:
        """A stage, with the weights that the rank's other stages lend it."""
        ...

    def routers(self, stage: RankStage) -> Routers | None:
        """The routers of one of them, None where there are none."""
        ...

    def buffers(self, stage: RankStage) -> dict[str, Tensor]:
        """What a stage changes from step to step beside weights and routers, by name."""
        ...

    def put_buffers(self, stage: RankStage, buffers: Mapping[str, Tensor]) -> None:
        """Go on with what ``buffers`` gave, or some of it; before the first step."""
        ...

    def load(self, step: int) -> None:
        """Put in place what a step reads, so that nothing in it waits for the host."""
        ...


class Optimizer(Protocol):
    """The optimizer of one stage on one rank."""

    def zero_grad(self) -> None:
        """Begin every gradient as +0.0."""
        ...

    def step(self) -> None:
        """Update every weight from its gradient."""
        ...

    def state(self) -> dict[tuple[str, str], Tensor]:
        """What it keeps from step to step, by weight and the names of ``state.layout``; there is some after a step."""
        ...

    def put_state(self, weights: Mapping[str, Tensor], kept: Mapping[tuple[str, str], Tensor]) -> None:
        """Go on with these weights, as they are updated, and with what ``state`` gave; before the first step."""
        ...


class ShardedOptimizer(Optimizer, Protocol):
    """One that updates this rank's shares alone, as ``stages.describe.shares`` cuts them."""

    updated: dict[str, Weight]

    def to_scatter(self, name: str) -> Tensor:
        """The gradient of a weight, flat and filled up with zeros to shares of one size."""
        ...

    def put_sum(self, name: str, part: Tensor) -> None:
        """What came of it: this rank's part of the sum."""
        ...

    def to_gather(self, name: str) -> Tensor:
        """This rank's share of a weight, filled up with zeros."""
        ...

    def put_whole(self, name: str, shares: Tensor) -> None:
        """The shares of all ranks, one behind the other."""
        ...


class Clip(Protocol):
    """Gradients clipped to a norm of all of them together."""

    squares: Tensor
    """The vector of squared norms, as far as it has been summed."""

    def begin(self) -> None:
        """Forget the step before."""
        ...

    def clip(self, weights: Mapping[str, Weight]) -> None:
        """Scale gradients down to the limit."""
        ...


class Framework(Protocol):
    """One framework in one process, started."""

    @property
    def arrays(self) -> Arrays:
        """Its tensors."""
        ...

    def num_threads(self) -> int:
        """How many threads it computes with, at most."""
        ...

    def connect(self, rank: int, plan: LoweredPlan, progress: Callable[[str], None]) -> World:
        """Join the other ranks, as the process's environment says; every rank must call this."""
        ...

    def stages(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> Stages:
        """What makes the stages of the rank at ``coords``."""
        ...

    def optimizer(self, run: RunSpec, weights: Mapping[str, Weight]) -> Optimizer:
        """The optimizer that the plan's ``run`` names."""
        ...

    def sharded_optimizer(
        self, run: RunSpec, weights: Mapping[str, Weight], num_shares: int, place: int
    ) -> ShardedOptimizer:
        """The same for the ``place``-th share of each weight."""
        ...

    def clip(self, counted: Mapping[int, Weight], num_weights: int, limit: float, dtype: str) -> Clip:
        """The clip of a rank that counts the weights ``counted``, by their place among all."""
        ...

    def gradient(self, weight: Weight) -> Tensor:
        """The gradient of a weight, or of a share of one."""
        ...

    def put_gradient(self, weight: Weight, gradient: Tensor) -> None:
        """Replace it."""
        ...

    def main(self, weight: Weight) -> Tensor:
        """What the optimizer updates."""
        ...

    def value(self, weight: Weight) -> np.ndarray:
        """A copy of what the optimizer updates."""
        ...
