"""A script's Paddle layers as one stage of a rank: its forward and backward as Fleet computes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.paddle.stage_layers import LossFunction
from pipeproof.exec.train.paddle.step_data import StepData
from pipeproof.exec.train.script_framework import ScriptFramework, StageErrors
from pipeproof.exec.train.stage_boundaries import Boundaries, leaves_of
from pipeproof.stages.common.weights import WeightGradients

Tensor: TypeAlias = paddle.Tensor


Gradients: TypeAlias = dict[int, Tensor]
"""Gradients of one micro-batch, by the index of the weight."""
Products: TypeAlias = list[tuple[Tensor, Tensor, frozenset[int]]]
"""Deferred products: the output on its graph to weight and bias, its gradient, and the ids of weight and bias."""


class SplitBackward:
    """The split backward of a stage's modules; ``weights`` are all weights that get gradients."""

    def __init__(self, modules: Sequence[paddle.nn.Layer], weights: Sequence[Tensor]) -> None:
        self._weights = [*weights]
        self._aside: Gradients | None = None
        self._products: Products = []
        for index, weight in enumerate(self._weights):
            weight.register_hook(partial(self._keep_aside, index))
        for module in modules:
            for sublayer in module.sublayers(include_self=True):
                if type(sublayer) is paddle.nn.Linear:
                    sublayer.forward = partial(self._linear, sublayer)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one micro-batch back and return the deferred gradients of weights."""
        gradients_aside: Gradients = {}
        self._products = []
        self.run_into(gradients_aside, outputs, gradients)
        return _DeferredGradients(self, gradients_aside, self._products)

    def run_into(
        self, gradients_aside: Gradients, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        """Run autograd's backward and put the gradients of weights aside."""
        self._aside = gradients_aside
        try:
            paddle.autograd.backward([*outputs], [*gradients])
        finally:
            self._aside = None

    def ids(self, gradients_aside: Gradients) -> list[int]:
        """The ids of the weights with a gradient put aside."""
        return [id(self._weights[index]) for index in gradients_aside]

    def add(self, gradients_aside: Gradients) -> None:
        """Add the gradients of one micro-batch that were put aside to the weights' buffers."""
        for index, gradient in gradients_aside.items():
            grad = self._weights[index].grad
            grad.set_value(grad + gradient)

    def _keep_aside(self, index: int, gradient: Tensor | None) -> Tensor | None:
        """Put a gradient aside and return zeros for the buffer; None means that the gradient goes to the buffer."""
        if gradient is None:  # a PyLayer inside of a layer may return None
            return None
        if self._aside is None:
            return None
        previous = self._aside.get(index)
        self._aside[index] = gradient.clone() if previous is None else previous + gradient
        return paddle.zeros_like(gradient)

    def _linear(self, module: paddle.nn.Linear, x: Tensor) -> Tensor:
        """The result of the layer's own ``forward``, on a graph that bypasses the weight."""
        weight, bias = module.weight, module.bias
        if not paddle.is_grad_enabled() or weight.stop_gradient or not weight.is_leaf:
            return F.linear(x, weight, bias)
        if not x.stop_gradient:
            return _Product.apply(x, module, partial(self._defer, module))
        value = F.linear(x, weight, bias)
        output = value.detach()
        output.stop_gradient = False
        output.register_hook(partial(self._defer, module, value))
        return output

    def _defer(self, module: paddle.nn.Linear, value: Tensor, gradient: Tensor) -> None:
        weights = frozenset(id(weight) for weight in (module.weight, module.bias) if weight is not None)
        self._products.append((value, gradient, weights))


class _DeferredGradients(WeightGradients):
    """Weight gradients of one micro-batch: gradients put aside, and products that are still to be computed."""

    def __init__(self, split: SplitBackward, gradients_aside: Gradients, products: Products) -> None:
        super().__init__()
        self._split_backward, self._aside, self._products = split, gradients_aside, products

    def accumulate(self) -> None:
        """Add the whole gradient of the micro-batch to each weight's buffer. A second call adds nothing."""
        uses = Counter(weight for *_, weights in self._products for weight in weights)
        uses.update(self._split_backward.ids(self._aside))
        for value, gradient, weights in self._products:
            if all(uses[weight] == 1 for weight in weights):  # several uses are added up before the buffer
                paddle.autograd.backward([value], [gradient])
            else:
                self._split_backward.run_into(self._aside, [value], [gradient])
        self._split_backward.add(self._aside)
        self._aside, self._products = {}, []


class _Product(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """One use of an ``nn.Linear`` in the layer's graph: a function of the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: paddle.nn.Linear, defer: Callable[[Tensor, Tensor], None]) -> Tensor:
        with paddle.enable_grad():
            value = F.linear(x.detach(), module.weight, module.bias)
        ctx.value, ctx.weight, ctx.defer, ctx.dtype = value, module.weight.detach(), defer, x.dtype
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.defer(ctx.value, gradient)
        weight = ctx.weight if ctx.weight.dtype == gradient.dtype else ctx.weight.astype(gradient.dtype)  # autocast
        product = paddle.matmul(gradient, weight, transpose_y=True)
        return product if product.dtype == ctx.dtype else product.astype(ctx.dtype)


Leaves: TypeAlias = tuple[Tensor, ...]
_SHAPE_FIX = "all micro-batches have the shapes of the first, or of the `example`"


class ModuleStage:
    """A stage that is a script's layers; a ``RankStage``. Autograd adds the gradients of micro-batches.

    ``losses`` are for the last stage; each loss is divided by ``num_losses`` before its backward. ``parameters`` are
    the weights by the plan's names. With ``split``, which all stages of the rank share, weight gradients wait for W.
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
        """The loss of the backward; all loss functions are computed, as in Fleet."""
        data = self.data
        if data.loss_index is None:
            data.outputs[index] = output
            return paddle.zeros([])
        scaled_losses: list[Tensor] = []
        for loss_function in self._losses:
            assert loss_function is not None, "``Pipeline`` refuses a step without one"
            loss = loss_function(output, data.labels[index])
            if not isinstance(loss, paddle.Tensor) or loss.size != 1:
                kind = f"a tensor of shape {loss.shape}" if isinstance(loss, paddle.Tensor) else type(loss).__name__
                raise PipelineError(f"{self._errors.where(index)}: the loss is {kind}: return a tensor of one element")
            with paddle.amp.auto_cast(enable=False):
                scaled_losses.append(loss / self._num_losses if self._num_losses > 1 else loss)
        data.losses[index] = [loss.detach() for loss in scaled_losses]
        return scaled_losses[data.loss_index]

    def _checked(self, value: Any, index: int) -> Leaves:
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
