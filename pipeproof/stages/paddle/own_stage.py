"""A stage of own layers on one rank: consecutive layers as they are, with plain autograd inside.

Where the schedule splits backwards, ``own_split`` says what I does and what is left for W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import paddle

from pipeproof.specs.own_layers import OutSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.watch import LayerWatch
from pipeproof.stages.own.declaration import require_buffers, require_kept, require_outputs
from pipeproof.stages.own.model import OwnLayer, OwnModel, digests
from pipeproof.stages.paddle.own_split import SplitBackward
from pipeproof.stages.paddle.weights import BorrowedWeight, WeightGradients

Tensor: TypeAlias = paddle.Tensor
Value: TypeAlias = tuple[Tensor, ...]


class OwnStage:
    """The layers of those names on one rank.

    ``parameters`` has the rank's weights by name: the layers' own, and those that they borrow, unless they are in
    ``lent``: those of the rank's other stages. ``splits`` says whether the schedule has W for the stage.
    """

    def __init__(
        self, plan: PlanSpec, model: OwnModel, names: Sequence[str], lent: Mapping[str, Tensor], *, splits: bool
    ) -> None:
        assert plan.own_layers is not None
        self._plan, self._model = plan, model
        by_name = {layer.name: layer for layer in model.layers}
        self._layers = [by_name[name] for name in names]
        self._as_built = digests({name: one for layer in self._layers for name, one in layer.untrained().items()})
        self._is_first, self._is_last = names[0] == model.layers[0].name, names[-1] == model.layers[-1].name
        self._out: tuple[OutSpec, ...] = next(one.out for one in plan.own_layers.layers if one.name == names[-1])
        self.parameters: dict[str, Tensor] = {
            name: weight for layer in self._layers for name, weight in layer.parameters.items()
        }
        self._lent: list[BorrowedWeight] = []
        for layer in self._layers:
            self._borrow(layer, lent)
        used = [*self.parameters.values(), *(borrowed.used for borrowed in self._lent)]
        self._step, self._inputs = -1, dict[int, Value]()
        self._split = SplitBackward(self._layers, used) if splits else None

    def _borrow(self, layer: OwnLayer, lent: Mapping[str, Tensor]) -> None:
        """Let a layer use the rank's own weight, with a gradient of its own; or hold the copy that it came with."""
        for name in layer.borrowed:
            there = lent.get(name, self.parameters.get(name))
            if there is None:
                self.parameters[name] = layer.own_copy(name)
                layer.use(name, self.parameters[name])  # everywhere in the layer the same
            else:
                self._lent.append(BorrowedWeight(there))
                layer.use(name, self._lent[-1].used)

    def forward(self, inputs: Value, *, step: int, index: int, piece: int, watch: LayerWatch | None) -> Value:
        """Run one micro-batch; ``backward_input`` takes what comes back, and finds the inputs by it.

        Raises:
            BadPlanError: PP911, a layer fails; PP912, the last one gives something else than it declares.
        """
        value = self._model.inputs(step, index) if self._is_first else inputs
        for number, layer in enumerate(self._layers):
            if watch is not None and (number or not self._is_first):
                watch.see(layer.name, "input", index, piece, value[:1])
            value = self._model.run(layer, value, step=step, index=index)
            is_output = self._is_last and layer is self._layers[-1]
            if watch is not None and not is_output:
                watch.see(layer.name, "output", index, piece, value[:1])
        if not self._is_last:
            require_outputs(self._plan, self._layers[-1].name, self._out, value)
            return self._remember(value, inputs, step)
        loss = self._model.loss(value, step, index) * self._model.scale()
        if watch is not None:
            watch.see_loss(self._layers[-1].name, index, piece, loss)
        return self._remember((loss,), inputs, step)

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one micro-batch back to its inputs, whose ``grad`` it sets; zeros where nothing depends on one."""
        wanted = [x for x in self._inputs.pop(id(outputs[0])) if not x.stop_gradient]
        ways = [
            (y, gradient)
            for y, gradient in zip(outputs, gradients, strict=True)
            if not y.stop_gradient and (gradient is not None or self._is_last)
        ]
        left = WeightGradients()
        if ways:
            roots = [y for y, _ in ways], [gradient for _, gradient in ways]
            if self._split is not None:
                left = self._split.backward(*roots)
            else:
                paddle.autograd.backward(*roots)
        for x in wanted:
            if x.grad is None:
                x.grad = paddle.zeros_like(x)
        return left

    def buffers(self) -> dict[str, Tensor]:
        """What the plan declares that training changes beside weights, as it is now, by name.

        Raises:
            BadPlanError: PP912, it is there no more as declared, or training has changed something else.
        """
        assert self._plan.own_layers is not None
        require_kept(self._as_built, self._layers, self._plan)
        by_name, found = {layer.name: layer for layer in self._layers}, dict[str, Tensor]()
        for index, about in enumerate(self._plan.own_layers.layers):
            if about.name in by_name:
                path = ("model", "layers", index)
                found |= require_buffers(by_name[about.name], about, path, self._plan.run.dtype)
        return found

    def put_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Go on with some of what ``buffers`` gave; before the first step. A dim of replicas before theirs is one."""
        there = self.buffers()
        for name, value in buffers.items():
            there[name].set_value(value.reshape(there[name].shape))

    def _remember(self, outputs: Value, inputs: Value, step: int) -> Value:
        if step != self._step:  # without backwards nobody asks for them
            self._inputs.clear()
            self._step = step
        self._inputs[id(outputs[0])] = inputs
        return outputs

    def give_back(self) -> None:
        """Add what layers made of weights that were lent to them to those weights' own gradients."""
        for borrowed in self._lent:
            borrowed.give_back()
