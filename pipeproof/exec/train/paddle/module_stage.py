"""A script's Paddle layers as one stage of a rank: its forward and backward as Fleet computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import paddle
from paddle import nn

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.paddle.split_linear import SplitBackward
from pipeproof.exec.train.paddle.stage_layers import LossFunction
from pipeproof.exec.train.paddle.step_data import StepData
from pipeproof.exec.train.script_framework import ScriptFramework
from pipeproof.exec.train.stage_boundaries import Boundaries, leaves_of
from pipeproof.exec.train.stage_errors import StageErrors
from pipeproof.stages.paddle.weights import WeightGradients

Tensor: TypeAlias = paddle.Tensor
Leaves: TypeAlias = tuple[Tensor, ...]
_SHAPE_FIX = "all micro-batches have the shapes of the first, or of the `example`"


class ModuleStage:
    """A stage that is a script's layers; a ``RankStage``. Autograd adds the gradients of micro-batches.

    ``losses`` are for the last stage; each loss is divided by ``num_losses`` before its backward. ``parameters`` are
    the weights by the plan's names. With ``split``, that of the rank's stages, weight gradients wait for W.
    """

    def __init__(
        self,
        number: int,
        module: nn.Layer,
        call: Callable[[Any], Any],
        boundaries: Boundaries,
        losses: Sequence[LossFunction | None],
        parameters: Mapping[str, Tensor],
        *,
        num_losses: int,
        split: SplitBackward | None,
    ) -> None:
        self.parameters = dict(parameters)
        self._call, self._boundaries, self._losses, self._num_losses = call, boundaries, losses, num_losses
        self._is_last = not boundaries.outputs
        self._split = split
        self._errors = StageErrors(
            number, "layer", nn.Layer, partial(module.named_sublayers, include_self=True), "/paddle/"
        )
        self._inputs: dict[int, tuple[int, Leaves]] = {}
        self.data = StepData()

    def begin(self, data: StepData) -> None:
        """Begin a step."""
        self._inputs.clear()
        self.data = data

    def forward(self, inputs: Leaves, *, step: int, index: int, split: int, watch: object) -> Leaves:
        """Run one micro-batch; the last stage returns its loss, divided, or a placeholder if none is computed.

        Raises:
            PipelineError: a layer or the loss function raised, or an output does not fit the boundary.
        """
        form = self._boundaries.input_form
        value = self.data.inputs[index] if form is None else form.value(inputs)
        try:
            value = self._call(value)
            outputs: Leaves = (self._loss(value, index),) if self._is_last else self._checked(value, index)
        except PipelineError:
            raise
        except Exception as error:
            raise self._errors.raised(error, index) from error
        if paddle.is_grad_enabled():
            self._inputs[id(outputs[0])] = index, inputs
        return outputs

    def _loss(self, output: Any, index: int) -> Tensor:
        """The loss of the backward; all loss functions are computed, as Fleet does."""
        data = self.data
        if data.loss_index is None:
            data.outputs[index] = output
            return paddle.zeros([])
        found: list[Tensor] = []
        for loss_function in self._losses:
            assert loss_function is not None, "``Pipeline`` refuses a step without one"
            loss = loss_function(output, data.labels[index])
            if not isinstance(loss, paddle.Tensor) or loss.size != 1:
                kind = f"a tensor of shape {loss.shape}" if isinstance(loss, paddle.Tensor) else type(loss).__name__
                raise PipelineError(f"{self._errors.where(index)}: the loss is {kind}: return a tensor of one element")
            with paddle.amp.auto_cast(enable=False):
                found.append(loss / self._num_losses if self._num_losses > 1 else loss)
        data.losses[index] = [loss.detach() for loss in found]
        return found[data.loss_index]

    def _checked(self, value: Any, index: int) -> Leaves:
        """The leaves of an output, which must be those of the boundary."""
        form, leaves = leaves_of(value, self._errors.where(index), paddle.Tensor)
        self._errors.require_boundary(self._boundaries, form, leaves, index, _SHAPE_FIX)
        return leaves

    def backward_input(self, outputs: Leaves, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one micro-batch backward and set ``grad`` of its inputs; zeros where nothing depends on an input.

        Raises:
            PipelineError: the backward of a layer raised.
        """
        index, received = self._inputs.pop(id(outputs[0]))
        inputs = [leaf for leaf in received if not leaf.stop_gradient]
        pairs = [
            (leaf, gradient)
            for leaf, gradient in zip(outputs, gradients, strict=True)
            if not leaf.stop_gradient and (gradient is not None or self._is_last)
        ]
        deferred = WeightGradients()
        if pairs:
            try:
                with paddle.amp.auto_cast(enable=False):
                    deferred = self._backward([leaf for leaf, _ in pairs], [gradient for _, gradient in pairs])
            except Exception as error:
                raise self._errors.raised(error, index, "the backward") from error
        for leaf in inputs:
            if leaf.grad is None:
                leaf.grad = paddle.zeros_like(leaf)
        return deferred

    def _backward(self, roots: list[Tensor], gradients: list[Tensor | None]) -> WeightGradients:
        if self._is_last and self.data.scaler is not None:
            roots = [self.data.scaler.scale(root) for root in roots]
        if self._split is not None:
            return self._split.backward(roots, gradients)
        paddle.autograd.backward(roots, gradients)
        return WeightGradients()

    def return_gradients(self) -> None:
        """Do nothing: stages of one rank that share a weight hold the same parameter."""


class PaddleLayers(ScriptFramework[ModuleStage]):
    """Paddle with the layers of one rank. A weight is a parameter."""

    def gradient(self, weight: Tensor) -> Tensor:
        """The main gradient of mixed precision if the weight has one; zeros without any, as Fleet takes it."""
        main: Any = getattr(weight, "main_grad", None)
        gradient = weight.grad if main is None else main
        return paddle.zeros_like(weight) if gradient is None else gradient.contiguous()

    def put_gradient(self, weight: Tensor, gradient: Tensor) -> None:
        """Replace the gradient, or the main gradient if the weight has one."""
        main: Any = getattr(weight, "main_grad", None)
        current = weight.grad if main is None else main
        if current is None:
            weight.grad = gradient
        else:
            current.set_value(gradient)
