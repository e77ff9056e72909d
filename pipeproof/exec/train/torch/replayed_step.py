"""Training steps of a script's modules as one CUDA graph: the third step is captured, and replayed from then on.

The first two load kernels, compile, and show which parameters receive a gradient. A graph reads the memory of the
captured step's arguments and adds to the memory of its gradients. So each step copies its arguments there, and those
tensors are the gradients of the script's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from pipeproof.exec.rank.torch.cuda_graph import CaptureStream
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.stage_boundaries import kind_text
from pipeproof.exec.train.torch.module_stage import StepData
from pipeproof.exec.train.torch.step_inputs import SCALARS

_NUM_WARM_UPS = 2
MOST_GRAPHS = 8
"""CUDA graphs that a pipeline keeps, one for each signature; steps of further signatures run operation by operation."""


class Replays:
    """The replayed steps of one rank, by the words of their signatures; ``trained``: see ``ReplayedStep``."""

    def __init__(self, trained: Callable[[], Mapping[str, nn.Parameter]], stream: CaptureStream) -> None:
        self._trained, self._stream = trained, stream
        self._gradients: dict[str, torch.Tensor] = {}
        self._steps: dict[Hashable, ReplayedStep] = {}

    def of(self, words: Hashable, signatures: Container[Hashable]) -> ReplayedStep | None:
        """The steps of one signature; None if there are already ``MOST_GRAPHS`` others that are ``signatures``."""
        if words not in self._steps:
            self._steps = {each: step for each, step in self._steps.items() if each in signatures}
            if len(self._steps) >= MOST_GRAPHS:
                return None
            self._steps[words] = ReplayedStep(self._trained, self._stream, self._gradients)
        return self._steps[words]

    def close(self) -> None:
        """Drop all captured steps."""
        self._steps.clear()


class ReplayedStep:
    """The steps of one signature; ``trained`` returns the trained parameters, by their names for messages.

    ``gradients`` are the tensors that captured steps add to, by these names, common to all signatures.
    """

    def __init__(
        self,
        trained: Callable[[], Mapping[str, nn.Parameter]],
        stream: CaptureStream,
        gradients: dict[str, torch.Tensor],
    ) -> None:
        self._trained, self._parameters, self._stream = trained, trained(), stream
        self._memory = gradients
        self._num_run = 0
        self.last_op = -1
        """The last operation of the step, which the device reports at the end of a replay."""
        self._received: set[str] = set()
        """Names of the parameters with a gradient after the first steps."""
        self._inputs: list[Any] = []
        self._form: TreeSpec | None = None
        self._gradients: dict[str, torch.Tensor] = {}
        self._addresses: dict[str, int] = {}
        self._result = StepData()
        self._replay: Callable[[], None] | None = None

    @property
    def is_captured(self) -> bool:
        """True once steps are replayed."""
        return self._replay is not None

    def run(self, values: Any, execute: Callable[[Any], StepData]) -> StepData:
        """Run a step on ``values``, the argument of ``execute``: by it, or by a replay of it. Returns its loss terms.

        Raises:
            PipelineError: the step cannot be captured, or differs from the captured one in something that a graph
                keeps.
        """
        leaves, form = tree_flatten(values)
        leaves = _distinct(leaves)
        if self._num_run < _NUM_WARM_UPS:
            self._num_run += 1
            result = self._stream.run(lambda: execute(tree_unflatten(leaves, form)))
            self._received |= {name for name, weight in self._parameters.items() if weight.grad is not None}
            return result
        if self._replay is None:
            self._replay = self._captured(leaves, form, execute)
        self._require_same(leaves, form)
        self._attach_gradients()
        for memory, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                memory.copy_(leaf, non_blocking=True)
        self._replay()
        return StepData(terms=self._result.terms.copied())  # the next replay writes to the captured ones

    def _captured(
        self, leaves: Sequence[Any], form: TreeSpec, execute: Callable[[Any], StepData]
    ) -> Callable[[], None]:
        for name, weight in self._parameters.items():
            if name in self._received:
                if name not in self._memory:
                    self._memory[name] = torch.zeros_like(weight) if weight.grad is None else weight.grad
                self._gradients[name] = self._memory[name]
        self._attach_gradients()
        self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._form = form
        self._addresses = {name: weight.data_ptr() for name, weight in self._parameters.items()}

        def work() -> None:
            self._result = execute(tree_unflatten(self._inputs, form))

        try:
            replay = self._stream.captured(work)
        except RuntimeError as error:
            first: BaseException = error
            while first.__context__ is not None:  # the end of a capture hides the error that ended it
                first = first.__context__
            raise PipelineError(
                f"replay=True: the step cannot be captured as a CUDA graph, use replay=False: {first}; a module may "
                "read a value on the host, or draw from a generator other than the GPU's default"
            ) from error
        for name, weight in self._parameters.items():
            if weight.grad is not self._gradients.get(name):
                raise PipelineError(
                    f"replay=True: the gradient of {name} is not added up in place, or is there in some steps alone: "
                    "use replay=False"
                )
        return replay

    def _attach_gradients(self) -> None:
        """Make the captured tensors the gradients of the parameters, with the current values of the gradients."""
        unset = []
        for name, memory in self._gradients.items():
            weight = self._parameters[name]
            if weight.grad is None:
                unset.append(memory)
            elif weight.grad is not memory:
                memory.copy_(weight.grad)
            weight.grad = memory
        if unset:
            torch._foreach_zero_(unset)

    def _require_same(self, leaves: Sequence[Any], form: TreeSpec) -> None:
        fix = "a replayed step has the shapes and values of the captured one: use replay=False, or another Pipeline"
        if form != self._form:
            raise PipelineError(f"replay=True: the arguments of this step have another structure; {fix}")
        for position, (memory, leaf) in enumerate(zip(self._inputs, leaves, strict=True)):
            current, there = _about(leaf), _about(memory)
            if current != there:
                raise PipelineError(f"replay=True: argument {position} of this step is {current}, not {there}; {fix}")
        for name, weight in self._trained().items():
            is_known = weight is self._parameters.get(name)
            if not is_known or weight.data_ptr() != self._addresses[name]:
                raise PipelineError(
                    f"replay=True: parameter {name} is not the one of the captured step, or has other memory: load "
                    "values with copy_, or make the Pipeline afterwards"
                )


def require_replayable(device: torch.device, *, is_sharded: bool, reads: bool) -> None:
    """Refuse a pipeline whose steps cannot be captured; ``reads`` if each output is tested on the host.

    Raises:
        PipelineError: names the reason.
    """
    for is_refused, reason in (
        (device.type != "cuda", f"a step is captured on a GPU, and the modules are on {device.type}"),
        (is_sharded, "fully_shard allocates gathered weights in each step"),
        (reads, "check_finite=True reads every output on the host"),
    ):
        if is_refused:
            raise PipelineError(f"replay=True: {reason}; use replay=False")


def _distinct(leaves: Sequence[Any]) -> list[Any]:
    """The leaves, with a view in place of a tensor that occurs again, such as tokens that are also the target.

    Compiled code depends on which arguments are one object, and nothing may compile during a capture, whose arguments
    are copies.
    """
    seen, distinct = set[int](), list[Any]()
    for leaf in leaves:
        occurs_again = isinstance(leaf, torch.Tensor) and id(leaf) in seen and not leaf.requires_grad
        seen.add(id(leaf))
        distinct.append(leaf.view_as(leaf) if occurs_again else leaf)
    return distinct


def _about(leaf: Any) -> str:
    """Type and shape of a tensor; a scalar as text; the identity of any other object, such as a ``BlockMask``."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, SCALARS) else f"{kind_text(leaf)} at {id(leaf):#x}"
