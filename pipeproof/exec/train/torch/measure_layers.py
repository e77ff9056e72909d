"""Times and memory of layers of a PyTorch model, measured as a stage.

Computations are repeated without a pause: the GPU then has the clock of a busy GPU. If the host is slower than the GPU,
the GPU gets other work until the host is ahead. This shows the GPU's own times next to the host's: one layer may be
limited by the host where two are not, and a replayed step has no host. A waiting GPU would draw less power and have a
clock that it never has in a step: on an H200 1,900 MHz instead of 1,600.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from pipeproof.analysis.tune.layer_cuts import LayerCost
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.layer_samples import RunWay, Sample, host_times, plain_settings
from pipeproof.exec.train.stage_boundaries import Boundaries, Form, LeafSpec
from pipeproof.exec.train.torch.boundary_inference import unchanged_state
from pipeproof.exec.train.torch.cut_transformers import stages_of_transformers
from pipeproof.exec.train.torch.meta_buffers import with_memory
from pipeproof.exec.train.torch.model_stages import ModelStages, SequentialStage, stages_of_sequential
from pipeproof.exec.train.torch.module_stage import LossFunction, ModuleStage, StepData, trained
from pipeproof.exec.train.torch.split_backward import LinearSplit, gradients_aside
from pipeproof.exec.train.torch.stage_values import plain_leaves_of

_INDEX_NAMES = frozenset(
    {"training", "layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_id", "idx", "index"}
)
"""Attributes of a module that give its position in the model, and do not change its result."""
_WARM_UPS, _LEAST_ROUNDS = 3, 5
_LEAST_S = 5.0
"""Time of the rounds of one sample on a GPU. An idle GPU needs a second to lower its clock to what its power limit
allows, and some more to get warm: at 60 degrees an H200 was 3 % slower than at 53.
"""
_ROUNDS_AHEAD = 3
"""Rounds that the host launches without waiting; the queue of a GPU holds about 1,000 launches."""
_LOAD_SIZE = 4096
"""Rows and columns of the matrices that are multiplied while a GPU waits for the host."""


@dataclass(frozen=True)
class Cutter:
    """A model as a chain of layers that can be cut anywhere: one of ``transformers``, or an ``nn.Sequential``.

    The layers of the first are the embedding, the blocks and the head; the layers of the second are its modules.
    """

    model: nn.Module
    blocks: tuple[nn.Module, ...]
    has_ends: bool
    example: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, model: nn.Module, example: Mapping[str, Any] | None = None) -> Cutter:
        """The layers of a model.

        Raises:
            PipelineError: it is not a known chain of layers.
        """
        if isinstance(model, nn.Sequential):
            return cls(model, tuple(model._modules.values()), has_ends=False)  # noqa: SLF001 - repeated ones, too
        if not hasattr(model, "config"):
            raise PipelineError(
                f"{type(model).__name__} is neither a model of transformers nor an nn.Sequential: its layers are "
                "unknown, and it cannot be cut; put its blocks into an nn.Sequential"
            )
        (whole,) = stages_of_transformers(model, 1, example=example).values()
        return cls(model, tuple(whole.blocks.values()), has_ends=True, example=example)

    @property
    def is_meta(self) -> bool:
        """True if weights are on the meta device: layers get memory only while they are measured or run."""
        return any(weight.is_meta for weight in self.model.parameters())

    @property
    def num_layers(self) -> int:
        """Layers: the blocks, and with ``has_ends`` the embedding before and the head behind them."""
        return len(self.blocks) + 2 * self.has_ends

    def can_recompute(self, layer: int) -> bool:
        """True for a block with a switch for activation checkpointing, as blocks of transformers have.

        A module of an ``nn.Sequential`` needs none, but may have no buffers: a second forward would change statistics.
        """
        block = self.block(layer)
        if self.has_ends or block is None:
            return hasattr(block, "gradient_checkpointing")
        return not [*block.buffers()]

    def stages(self, sizes: Sequence[int]) -> ModelStages:
        """The stages of a cut: the number of layers of each."""
        if not self.has_ends:
            return stages_of_sequential(self.model, len(sizes), sizes=sizes)
        blocks = self.blocks_of(sizes)
        return stages_of_transformers(self.model, len(blocks), blocks_per_stage=blocks, example=self.example)

    def blocks_of(self, sizes: Sequence[int]) -> list[int]:
        """The blocks of each stage of a cut, without the embedding and the head."""
        blocks = list(sizes)
        if self.has_ends:
            blocks[0] -= 1
            blocks[-1] -= 1
        return blocks

    def block(self, layer: int) -> nn.Module | None:
        """The module of a layer; None for the embedding and the head."""
        number = layer - self.has_ends
        return self.blocks[number] if 0 <= number < len(self.blocks) else None

    def signature(self, layer: int) -> str:
        """A text of the layer's computation: equal for identical layers."""
        block = self.block(layer)
        if block is None:
            return f"end {layer}"
        parts = [
            (name, type(part).__qualname__, plain_settings(part, _INDEX_NAMES)) for name, part in block.named_modules()
        ]
        weights = [(name, tuple(w.shape), str(w.dtype), w.requires_grad) for name, w in block.named_parameters()]
        return str((parts, weights))

    def run_as(self, way: RunWay, recomputed: Iterable[int] | None = None) -> None:
        """Compile the blocks or not, and recompute the activations of ``recomputed`` layers, by default as ``way``."""
        every = range(self.num_layers)
        chosen = {id(self.block(n)) for n in (every if recomputed is None else recomputed) if self.can_recompute(n)}
        if recomputed is None and not way.recomputes:
            chosen.clear()
        for number, block in enumerate(self.blocks):
            if way.is_compiled and block._compiled_call_impl is None:  # noqa: SLF001 - no public query
                block.compile()
            elif not way.is_compiled:
                block._compiled_call_impl = None  # noqa: SLF001 - no public way back
            for part in block.modules():
                if isinstance(vars(part).get("forward"), partial) and isinstance(
                    getattr(part.forward.func, "__self__", None), LinearSplit
                ):
                    del part.forward
            recomputes = id(block) in chosen
            if not self.has_ends:
                _wrap(block, recomputes=recomputes)
            elif self.can_recompute(number + 1):
                block.gradient_checkpointing = recomputes
                if recomputes:
                    block._gradient_checkpointing_func = partial(  # noqa: SLF001 - as gradient_checkpointing_enable
                        torch.utils.checkpoint.checkpoint, use_reentrant=False
                    )


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a block; a function of its own, because ``torch.compile`` skips calls of ``checkpoint`` alone."""
    return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _wrap(block: nn.Module, *, recomputes: bool) -> None:
    """Let a block recompute its activations, or remove the wrapper."""
    own = vars(block).get("forward")
    is_wrapped = isinstance(own, partial) and own.func is _checkpointed
    if recomputes and not is_wrapped:
        block.forward = partial(_checkpointed, block.forward)
    elif is_wrapped and not recomputes:
        del block.forward
        if getattr(own.args[0], "__func__", None) is not type(block).forward:  # the script's own
            block.forward = own.args[0]


def weight_bytes(weights: Iterable[torch.Tensor]) -> tuple[int, int]:
    """The bytes of weights, and of those that are trained."""
    sizes = [(w.numel() * w.element_size(), w.requires_grad) for w in weights]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def cut_around(cutter: Cutter, sample: Sample) -> tuple[ModelStages, int]:
    """A cut in which a sample is one stage, and the number of this stage."""
    before, behind = sample.first, cutter.num_layers - sample.first - sample.num
    sizes = [size for size in (before, sample.num, behind) if size]
    return cutter.stages(sizes), int(before > 0)


@dataclass(frozen=True)
class Batch:
    """One micro-batch: positional arguments of the first stage, keyword arguments of all, and the target."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    loss_fn: LossFunction | None

    @property
    def num_rows(self) -> int:
        """The rows of its first tensor."""
        values = (*self.args, *self.kwargs.values())
        return next((len(each) for each in values if isinstance(each, torch.Tensor) and each.dim()), 1)

    def resized(self, num_rows: int | None) -> Batch:
        """The batch with ``num_rows`` rows: its first rows, or all rows repeated; None for the batch itself."""
        if num_rows is None:
            return self
        kwargs = {name: self._rows(value, num_rows) for name, value in self.kwargs.items()}
        args = tuple(self._rows(value, num_rows) for value in self.args)
        return Batch(args, kwargs, self._rows(self.target, num_rows), self.loss_fn)

    def _rows(self, value: Any, num_rows: int) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) != self.num_rows:
            return value
        return torch.cat([value] * -(-num_rows // self.num_rows))[:num_rows]

    def on(self, device: torch.device) -> Batch:
        """The batch on a device."""
        args, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(device), (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)


def measure_sample(
    cutter: Cutter, sample: Sample, way: RunWay, batch: Batch, device: torch.device
) -> tuple[LayerCost, str]:
    """The cost of a stage of these layers, and the reason if it does not run in this way; else an empty text."""
    stages, number = cut_around(cutter, sample)
    cutter.run_as(way)
    module, is_last = stages[number], number == len(stages) - 1
    kwargs = _accepted(module, batch.kwargs)
    with unchanged_state(stages.values(), device), torch.no_grad():
        value = _input_of(stages, number, batch.on(torch.device("meta")) if cutter.is_meta else batch)
        arguments = batch.args if not number else value if isinstance(value, tuple) else (value,)
        arguments = tuple(map(partial(_with_values, device=device), arguments))
    with with_memory([module], device):
        return _measured(module, number, way, (arguments, kwargs, batch), device, is_last=is_last)


def _measured(
    module: nn.Module, number: int, way: RunWay, inputs: tuple[tuple[Any, ...], Mapping[str, Any], Batch],
    device: torch.device, *, is_last: bool,
) -> tuple[LayerCost, str]:  # fmt: skip
    arguments, kwargs, batch = inputs
    with unchanged_state([module], device), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        versions = [x._version for x in arguments if isinstance(x, torch.Tensor)]  # noqa: SLF001 - no public query
        output = module(*arguments, **kwargs)
        is_changed = versions != [x._version for x in arguments if isinstance(x, torch.Tensor)]  # noqa: SLF001
    if way.recomputes and is_changed:
        return LayerCost(), "it changes its input, which a second forward needs"
    boundaries = _boundaries(output, number, is_last=is_last)
    names = {name: name for name in trained(module)}
    weights = list(module.parameters())
    with gradients_aside(weights), unchanged_state([module], device), torch.enable_grad():
        stage = ModuleStage(
            number, module, boundaries, batch.loss_fn if is_last else None, names, splits=way.split != "whole",
            check_finite=False, compiler="inductor" if way.split == "graph" else None,
        )  # fmt: skip
        run = _Repeated(stage, number, arguments, kwargs, batch.target if is_last else None, output, device)
        cost = run.cost()
    reason = stage.split.partition(": ")[2] if way.split == "graph" and stage.split != "graph" else ""
    return cost, reason


def _input_of(stages: ModelStages, number: int, batch: Batch) -> Any:
    """The input of a stage: the output of the stages before it."""
    value: Any = batch.args
    with torch.compiler.set_stance("force_eager"):
        for earlier in range(number):
            arguments = value if isinstance(value, tuple) else (value,)
            value = stages[earlier](*arguments, **_accepted(stages[earlier], batch.kwargs))
    return value


def _with_values(value: Any, device: torch.device) -> Any:
    """A value of the meta device as a tensor of a device: random numbers, or zeros, which are valid indices."""
    if not isinstance(value, torch.Tensor) or not value.is_meta:
        return value
    is_random = value.is_floating_point()
    return torch.randn_like(value, device=device) if is_random else torch.zeros_like(value, device=device)


def _accepted(module: nn.Module, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {} if isinstance(module, SequentialStage) else kwargs


def _boundaries(output: Any, number: int, *, is_last: bool) -> Boundaries:
    tensor = Form("tensor")
    if is_last:
        return Boundaries(tensor if number else None, tensor, ())
    form, leaves = plain_leaves_of(output, f"stage {number}")
    specs = tuple(LeafSpec.of(leaf, has_gradient=leaf.is_floating_point()) for leaf in leaves)
    return Boundaries(Form("tuple") if number else None, form, specs)


class _Repeated:
    """F, I and W of one stage again and again."""

    def __init__(
        self, stage: ModuleStage, number: int, arguments: Sequence[Any], kwargs: Mapping[str, Any], target: Any,
        output: Any, device: torch.device,
    ) -> None:  # fmt: skip
        self._stage, self._number, self._arguments, self._device = stage, number, tuple(arguments), device
        self._kwargs, self._target = kwargs, target
        leaves = [x for x in (output if isinstance(output, tuple) else (output,)) if isinstance(x, torch.Tensor)]
        self._gradients = [torch.randn_like(leaf) if leaf.is_floating_point() else None for leaf in leaves]
        self._is_gpu = device.type == "cuda"
        if self._is_gpu:
            dtypes = [weight.dtype for weight in stage.module.parameters()]
            self._occupy = _Load(device, dtypes[0] if dtypes else torch.float32).occupy

    def cost(self) -> LayerCost:
        """The median times of rounds in the later half of many, and the memory of one.

        Raises:
            PipelineError: the module raised.
        """
        for _ in range(_WARM_UPS):
            self._round(lambda: None)
        memory = self._memory()
        if not self._is_gpu:
            forward, inputs, weights = host_times(self._round)
            return replace(memory, forward=forward, backward_input=inputs, backward_weight=weights)
        on_device: list[list[Any]] = []
        on_host: list[list[int]] = []
        behind_load: list[int] = []
        lead, fastest = 0.0, float("inf")
        end = time.monotonic() + _LEAST_S
        while len(on_host) < _LEAST_ROUNDS or time.monotonic() < end:
            is_ahead = len(on_host) >= _ROUNDS_AHEAD
            if is_ahead:
                on_device[-_ROUNDS_AHEAD][-1].synchronize()  # the others are launched, and keep the GPU busy
            if lead > 0 and len(on_host) % _ROUNDS_AHEAD == 0:
                self._occupy(lead)
                behind_load.append(len(on_host))
            on_device.append([])
            on_host.append([])
            self._round(partial(self._mark, on_device[-1], on_host[-1]))
            if is_ahead:
                marks = on_device[-1 - _ROUNDS_AHEAD]
                host = on_host[-1][-1] - on_host[-1][0]
                fastest = min(fastest, _elapsed_ns(marks[0], marks[-1]))
                lead = _ROUNDS_AHEAD * (host - fastest / 2)
        torch.cuda.synchronize(self._device)
        later = range(len(on_host) // 2, len(on_host))
        # The host is farthest ahead in the first round behind other work; the GPU may have waited for it in the others.
        seen = [n for n in behind_load if n in later] or later
        times = [[_elapsed_ns(*each) for each in pairwise(on_device[n])] for n in seen]
        forward, inputs, weights = (int(median(each)) for each in zip(*times, strict=True))
        return replace(
            memory, forward=forward, backward_input=inputs, backward_weight=weights,
            host=int(median(on_host[n][-1] - on_host[n][0] for n in later)),
        )  # fmt: skip

    def _round(self, mark: Callable[[], None]) -> None:
        inputs = tuple(
            x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) and self._number else x
            for x in self._arguments
        )
        data = StepData(args=[inputs], targets=None if self._target is None else [self._target])
        if self._kwargs:
            data.kwargs = {self._number: [self._kwargs]}
        self._stage.begin(data)
        mark()
        outputs = self._stage.forward(inputs if self._number else (), step=0, index=0, split=0, watch=None)
        mark()
        gradients = [None] if len(outputs) == 1 and outputs[0].dim() == 0 else self._gradients
        rest = self._stage.backward_input(outputs, gradients)
        del outputs, inputs
        mark()
        rest.accumulate()
        mark()
        self._stage.end()

    def _mark(self, on_device: list[Any], on_host: list[int]) -> None:
        on_host.append(time.perf_counter_ns())
        on_device.append(torch.cuda.Event(enable_timing=True))
        on_device[-1].record()

    def _memory(self) -> LayerCost:
        """The bytes that one round keeps and needs; on a CPU the bytes that autograd keeps, all of them until W."""
        if not self._is_gpu:
            return self._saved()
        used: list[int] = []
        peaks: list[int] = []

        def look() -> None:
            torch.cuda.synchronize(self._device)
            used.append(torch.cuda.memory_allocated(self._device))
            peaks.append(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)

        self._round(look)
        base = used[0]
        return LayerCost(
            kept=used[1] - base, kept_for_weight=max(0, used[2] - base), forward_peak=peaks[1] - base,
            backward_peak=max(peaks[2:]) - base,
        )  # fmt: skip

    def _saved(self) -> LayerCost:
        own = {
            x.untyped_storage().data_ptr() for x in (*self._stage.module.parameters(), *self._stage.module.buffers())
        }
        saved: dict[int, int] = {}

        def see(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
            self._round(lambda: None)
        kept = sum(saved.values())
        return LayerCost(kept=kept, kept_for_weight=kept, forward_peak=kept, backward_peak=kept)


class _Load:
    """Work that draws about the power of a block: products of matrices, and two passes over each result."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._factors = [torch.randn(_LOAD_SIZE, _LOAD_SIZE, device=device).to(dtype) for _ in range(2)]
        self._product = torch.empty_like(self._factors[0])
        self._ns = 1.0
        self.occupy(_WARM_UPS)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        self.occupy(_LEAST_ROUNDS)
        marks[1].record()
        torch.cuda.synchronize(device)
        self._ns = _elapsed_ns(*marks) / _LEAST_ROUNDS

    def occupy(self, ns: float) -> None:
        """Launch work of this many nanoseconds."""
        with torch.no_grad():
            for _ in range(round(ns / self._ns)):
                torch.mm(*self._factors, out=self._product)
                self._product.mul_(0.5).add_(1.0)


def _elapsed_ns(start: Any, end: Any) -> float:
    return float(start.elapsed_time(end) * 1e6)
