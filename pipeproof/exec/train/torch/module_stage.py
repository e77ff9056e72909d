"""A script's module as one stage of a rank: its forward and backward between boundaries."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pipeproof.exec.train.stage_boundaries import Boundaries
from pipeproof.exec.train.stage_errors import StageErrors
from pipeproof.exec.train.torch.split_linear import LinearSplit
from pipeproof.exec.train.torch.stage_values import Leaves, plain_leaves_of
from pipeproof.exec.train.train_errors import PipelineError

_WRAPPER_NAMES = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")
"""Parts of parameter names that ``torch.compile`` and PyTorch's checkpoint wrapper add."""

_SHAPE_FIX = "give Pipeline an `example` like the micro-batches, under the autocast of the steps"

LossFunction = Callable[[Any, Any], torch.Tensor]


@dataclass(slots=True)
class StepData:
    """Arguments of one step by micro-batch, and the results that it collects for the script."""

    args: Sequence[tuple[Any, ...]] = ()
    kwargs: Sequence[Mapping[str, Any]] = ()
    targets: Sequence[Any] | None = None
    scaler: torch.amp.GradScaler | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    """Detached losses of micro-batches, each as the loss function returned it."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """Outputs of the last stage, where there is no target."""


class DeferredWeights:
    """The rest of a backward; a ``WeightGradients``."""

    def __init__(self, work: Callable[[], None] | None = None, device: str = "cpu") -> None:
        self._work, self._device = work, device

    def accumulate(self) -> None:
        """Add the weight gradients that were left."""
        if self._work is not None:
            with without_autocast(self._device):
                self._work()
            self._work = None


class ModuleStage:
    """A stage that is a script's module; a ``RankStage``. Gradients are accumulated in ``.grad`` of its parameters.

    ``loss_fn`` is for the last stage; None if its module returns the loss. The loss is divided by ``num_losses``
    before its backward. ``names`` are the plan's names of the module's trained parameters.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        boundaries: Boundaries,
        loss_fn: LossFunction | None,
        names: Mapping[str, str],
        *,
        num_losses: int,
        splits: bool,
        check_finite: bool,
    ) -> None:
        self.module, self._boundaries = module, boundaries
        self._loss_fn, self._num_losses, self._check_finite = loss_fn, num_losses, check_finite
        self.parameters = {names[name]: weight for name, weight in trained(module).items()}
        self._is_last = not boundaries.outputs
        self._split = LinearSplit(module) if splits else None
        self._errors = StageErrors(number, "module", nn.Module, module.named_modules, "/torch/")
        self._inputs: dict[int, tuple[int, Leaves]] = {}
        """Micro-batch and inputs of each forward whose backward has not begun."""
        self.data = StepData()

    def forward(self, inputs: Leaves, *, step: int, index: int, split: int, watch: object) -> Leaves:
        """Run one micro-batch; the last stage returns its loss, divided, or a placeholder where there is no target.

        Raises:
            PipelineError: the module or the loss function raised, or an output does not fit the boundary.
        """
        form = self._boundaries.input_form
        args, kwargs = (self.data.args[index], {}) if form is None else form.arguments(inputs)
        if self.data.kwargs:
            kwargs = {**self.data.kwargs[index], **kwargs}
        try:
            value = (self.module if self._split is None else self._split.forward)(*args, **kwargs)
            if self._is_last:
                value = self._loss(value, index)
        except PipelineError:
            raise
        except Exception as error:
            raise self._errors.raised(error, index) from error
        outputs = (value,) if self._is_last else (*self._checked(value, index),)  # a new tuple: its id is a key
        if self._check_finite and not all(bool(x.isfinite().all()) for x in outputs if x.is_floating_point()):
            raise PipelineError(self._not_finite(args, kwargs, index))
        if torch.is_grad_enabled():
            self._inputs[id(outputs)] = index, inputs
        return outputs

    def _loss(self, output: Any, index: int) -> torch.Tensor:
        data = self.data
        if data.targets is None and not torch.is_grad_enabled():
            data.outputs[index] = output
            return torch.zeros(())
        target = None if data.targets is None else data.targets[index]
        loss = output if self._loss_fn is None else self._loss_fn(output, target)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PipelineError(f"{self._errors.where(index)}: the loss is {kind}: return a scalar tensor")
        data.losses[index] = loss.detach()
        if self._num_losses > 1:
            loss = loss / self._num_losses
        return loss if data.scaler is None else data.scaler.scale(loss)

    def _checked(self, value: Any, index: int) -> Leaves:
        """The leaves of an output, which must be those of the boundary."""
        form, leaves = plain_leaves_of(value, self._errors.where(index))
        self._errors.require_boundary(self._boundaries, form, leaves, index, _SHAPE_FIX)
        return leaves

    def backward_input(self, outputs: Leaves, gradients: Sequence[torch.Tensor | None]) -> DeferredWeights:
        """Run one micro-batch backward and set ``grad`` of its inputs; zeros where nothing depends on an input.

        Raises:
            PipelineError: the module's backward raised.
        """
        index, received = self._inputs.pop(id(outputs))
        inputs = [leaf for leaf in received if leaf.requires_grad]
        pairs = [
            (leaf, gradient)
            for leaf, gradient in zip(outputs, gradients, strict=True)
            if leaf.requires_grad and (gradient is not None or self._is_last)
        ]
        rest: Callable[[], None] | None = None
        if pairs:
            roots, of_roots = [leaf for leaf, _ in pairs], [gradient for _, gradient in pairs]
            try:
                with without_autocast(roots[0].device.type):
                    if self._split is not None:
                        rest = self._split.backward(roots, of_roots, inputs)
                    else:
                        torch.autograd.backward(roots, of_roots)
            except Exception as error:
                raise self._errors.raised(error, index, "the backward") from error
        for leaf in inputs:
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        return DeferredWeights(rest, outputs[0].device.type)

    def return_gradients(self) -> None:
        """Do nothing: stages of one rank that share a weight hold the same Parameter."""

    @property
    def takes_arguments(self) -> bool:
        """True if the first stage's module cannot be called without positional arguments."""
        parameters = inspect.signature(self.module.forward).parameters.values()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return any(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)

    def begin(self, data: StepData) -> None:
        """Begin a step."""
        self._inputs.clear()
        self.data = data

    def _not_finite(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int) -> str:
        """Run the micro-batch again, and name the first module with an output that is not finite."""
        found: list[str] = []

        def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                leaves = output if isinstance(output, tuple | list) else [output]
                tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
                if not found and not all(bool(x.isfinite().all()) for x in tensors):
                    found.append(name)

            return hook

        handles = [part.register_forward_hook(look(name)) for name, part in self.module.named_modules()]
        try:
            with torch.no_grad():
                self.module(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        elsewhere = "in the loss function" if self._is_last else "and were finite when the stage ran again"
        where = f"first in module `{found[0] or type(self.module).__name__}`" if found else elsewhere
        return f"{self._errors.where(index)}: values are not finite, {where}"


def without_autocast(device: str) -> AbstractContextManager[object]:
    """The backward runs in the types of the forward, not in those of an autocast around the whole step."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@contextmanager
def gradients_aside(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put gradients aside for backwards that are not the script's, and back again."""
    weights = [weight for module in modules for weight in module.parameters()]
    aside = [weight.grad for weight in weights]
    try:
        for weight in weights:
            weight.grad = None
        yield
    finally:
        for weight, gradient in zip(weights, aside, strict=True):
            weight.grad = gradient


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by their names in the module without those of wrappers."""
    inner = module.module if type(module).__name__ == "DistributedDataParallel" else module
    named = {name: weight for name, weight in inner.named_parameters() if weight.requires_grad}
    return {_WRAPPER_NAMES.sub("", name): weight for name, weight in named.items()}
