"""A script's Paddle layers as one stage of a rank: its forward and backward as Fleet computes them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import paddle
from paddle import nn

from pipeproof.exec.train.paddle.stage_layers import LossFunction
from pipeproof.exec.train.paddle.step_data import StepData
from pipeproof.exec.train.stage_boundaries import Boundaries, LeafSpec, dtype_name, leaves_of
from pipeproof.exec.train.train_errors import PipelineError
from pipeproof.stages.paddle.custom_stage import SplitBackward
from pipeproof.stages.paddle.weights import WeightGradients

Tensor: TypeAlias = paddle.Tensor
Leaves: TypeAlias = tuple[Tensor, ...]


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
        self.number, self.parameters, self._module = number, dict(parameters), module
        self._call, self._boundaries, self._losses, self._num_losses = call, boundaries, losses, num_losses
        self._is_last = not boundaries.outputs
        self._split = split
        self._inputs: dict[int, Leaves] = {}
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
            raise PipelineError(self._failure(error, index)) from error
        if paddle.is_grad_enabled():
            self._inputs[id(outputs[0])] = inputs
        return outputs

    def _loss(self, output: Any, index: int) -> Tensor:
        """The loss of the backward; all loss functions are computed, as Fleet does."""
        data = self.data
        if not data.computes_loss:
            data.outputs[index] = output
            return paddle.zeros([])
        found: list[Tensor] = []
        for loss_function in self._losses:
            assert loss_function is not None, "``Pipeline`` refuses a step without one"
            loss = loss_function(output, data.labels[index])
            if not isinstance(loss, paddle.Tensor) or loss.size != 1:
                kind = f"a tensor of shape {loss.shape}" if isinstance(loss, paddle.Tensor) else type(loss).__name__
                raise PipelineError(f"{self._place(index)}: the loss is {kind}: return a tensor of one element")
            with paddle.amp.auto_cast(enable=False):
                found.append(loss / self._num_losses if self._num_losses > 1 else loss)
        data.losses[index] = [loss.detach() for loss in found]
        return found[data.loss_index]

    def _checked(self, value: Any, index: int) -> Leaves:
        """The leaves of an output, which must be those of the boundary: the next rank waits for these."""
        form, leaves = leaves_of(value, self._place(index), paddle.Tensor)
        expected = self._boundaries.outputs
        if form != self._boundaries.output_form or len(leaves) != len(expected):
            raise PipelineError(
                f"{self._place(index)} returns a {form.kind} of {len(leaves)}, and the boundary after it is a "
                f"{self._boundaries.output_form.kind} of {len(expected)}"
            )
        for position, (leaf, spec) in enumerate(zip(leaves, expected, strict=True)):
            if tuple(leaf.shape) != spec.shape or dtype_name(leaf.dtype) != spec.dtype:
                actual = LeafSpec.of(leaf, has_gradient=spec.has_gradient)
                raise PipelineError(
                    f"{self._place(index)} returns {actual} as output {position}, and the boundary after it has "
                    f"{spec}: all micro-batches have the shapes of the first, or of the `example`"
                )
        return leaves

    def backward_input(self, outputs: Leaves, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one micro-batch backward and set ``grad`` of its inputs; zeros where nothing depends on an input.

        Raises:
            PipelineError: the backward of a layer raised.
        """
        inputs = [leaf for leaf in self._inputs.pop(id(outputs[0])) if not leaf.stop_gradient]
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
                raise PipelineError(self._failure(error, None)) from error
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

    def _place(self, index: int | None) -> str:
        return f"stage {self.number}" if index is None else f"stage {self.number}, micro-batch {index}"

    def _failure(self, error: Exception, index: int | None) -> str:
        """Name the stage, the micro-batch and the innermost layer that raised."""
        path = _layer_path(error, self._module)
        action = "the backward" if index is None else f"layer `{path}`" if path else "the stage"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/paddle/" not in frame.filename]
        line = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        summary = str(error).strip()
        return f"{self._place(index)}: {action} raised {type(error).__name__}: {summary}{line}"


def _layer_path(error: BaseException, root: nn.Layer) -> str:
    """Name of the innermost layer whose method is in the traceback of an error."""
    names = {id(part): name for name, part in root.named_sublayers(include_self=True)}
    path, frame = "", error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Layer):
            path = names.get(id(owner), path)
        frame = frame.tb_next
    return path
