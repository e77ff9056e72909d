"""A script's module as one stage of a rank: its forward and backward between boundaries."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from pipeproof.exec.rank.torch.arrays import TorchArrays, as_this_thread
from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.script_framework import ScriptFramework, StageErrors
from pipeproof.exec.train.stage_boundaries import Boundaries
from pipeproof.exec.train.torch.data_parallel import local_part
from pipeproof.exec.train.torch.split_backward import GraphSplit, LinearSplit, require_splittable
from pipeproof.exec.train.torch.stage_values import Leaves, plain_leaves_of
from pipeproof.exec.train.torch.step_loss import Normalize, StepTerms, detached_metrics, loss_terms
from pipeproof.stages.torch.graph_capture import Compiler, KeptBytes, NotCapturedError
from pipeproof.stages.torch.graph_errors import GraphOperationError

_WRAPPER_NAMES = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module)\.")
"""Parts of parameter names that ``torch.compile`` and PyTorch's checkpoint wrapper add."""

_SHAPE_FIX = "give Pipeline an `example` like the micro-batches, under the autocast of the steps"

_IN_PLACE = "a leaf Variable that requires grad is being used in an in-place operation"
_IN_PLACE_FIX = "a stage's first operation on its input cannot be in place: use inplace=False, or clone the input"

LossFunction = Callable[..., Any]
"""The terms (``step_loss.loss_terms``) from the output of the last stage, the target and ``loss_kwargs``."""


# --- Outputs of stages that a micro-batch did not use: they get no gradient, as in the unpartitioned model ---
# A message has zeros in place of such a gradient, and zeros differ from no gradient: a weight behind them would get a
# gradient, which optimizers apply, and 0 times infinity is NaN. So the stage that received the output reports it to the
# stage that made it. On one rank this is a value in memory. Between ranks it goes through the store, in the first step
# for all stages, and from then on for those that had such an output in the first step.


class MissingGradients:
    """The inputs of stages that got no gradient. ``owner`` has the rank of each stage and micro-batch of the step."""

    def __init__(self, agreement: Agreement, owner: Any) -> None:
        self._agreement, self.owner = agreement, owner
        self._own: dict[tuple[int, int], list[int]] = {}
        self._seen: set[int] = set()
        self._exchanged: frozenset[int] | None = None
        """Stages whose inputs may have none; None in the first step."""

    @property
    def is_first_step(self) -> bool:
        """True until ``end_first_step``."""
        return self._exchanged is None

    def put(self, stage: int, index: int, inputs: list[int]) -> None:
        """Note which inputs of a stage got no gradient in a micro-batch.

        Raises:
            PipelineError: one got none, and all did in the first step: the stage before does not ask.
        """
        if self._is_own(stage - 1, index):
            self._own[stage, index] = inputs
        elif self._is_exchanged(stage):
            self._agreement.publish(_key(stage, index), inputs)
        elif inputs:
            raise PipelineError(
                f"stage {stage}, micro-batch {index} does not use output {inputs[0]} of stage {stage - 1}, which all "
                "micro-batches of the first step used: let the stage use it in every step, such as by adding "
                "0 * x.sum() to its output"
            )
        if inputs:
            self._seen.add(stage)

    def take(self, stage: int, index: int) -> Sequence[int]:
        """The inputs of a stage, which are outputs of the stage before, that got no gradient in a micro-batch."""
        if self._is_own(stage, index):
            return self._own.pop((stage, index), ())
        if not self._is_exchanged(stage):
            return ()
        inputs: list[int] = self._agreement.take(_key(stage, index), f"stage {stage} has sent no gradient")
        return inputs

    def end_first_step(self, seen: Sequence[Sequence[int]]) -> None:
        """End the first step; ``seen`` are the ``unused`` of all ranks."""
        self._exchanged = frozenset(stage for own in seen for stage in own)

    @property
    def unused(self) -> list[int]:
        """Stages of this rank that did not use an input in some micro-batch."""
        return sorted(self._seen)

    def _is_own(self, stage: int, index: int) -> bool:
        return int(self.owner[stage, index]) == self._agreement.rank

    def _is_exchanged(self, stage: int) -> bool:
        return self._exchanged is None or stage in self._exchanged


def _key(stage: int, index: int) -> str:
    return f"unused/{stage}/{index}"


# --- The stage ---


@dataclass(slots=True)
class StepData:
    """Arguments of one step by micro-batch, and the results that it collects for the script."""

    args: Sequence[tuple[Any, ...]] = ()
    kwargs: Mapping[int, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Keyword arguments by stage, without stages that get none."""
    targets: Sequence[Any] | None = None
    loss_kwargs: Sequence[Mapping[str, Any]] = ()
    scaler: torch.amp.GradScaler | None = None
    num_losses: int = 1
    """Losses are divided by it before their backward."""
    boundaries: Mapping[int, Boundaries] = field(default_factory=dict)
    """Of this rank's stages."""
    num_replicas: int = 1
    """Losses are multiplied by it before their backward, where data ranks average gradients that are to be added."""
    terms: StepTerms = field(default_factory=StepTerms)
    outputs: dict[int, Any] = field(default_factory=dict)
    """Outputs of the last stage, where there is no target."""


class DeferredWeights:
    """The rest of a backward; a ``WeightGradients``."""

    def __init__(self, work: Callable[[], None] | None, device: str, errors: StageErrors, index: int) -> None:
        self._work, self._device, self._errors, self._index = work, device, errors, index

    def accumulate(self) -> None:
        """Add the weight gradients that were left.

        Raises:
            PipelineError: an operation raised.
        """
        if self._work is not None:
            try:
                with without_autocast(self._device):
                    self._work()
            except GraphOperationError as error:
                raise PipelineError(f"{self._errors.where(self._index)}: {error}") from error
            except Exception as error:
                raise self._errors.raised(error, self._index, "the weight gradients") from error
            self._work = None


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward whose backward has not begun: its micro-batch and inputs, and what runs its backward."""

    index: int
    inputs: Leaves
    split: LinearSplit | GraphSplit | None
    versions: list[int]
    """Numbers of writes of the outputs."""


class ModuleStage:
    """A stage that is a script's module; a ``RankStage``. Gradients are accumulated in ``.grad`` of its parameters.

    ``loss_fn`` is for the last stage; None if its module returns the loss. ``names`` are the plan's names of the
    module's trained parameters. With ``compiler`` the stage runs as graphs; where it cannot, and without, weight
    gradients of ``nn.Linear`` are left to W if ``splits``. Without gradients of its outputs, it is
    frozen and has no backward.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        boundaries: Boundaries,
        loss_fn: LossFunction | None,
        names: Mapping[str, str],
        *,
        normalize: Normalize = "micro_batches",
        splits: bool,
        check_finite: bool,
        compiler: Compiler | None = None,
        is_sharded: bool = False,
    ) -> None:
        self.module, self._boundaries = module, boundaries
        self._loss_fn, self._normalize, self._check_finite = loss_fn, normalize, check_finite
        self.parameters = {names[name]: weight for name, weight in trained(module).items()}
        self._is_last = not boundaries.outputs
        self._splits, self._is_sharded = splits, is_sharded
        self._has_backward = self._is_last or any(spec.has_gradient for spec in boundaries.outputs)
        self._split: LinearSplit | GraphSplit | None = None
        self.split = "whole"
        """The split that this stage runs with; a reason follows where it is not ``graph``, as was asked."""
        self._errors = StageErrors(number, "module", nn.Module, module.named_modules, "/torch/")
        if compiler is None or not self._has_backward:
            self._split_linear("")
        elif is_sharded:
            self._leave_graphs("it is sharded by fully_shard")
        else:
            in_graph = (loss_fn or _output) if self._is_last else None
            self._split, self.split = GraphSplit(module, in_graph, compiler, boundaries.unused), "graph"
            self._begin_graphs()
        self._forwards: dict[int, _Forward] = {}
        """Forwards whose backward has not begun."""
        self._last: tuple[_Forward, Leaves] | None = None
        """The last forward without a backward."""
        self.data = StepData()
        self._missing: MissingGradients | None = None
        self._lost_graph: Literal["", "graph", "outputs"] = ""
        """Reason of a backward with nothing to do: its forward left no graph, or no output was used."""

    @property
    def kept(self) -> list[KeptBytes]:
        """Memory that a forward keeps, of each graph that was captured."""
        return self._split.kept if isinstance(self._split, GraphSplit) else []

    def _begin_graphs(self) -> None:
        if isinstance(self._split, GraphSplit):
            try:
                self._split.begin()
            except NotCapturedError as error:
                self._leave_graphs(str(error))

    def _leave_graphs(self, reason: str) -> None:
        self._split_linear(f": {reason}")
        warnings.warn(f"stage {self._errors.number} does not run as graphs, but as split={self.split}", stacklevel=2)

    def _split_linear(self, reason: str) -> None:
        """Leave the weight gradients of ``nn.Linear`` to W, where the schedule has one."""
        self._split, self.split = None, f"whole{reason}"
        if self._splits:
            try:
                require_splittable(self._errors.number, self.module, is_sharded=self._is_sharded)
            except PipelineError:
                return  # a whole backward has what a hook or a sharded stage needs
            self._split, self.split = LinearSplit(self.module), f"linear{reason}"

    def forward(self, inputs: Leaves, *, step: int, index: int, split: int, watch: object) -> Leaves:
        """Run one micro-batch; the last stage returns its loss, divided, or a placeholder where there is no target.

        Raises:
            PipelineError: the module or the loss function raised, or an output does not fit the boundary.
        """
        form = self._boundaries.input_form
        args, kwargs = (self.data.args[index], {}) if form is None else form.arguments(inputs)
        if self._errors.number in self.data.kwargs:
            kwargs = {**self.data.kwargs[self._errors.number][index], **kwargs}
        with nullcontext() if self._has_backward else torch.no_grad():
            return self._run(inputs, args, kwargs, index)

    def _run(self, inputs: Leaves, args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int) -> Leaves:
        try:
            value = self._value(args, kwargs, index)
            if self._is_last:
                value = self._loss(value, index)
        except PipelineError:
            raise
        except GraphOperationError as error:
            raise PipelineError(f"{self._errors.where(index)}: {error}") from error
        except Exception as error:
            raise self._errors.raised(error, index, fix=_IN_PLACE_FIX if _IN_PLACE in str(error) else "") from error
        outputs = (value,) if self._is_last else (*self._checked(value, index),)  # a new tuple: its id is a key
        if self._check_finite and not all(bool(x.isfinite().all()) for x in outputs if x.is_floating_point()):
            raise PipelineError(self._not_finite(args, kwargs, index))
        done = _Forward(index, inputs, self._split, _versions(outputs))
        if torch.is_grad_enabled():
            self._forwards[id(outputs)] = done
        else:
            if self._last is not None:
                self._require_unchanged(*self._last)
            self._last = done, outputs
        return outputs

    def _require_unchanged(self, forward: _Forward, outputs: Leaves) -> None:
        """Refuse outputs that a later forward has written to: they may not have been received yet."""
        if forward.versions != _versions(outputs):
            raise PipelineError(
                f"{self._errors.where(forward.index)}: the module has changed a tensor in place that it returned "
                "before, which the next stage may receive changed: return a copy, such as buffer.clone()"
            )

    def _value(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int) -> Any:
        """The output of the module; of the last stage the loss, if there is a target or a loss is needed."""
        data = self.data
        target = None if data.targets is None else data.targets[index]
        loss_kwargs = data.loss_kwargs[index] if data.loss_kwargs else {}
        if isinstance(self._split, GraphSplit) and torch.is_grad_enabled():
            try:
                return self._split.forward(args, kwargs, target, loss_kwargs)
            except NotCapturedError as error:
                self._leave_graphs(str(error))
        output = (self._split.forward if isinstance(self._split, LinearSplit) else self.module)(*args, **kwargs)
        if not self._is_last or self._loss_fn is None or (target is None and not torch.is_grad_enabled()):
            return output
        return self._loss_fn(output, target, **loss_kwargs)

    def _loss(self, value: Any, index: int) -> torch.Tensor:
        """The loss as its backward begins with it."""
        data = self.data
        if data.targets is None and not torch.is_grad_enabled():
            data.outputs[index] = value
            return torch.zeros(())
        source = f"{self._errors.where(index)}: {'the module' if self._loss_fn is None else 'loss_fn'}"
        terms = loss_terms(detached_metrics(value), self._normalize, source)
        data.terms.add(index, terms, source)
        loss = terms.loss
        if data.num_losses > 1:
            loss = loss / data.num_losses
        if data.num_replicas > 1:
            loss = loss * data.num_replicas
        return loss if data.scaler is None else data.scaler.scale(loss)

    def _checked(self, value: Any, index: int) -> Leaves:
        form, leaves = plain_leaves_of(value, self._errors.where(index))
        self._errors.require_boundary(self._boundaries, form, leaves, index, _SHAPE_FIX)
        return leaves

    def backward_input(self, outputs: Leaves, gradients: Sequence[torch.Tensor | None]) -> DeferredWeights:
        """Run one micro-batch backward and set ``grad`` of its inputs; zeros where nothing depends on an input.

        Raises:
            PipelineError: the module's backward raised.
        """
        forward = self._forwards.pop(id(outputs))
        index, number = forward.index, self._errors.number
        unused = () if self._is_last or self._missing is None else self._missing.take(number + 1, index)
        self._require_unchanged(forward, outputs)
        if isinstance(forward.split, GraphSplit):
            self._require_as_captured(forward.split, outputs, unused, index)
        pairs = [
            (leaf, gradient)
            for position, (leaf, gradient) in enumerate(zip(outputs, gradients, strict=True))
            if leaf.requires_grad and position not in unused and (gradient is not None or self._is_last)
        ]
        rest: Callable[[], None] | None = None
        if not pairs:
            self._lost_graph = "outputs" if unused else "graph"
        else:
            roots, of_roots = [leaf for leaf, _ in pairs], [gradient for _, gradient in pairs]
            try:
                with without_autocast(roots[0].device.type):
                    if forward.split is not None:
                        rest = forward.split.backward(roots, of_roots)
                    else:
                        torch.autograd.backward(roots, of_roots)
            except GraphOperationError as error:
                raise PipelineError(f"{self._errors.where(index)}: {error}") from error
            except Exception as error:
                raise self._errors.raised(error, index, "the backward") from error
        without = [n for n, leaf in enumerate(forward.inputs) if leaf.requires_grad and leaf.grad is None]
        for position in without:
            forward.inputs[position].grad = torch.zeros_like(forward.inputs[position])
        if self._missing is not None and any(leaf.requires_grad for leaf in forward.inputs):
            form = self._boundaries.input_form
            direct = (
                []
                if form is None
                else [form.keys[n] for n in without if n >= len(forward.inputs) - self._boundaries.num_direct]
            )
            if direct:
                raise PipelineError(
                    f"{self._errors.where(index)} does not use the edge {direct[0]!r}: let the stage use it in every "
                    f"step, such as by adding 0 * {direct[0]}.sum() to its output"
                )
            self._missing.put(number, index, without)
        return DeferredWeights(rest, outputs[0].device.type, self._errors, index)

    def _require_as_captured(self, graphs: GraphSplit, outputs: Leaves, unused: Collection[int], index: int) -> None:
        """Refuse a backward that differs from the graphs: they detach some outputs, and no others."""
        wrong = [n for n, leaf in enumerate(outputs) if leaf.requires_grad and n in unused]
        wrong += [
            n
            for n, spec in enumerate(self._boundaries.outputs)
            if n in graphs.unused and spec.has_gradient and n not in unused
        ]
        if wrong:
            verbs = ("uses", "does not use") if wrong[0] in graphs.unused else ("does not use", "uses")
            raise PipelineError(
                f"{self._errors.where(index)} runs as graphs: stage {self._errors.number + 1} {verbs[0]} output "
                f"{wrong[0]} of it in this micro-batch, and {verbs[1]} it on the example: use split='linear' or 'whole'"
            )

    def require_gradients(self, changed: AbstractSet[int]) -> None:
        """Refuse a stage that a step did not train; ``changed`` has the ids of the parameters with new gradients.

        Raises:
            PipelineError: names the cause, where it is known.
        """
        if not self.parameters or any(id(weight) in changed for weight in self.parameters.values()):
            return
        number = self._errors.number
        cause, fix = "its forward uses none of them", "freeze those that are not to be trained (requires_grad_(False))"
        if self._lost_graph == "outputs":
            cause = f"stage {number + 1} uses no output of this stage, or detaches it"
        elif self._lost_graph and self._recomputes_reentrantly():
            cause = "activation checkpointing with use_reentrant=True gives none where no input requires a gradient"
            fix = "pass use_reentrant=False"
        elif self._lost_graph:
            cause = "its outputs do not depend on them, because it detaches them or runs without gradients"
        raise PipelineError(f"stage {number}: no trained parameter got a gradient in the first step: {cause}; {fix}")

    def _recomputes_reentrantly(self) -> bool:
        """Run a micro-batch of the first stage again: PyTorch warns of checkpointing that gives no gradients."""
        if not self.data.args:
            return False
        kwargs = self.data.kwargs[0][0] if 0 in self.data.kwargs else {}
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            self.module(*self.data.args[0], **kwargs)
        return any("None of the inputs have requires_grad=True" in str(warning.message) for warning in warned)

    def return_gradients(self) -> None:
        """Do nothing: stages of one rank that share a weight hold the same Parameter."""

    def begin(self, data: StepData, missing: MissingGradients | None = None) -> None:
        """Begin a step; ``missing`` has the outputs that other stages did not use, None for a stage alone."""
        self.data, self._boundaries = data, data.boundaries.get(self._errors.number, self._boundaries)
        self._missing = missing
        self._begin_graphs()

    def end(self) -> None:
        """End a step: keep nothing of it."""
        self._forwards.clear()
        self._last = None
        self.data = StepData()

    def _not_finite(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int) -> str:
        """Run the micro-batch again, and name the first module with an output that is not finite."""
        module_names: list[str] = []

        def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                leaves = output if isinstance(output, tuple | list) else [output]
                tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
                if not module_names and not all(bool(x.isfinite().all()) for x in tensors):
                    module_names.append(name)

            return hook

        handles = [part.register_forward_hook(look(name)) for name, part in self.module.named_modules()]
        try:
            with torch.no_grad():
                self.module(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        elsewhere = "in the loss function" if self._is_last else "and were finite when the stage ran again"
        where = f"first in module `{module_names[0] or type(self.module).__name__}`" if module_names else elsewhere
        return f"{self._errors.where(index)}: values are not finite, {where}"


def _output(output: Any, _: Any) -> Any:
    """The output, of a last stage that computes its loss itself."""
    return output


def _versions(outputs: Leaves) -> list[int]:
    return [0 if leaf.is_inference() else leaf._version for leaf in outputs]  # noqa: SLF001 - no public query


def without_autocast(device: str) -> AbstractContextManager[object]:
    """The backward runs in the types of the forward, not in the types of an autocast around the whole step."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def trained(module: nn.Module, *, repeats: bool = False, frozen: bool = False) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer updates, by their names in the module without the parts that wrappers add.

    With ``repeats`` a parameter is listed under each of its names, else under the first one. With ``frozen`` the others
    are listed, too.
    """
    inner = module.module if type(module).__name__ == "DistributedDataParallel" else module
    every = inner.named_parameters(remove_duplicate=not repeats)
    named = {name: weight for name, weight in every if weight.requires_grad or frozen}
    return {_WRAPPER_NAMES.sub("", name): weight for name, weight in named.items()}


class TorchModules(ScriptFramework[ModuleStage]):
    """PyTorch with the modules of one rank. A weight is a ``Parameter``."""

    def __init__(self, device: torch.device, stages: Mapping[int, ModuleStage]) -> None:
        super().__init__(TorchArrays(device), stages)
        self._device = device

    def as_this_thread(self) -> Callable[[], None]:
        """Return a call that makes another thread use this one's device and modes."""
        return as_this_thread(self._device)

    def gradient(self, weight: nn.Parameter) -> torch.Tensor:
        """The gradient; of a ``DTensor`` this rank's part, laid out as the weight."""
        if weight.grad is None:
            return local_part(torch.zeros_like(weight))
        placements = getattr(weight, "placements", None)
        if placements is not None and weight.grad.placements != placements:
            weight.grad = weight.grad.redistribute(placements=placements)
        return local_part(weight.grad)

    def put_gradient(self, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        """Replace the gradient; for a sharded weight, the gradient of this rank's shard."""
        if hasattr(weight, "placements"):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            local_part(weight.grad).copy_(gradient)
        else:
            weight.grad = gradient
