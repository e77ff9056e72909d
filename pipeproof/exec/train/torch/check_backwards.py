"""Check of a module's backwards against finite differences, by ``torch.autograd.gradcheck`` in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.gradcheck import GradcheckError, gradcheck

_UNIT: float = torch.finfo(torch.float64).eps / 2
_STEP: float = _UNIT ** (1 / 3)
"""Step of the central differences: their errors of truncation and of rounding are then about equal."""
_MOST_ELEMENTS = 256
"""Elements of a wrong tensor among which the farthest is looked for."""
_ROUNDINGS = 64
"""Roundings of an output that the tolerance allows for, in units of the type."""


@dataclass(frozen=True, slots=True)
class BackwardDifference:
    """A gradient that finite differences refute: of the sum of the layer's outputs, for one element.

    ``layer`` is the innermost module with such a gradient, ``""`` for the module itself. ``tensor`` is a parameter of
    it, or ``input N``.
    """

    layer: str
    tensor: str
    element: tuple[int, ...]
    by_backward: float
    by_differences: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"module `{self.layer}`, element {list(self.element)} of {self.tensor}: {self.by_backward:.9g} by the "
            f"backward, {self.by_differences:.9g} by central differences (step {_STEP:.2g}, tolerance "
            f"{self.tolerance:.2g})"
        )


_Call: TypeAlias = tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]
"""A module and its arguments."""


def check_backwards(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[BackwardDifference, ...]:
    """Compare the backward of a module with finite differences; return one difference for each wrong tensor.

    ``args`` and ``kwargs`` are those of a small forward. A copy in float64 is checked; the random numbers of each
    forward are the same. At a kink, such as ``relu`` at exactly zero, the two differ without a fault.
    """
    exact = copy.deepcopy(module).double()
    return tuple(_differences("", exact, tuple(map(_exact, args)), {name: _exact(x) for name, x in kwargs.items()}))


def _differences(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[BackwardDifference]:
    """Look for the innermost modules with a wrong backward; a module with a right one has none inside."""
    layer = _Layer(name, module, args, kwargs)
    wrong = [leaf for leaf in layer.leaves if not layer.agrees(leaf)]
    if not wrong:
        return []
    inside = {
        child: next((found for call in calls if (found := _differences(f"{name}.{child}".lstrip("."), *call))), [])
        for child, calls in _calls(module, args, kwargs).items()
    }
    return [each for found in inside.values() for each in found] or [layer.farthest(leaf) for leaf in wrong]


def _calls(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, list[_Call]]:
    calls: dict[str, list[_Call]] = {}
    handles = []
    for name, child in module.named_children():

        def note(child: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any], name: str = name) -> None:
            detached = tuple(map(_exact, given)), {key: _exact(value) for key, value in named.items()}
            calls.setdefault(name, []).append((child, *detached))

        handles.append(child.register_forward_pre_hook(note, with_kwargs=True))
    try:
        _seeded(module, args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _Layer:
    """One module and its arguments; ``leaves`` are its inputs and parameters that have a gradient, by name."""

    def __init__(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._name, self._module, self._args, self._kwargs = name, module, args, kwargs
        self._inputs = {f"input {n}": n for n, x in enumerate(args) if _is_real(x)}
        self.leaves: dict[str, torch.Tensor] = {key: args[n] for key, n in self._inputs.items()}
        self.leaves |= {key: weight for key, weight in module.named_parameters() if weight.requires_grad}
        size = max((float(y.detach().abs().sum()) for y in self._outputs("", None)), default=0.0)
        self._tolerance = _ROUNDINGS * _UNIT * size / _STEP

    def agrees(self, leaf: str) -> bool:
        """True if the derivative along random directions is that of finite differences."""
        value = self.leaves[leaf].detach().clone().requires_grad_()
        try:
            gradcheck(
                lambda x: tuple(self._outputs(leaf, x)), (value,), eps=_STEP, atol=self._tolerance, rtol=_STEP,
                check_undefined_grad=False, fast_mode=True,
            )  # fmt: skip
        except GradcheckError:
            return False
        return True

    def farthest(self, leaf: str) -> BackwardDifference:
        """The element of a leaf whose gradient of the outputs' sum is farthest from its central difference."""
        value = self.leaves[leaf].detach().clone().requires_grad_()
        total = self._sum(leaf, value)
        (gradient,) = torch.autograd.grad(total, value, allow_unused=True) if total.requires_grad else (None,)
        gradient = torch.zeros_like(value) if gradient is None else gradient
        number = min(value.numel(), _MOST_ELEMENTS)
        central = {
            i: self._central(leaf, value, i) for i in torch.linspace(0, value.numel() - 1, number).long().tolist()
        }
        flat = gradient.flatten()
        farthest = max(central, key=lambda i: abs(float(flat[i]) - central[i]))
        position = tuple(int(n) for n in torch.unravel_index(torch.tensor(farthest), value.shape))
        tolerance = self._tolerance + _STEP * abs(central[farthest])
        return BackwardDifference(self._name, leaf, position, float(flat[farthest]), central[farthest], tolerance)

    def _central(self, leaf: str, value: torch.Tensor, index: int) -> float:
        """The central difference of the outputs' sum for one element."""
        ends: list[float] = []
        for sign in (1, -1):
            moved = value.detach().clone()
            moved.view(-1)[index] += sign * _STEP
            ends.append(float(self._sum(leaf, moved).detach()))
        return (ends[0] - ends[1]) / (2 * _STEP)

    def _sum(self, leaf: str, value: torch.Tensor) -> torch.Tensor:
        return torch.stack([y.sum() for y in self._outputs(leaf, value)]).sum()

    def _outputs(self, leaf: str, value: torch.Tensor | None) -> list[torch.Tensor]:
        """The outputs that are real numbers, with a value in the place of one leaf."""
        args = list(self._args)
        weights: dict[str, Any] = {}
        if leaf in self._inputs:
            args[self._inputs[leaf]] = value
        elif value is not None:
            weights[leaf] = value
        output = _seeded(self._module, tuple(args), self._kwargs, weights)
        tensors = output if isinstance(output, tuple | list) else (output,)
        return [tensor for tensor in tensors if _is_real(tensor)]


def _seeded(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], weights: Mapping[str, Any] | None = None
) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.func.functional_call(module, dict(weights or {}), args, dict(kwargs))


def _is_real(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _exact(value: Any) -> Any:
    return value.detach().double() if _is_real(value) else value
