"""Shapes and types at the boundaries, from the modules themselves: each stage runs once on tensors without values.

A small stage on the CPU runs with values, which is faster than importing what runs without them. A module that cannot
run so (compiled, sharded, or with values that decide its shapes) runs once with values and without gradients. Buffers
and the random state are put back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.stage_boundaries import Form, LeafSpec
from pipeproof.exec.train.torch.block_layers import CutLayers, LayerWatch, leaf_specs
from pipeproof.exec.train.torch.split_backward import is_compiled
from pipeproof.exec.train.torch.stage_values import Leaves, plain_leaves_of


@dataclass(frozen=True, slots=True)
class StageRun:
    """Result of one run of a stage. ``inner`` are the outputs of its layers but the last, None if not seen.

    ``kept`` has the bytes that each layer keeps for the backward; None if not seen. ``recomputes_reentrantly`` is True
    for activation checkpointing with ``use_reentrant=True``, where it was seen. ``uses`` has for each output the
    arguments, by position or keyword, that its gradient reaches; the last stage has one entry for all outputs. None if
    not seen.
    """

    form: Form
    leaves: tuple[LeafSpec, ...]
    inner: tuple[tuple[LeafSpec, ...], ...] | None = None
    kept: tuple[int, ...] | None = None
    recomputes_reentrantly: bool = False
    uses: tuple[frozenset[int | str], ...] | None = None


def run_stage(
    number: int,
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
    *,
    is_last: bool = False,
    layers: CutLayers | None = None,
) -> StageRun:
    """Run one stage on the arguments of a micro-batch; tensors may be on the meta device.

    Compiled modules run uncompiled. ``layers`` are the layers of the stage whose outputs are recorded.

    The output of the last stage goes only to the loss function, and is not described.

    Raises:
        PipelineError: the module raises, or returns something that cannot cross.
    """
    torch.clear_autocast_cache()  # of a script that makes the pipeline under autocast
    try:
        if not needs_real_run(module):
            try:
                return _run_with_gradients(number, module, args, kwargs, device, is_last=is_last, layers=layers)
            except PipelineError:
                raise
            except Exception:  # noqa: BLE001, S110 - values may decide shapes; the real run names a real fault
                pass
        return _run_with_values(number, module, args, kwargs, device, is_last=is_last, layers=layers)
    finally:
        torch.clear_autocast_cache()  # it may hold weights without values


def _run_with_values(
    number: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device,
    *, is_last: bool, layers: CutLayers | None,
) -> StageRun:  # fmt: skip
    devices = [device] if device.type == "cuda" else []  # without them, PyTorch warns of the other GPUs
    watch = LayerWatch(module, layers)
    try:
        with torch.no_grad(), unchanged_buffers(module), torch.random.fork_rng(devices):
            real_args, real_kwargs = tree_map_only(
                torch.Tensor, lambda x: real_tensor(x, device), (tuple(args), dict(kwargs))
            )
            with torch.compiler.set_stance("force_eager"), watch.watching(real_args):
                value = module(*real_args, **real_kwargs)
    except Exception as error:
        raise PipelineError(f"stage {number} fails on the example: {type(error).__name__}: {error}") from error
    form, leaves = (Form("tensor"), ()) if is_last else plain_leaves_of(value, f"stage {number}")
    return StageRun(form, leaf_specs(leaves), watch.outputs)


def needs_real_run(module: nn.Module) -> bool:
    """True if the module is compiled, or wraps its parameters: tensors without values do not go through it."""
    if any(is_compiled(part) or type(part).__name__ in _WRAPPERS for part in module.modules()):
        return True
    return any(type(weight) not in (nn.Parameter, torch.Tensor) for weight in module.parameters())


_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel"}


_SMALL = 2**20
"""Numbers in a stage on the CPU that runs for real: importing what runs without values takes seconds."""


def _is_small(module: nn.Module, args: Sequence[Any], device: torch.device) -> bool:
    tensors = (*module.parameters(), *(arg for arg in args if isinstance(arg, torch.Tensor)))
    return device.type == "cpu" and sum(int(tensor.numel()) for tensor in tensors) <= _SMALL


def _run_with_gradients(
    number: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device,
    *, is_last: bool, layers: CutLayers | None,
) -> StageRun:  # fmt: skip
    saved: list[tuple[ref[torch.Tensor], int]] = []  # kept memory, while its node lives, and the layer that runs
    watch = LayerWatch(module, layers)

    def see(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()  # an output that its own node holds would keep the graph for ever
        if tensor.untyped_storage()._cdata not in own:  # noqa: SLF001 - identity
            saved.append((ref(kept), watch.current))
        return kept

    has_values = _is_small(module, args, device)
    mode = None if has_values else FakeTensorMode(allow_non_fake_inputs=True)
    make = partial(real_tensor if has_values else _fake, device=device)
    with unchanged_buffers(module), torch.random.fork_rng(devices=[]) if mode is None else mode, torch.enable_grad():
        state = [*module.parameters(), *module.buffers()]
        state += [] if mode is None else [mode.from_tensor(tensor) for tensor in state]  # they stay until the end
        own = {x.untyped_storage()._cdata for x in state}  # noqa: SLF001
        run_args, run_kwargs = tree_map_only(torch.Tensor, make, (tuple(args), dict(kwargs)))
        with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor), watch.watching(run_args):
            value = module(*run_args, **run_kwargs)
        form, leaves = (Form("tensor"), ()) if is_last else plain_leaves_of(value, f"stage {number}")
        specs, inner = leaf_specs(leaves), watch.outputs
        inputs = [x for x in tree_leaves((run_args, run_kwargs)) if isinstance(x, torch.Tensor)]
        kept = _bytes_by_layer([*((each(), layer) for each, layer in saved), *((leaf, 0) for leaf in inputs)])
        reentrant = any(node.name() == "CheckpointFunctionBackward" for node in _graph_of(value))
        uses = tuple(_reached(output, run_args, run_kwargs) for output in ([value] if is_last else leaves))
    num_layers = 1 if layers is None else len(layers.names)
    return StageRun(form, specs, inner, tuple(kept[layer] for layer in range(num_layers)), reentrant, uses)


def _bytes_by_layer(kept: Iterable[tuple[torch.Tensor | None, int]]) -> Counter[int]:
    """The bytes of all memory of tensors that still exist, by the layer of the first that has it."""
    first: dict[int, tuple[int, int]] = {}
    for tensor, layer in kept:
        if tensor is not None:
            storage = tensor.untyped_storage()
            first.setdefault(storage._cdata, (layer, storage.nbytes()))  # noqa: SLF001 - identity
    by_layer: Counter[int] = Counter()
    for layer, num_bytes in first.values():
        by_layer[layer] += num_bytes
    return by_layer


def _reached(value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> frozenset[int | str]:
    """The arguments, by position or keyword, that the gradient of a value reaches."""
    ends = [*tree_leaves(value), *(node.variable for node in _graph_of(value) if hasattr(node, "variable"))]
    every: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return frozenset(key for key, argument in every if any(argument is end for end in ends))


def _graph_of(value: Any) -> set[Any]:
    nodes = [x.grad_fn for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        following = {other for other, _ in nodes.pop().next_functions if other is not None} - seen
        seen |= following
        nodes += following
    return seen


def _fake(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def real_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The example's own values, or zeros: valid as token ids and as indices."""
    if tensor.is_meta:
        made = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        made = tensor.detach().to(device, copy=True)  # the module may write into it
    return made.requires_grad_(tensor.requires_grad)


def meta_leaves(leaves: Sequence[LeafSpec]) -> Leaves:
    """Tensors without memory in the place of received ones."""
    return tuple(
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta").requires_grad_(spec.has_gradient)
        for spec in leaves
    )


@contextmanager
def unchanged_state(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Put buffers of modules back as they were, and the random states of the CPU and of a device."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(unchanged_buffers(module))
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        yield


@contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Put the module's buffers back as they were, including buffers that the run replaced."""
    kept = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]  # noqa: SLF001
    values = [None if buffer is None or buffer.is_meta else buffer.detach().clone() for _, _, buffer in kept]
    try:
        yield
    finally:
        for (part, name, buffer), value in zip(kept, values, strict=True):
            if part._buffers.get(name) is not buffer:  # noqa: SLF001
                part._buffers[name] = buffer  # noqa: SLF001
            if buffer is not None and value is not None:
                with torch.no_grad():
                    buffer.copy_(value)
