"""Check of custom layers' backwards: their gradients against central finite differences, in float64.

Of each layer alone: its outputs times fixed random numbers are summed, and the sum's derivative along a random
direction of each input and each weight is compared. Only where that differs, or the function has a kink there, are
elements compared one by one. PyTorch has this as ``torch.autograd.gradcheck``; Paddle has no counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.custom.built_layers import BuiltLayer, BuiltModel, Tensor, Value
from pipeproof.stages.custom.custom_codes import wrong_backward

Array = npt.NDArray[Any]
_MOST_ELEMENTS = 256
"""Elements of a tensor that are compared one by one; of larger tensors a random choice."""
_ROUNDINGS = 64
"""Roundings of the sum that the tolerance allows for, in units of the type."""
_MOST_SHOWN = 4


@dataclass(frozen=True, slots=True)
class _Derivative:
    """A derivative by autograd and by central differences, with the tolerance of their difference.

    ``has_kink``: the two one-sided differences are farther apart than the curvature of a smooth function explains.
    """

    gradient: float
    central: float
    step: float
    tolerance: float
    has_kink: bool

    @property
    def agrees(self) -> bool:
        return abs(self.gradient - self.central) <= self.tolerance


def require_right_backwards(plan: PlanSpec) -> None:
    """Compare the backward of each layer, and of the loss function, with finite differences on the first micro-batch.

    Raises:
        BadPlanError: PP911, a layer fails; PP186, the first layer with a gradient that differs.
    """
    exact = plan.model_copy(update={"run": plan.run.model_copy(update={"dtype": "float64"})})
    model = BuiltModel(exact, [layer.name for layer in plan.custom.layers])
    weights = model.weights()
    for layer in model.layers:
        for name in layer.borrowed:
            layer.use(name, weights[name])
    value = tuple(_exact(tensor) for tensor in model.inputs(0, 0))
    for number, layer in enumerate(model.layers):

        def run(inputs: Value, layer: BuiltLayer = layer) -> Value:
            return model.run(layer, inputs, step=0, index=0)

        names = (*layer.parameters, *layer.borrowed)
        checked = _Layer(run, value, {name: weights[name] for name in names}, layer.untrained())
        if found := list(checked.differences()):
            raise wrong_backward(_message(f"layer `{layer.name}`", found), ("model", "layers", number))
        value = tuple(tensor.detach() for tensor in run(value))
    loss = _Layer(lambda inputs: (model.loss(inputs, 0, 0),), value, {}, {})
    if found := list(loss.differences()):
        raise wrong_backward(_message("the loss function", found), ("model", "build"))


def _message(owner: str, differences: list[str]) -> str:
    more = f"\nand {len(differences) - _MOST_SHOWN} other tensors" if len(differences) > _MOST_SHOWN else ""
    return f"the backward of {owner} differs from finite differences: " + "\n".join(differences[:_MOST_SHOWN]) + more


class _Layer:
    """One layer on its inputs; ``buffers`` have the same values before each forward."""

    def __init__(
        self,
        run: Callable[[Value], Value],
        inputs: Value,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._run, self._inputs = run, inputs
        self._buffers = [(buffer, buffer.numpy()) for buffer in buffers.values()]
        for tensor in inputs:
            tensor.stop_gradient = not tensor.is_floating_point()
        self._leaves = {f"input {n}": x for n, x in enumerate(inputs) if not x.stop_gradient}
        self._leaves |= {f"`{name}`": weight for name, weight in weights.items()}
        self._random = np.random.default_rng(0)
        outputs = self._forward()
        self._factors = [paddle.to_tensor(self._random.standard_normal(y.shape)).astype(y.dtype) for y in outputs]
        self._unit = max((_unit(x) for x in (*outputs, *self._leaves.values())), default=0.0)
        self._size = sum(float((y * v).abs().sum()) for y, v in zip(outputs, self._factors, strict=True))

    def differences(self) -> Iterator[str]:
        """Compare all leaves, and describe the first difference of each."""
        gradients = self._gradients()
        for name, leaf in self._leaves.items():
            values, gradient = leaf.numpy(), gradients[name]
            direction = self._random.choice([-1.0, 1.0], values.shape) * self._random.uniform(0.5, 1.0, values.shape)
            whole = self._derivative(leaf, values, gradient, direction)
            if whole.agrees and not whole.has_kink:
                continue
            found = next(self._wrong_elements(leaf, values, gradient), None)
            if found is not None:
                index, derivative = found
                yield f"element {list(map(int, index))} of {name}: {_text(derivative)}"
            elif not whole.has_kink:
                yield f"{name} along a random direction: {_text(whole)}"

    def _wrong_elements(
        self, leaf: Tensor, values: Array, gradient: Array
    ) -> Iterator[tuple[tuple[Any, ...], _Derivative]]:
        number = min(values.size, _MOST_ELEMENTS)
        for position in sorted(self._random.choice(values.size, number, replace=False)):
            index = np.unravel_index(position, values.shape)
            direction = np.zeros_like(values)
            direction[index] = 1.0
            derivative = self._derivative(leaf, values, gradient, direction)
            if not derivative.agrees and not derivative.has_kink:
                yield index, derivative

    def _forward(self) -> list[Tensor]:
        """The outputs that are real numbers."""
        for buffer, values in self._buffers:
            buffer.set_value(values)
        return [y for y in self._run(self._inputs) if y.is_floating_point()]

    def _sum(self) -> Tensor:
        return sum(((y * v).sum() for y, v in zip(self._forward(), self._factors, strict=True)), start=paddle.zeros([]))

    def _gradients(self) -> dict[str, Array]:
        """The gradient of the sum for each leaf; zeros where there is none."""
        for leaf in self._leaves.values():
            leaf.clear_gradient()
        total = self._sum()
        if not total.stop_gradient:
            total.backward()
        return {
            name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy().astype(np.float64)
            for name, leaf in self._leaves.items()
        }

    def _derivative(self, leaf: Tensor, values: Array, gradient: Array, direction: Array) -> _Derivative:
        """The derivative along a direction, whose largest component is about one."""
        size = float(np.abs(values[direction != 0]).max(initial=1.0))
        step = self._unit ** (1 / 3) * size

        def at(multiple: int) -> float:
            leaf.set_value((values + multiple * step * direction).astype(values.dtype))
            return float(self._sum())

        minus_two, minus, zero, plus, plus_two = (at(multiple) for multiple in range(-2, 3))
        leaf.set_value(values)
        central, wider = (plus - minus) / (2 * step), (plus_two - minus_two) / (4 * step)
        rounding = _ROUNDINGS * self._unit * self._size / step
        right, left = (plus - zero) / step, (zero - minus) / step
        bend = abs(right - left)
        return _Derivative(
            gradient=float((gradient * direction).sum()),
            central=central,
            step=step,
            tolerance=abs(central - wider) + rounding,
            has_kink=bend > max(step**0.5 * max(abs(right), abs(left)), 2 * rounding),
        )


def _text(derivative: _Derivative) -> str:
    return (
        f"{derivative.gradient:.9g} by the backward, {derivative.central:.9g} by central differences "
        f"(step {derivative.step:.2g}, tolerance {derivative.tolerance:.2g})"
    )


def _exact(tensor: Tensor) -> Tensor:
    return tensor.astype("float64") if tensor.is_floating_point() else tensor


def _unit(tensor: Tensor) -> float:
    """Rounding unit of a tensor's type: a layer may compute in a type of its own."""
    return float(paddle.finfo(tensor.dtype).eps) / 2
