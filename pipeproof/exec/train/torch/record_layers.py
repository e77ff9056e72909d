"""``pipeproof.torch.record_layers``: the values that the modules of any PyTorch program compute."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from pipeproof.analysis.align.array_digests import Array
from pipeproof.analysis.align.record_format import WIDE, Layout
from pipeproof.exec.compare.layer_recorder import (
    Kept,
    LayerRecorder,
    WeightGradient,
    gradient_of,
    named_modules,
    program_header,
    trained_weights,
)
from pipeproof.exec.compare.tensor_layouts import Split, layout_at_boundary, split_layout


@contextmanager
def record_layers(
    model: nn.Module | Sequence[nn.Module] | Mapping[int, nn.Module],
    directory: str | Path,
    *,
    names: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
    largest: int = 0,
) -> Iterator[Callable[[], None]]:
    """Record the inputs and outputs of each module, forward and backward, gradients of weights, and losses.

    ``pipeproof state align`` compares two such records, also of two frameworks. Each rank writes a file; the tensors of
    all ranks are joined when they are compared. A step ends when an optimizer steps. A program without an optimizer
    calls ``end_step`` of ``with record_layers(..) as end_step`` before it resets the gradients; the last step may end
    with the block. Micro-batches are counted by the calls of a model or a stage. A loss is a scalar at which a backward
    starts. The program computes the same bits; after the block, nothing of it remains.

    Args:
        model: a model; with pipeline parallelism, the stages of this rank, by number or in a list. The record has the
            model's names.
        directory: created if needed; one for all ranks.
        names: patterns, such as ``"*.mlp"``, of modules and parameters whose tensors are kept, not only their digests;
            ``["*"]`` keeps all. Tensors are needed if the sides differ in layout, and to guess a cause.
        ranks: record only on these ranks, such as the ranks of one data-parallel replica.
        largest: keep also tensors of at most so many bytes.

    Raises:
        FileExistsError: the directory has a record of this rank.
        ValueError: two modules of different stages have one name.
    """
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if ranks is not None and rank not in ranks:
        yield lambda: None
        return
    modules = named_modules(model, nn.Module.named_children)
    parameters = trained_weights(modules, _trained)
    first = next((weight for _, _, weight, _ in parameters.values()), None)
    dtype = "float32" if first is None else str(first.dtype).removeprefix("torch.")
    kept = Kept(tuple(names), largest)
    header = program_header("torch", dtype, modules, kept)
    recorder = LayerRecorder(Path(directory), header, rank, TorchTensors(), kept)

    def end_step() -> None:
        recorder.finish(
            WeightGradient(name, layer, gradient, _parameter_layout(weight, gradient))
            for name, layer, weight, _ in reversed(parameters.values())
            if (gradient := gradient_of(weight)) is not None
        )

    with ExitStack() as stack:
        for name, module in modules.values():
            _hook(stack, recorder, name, module)
        hook = register_optimizer_step_pre_hook(lambda *_: end_step())
        stack.callback(hook.remove)
        stack.callback(recorder.forget)
        stack.enter_context(patch("torch.autograd.backward", _recorded_backward(recorder)))
        yield end_step
        end_step()


def _trained(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((key, weight) for key, weight in module.named_parameters(recurse=False) if weight.requires_grad)


def _hook(stack: ExitStack, recorder: LayerRecorder, name: str, module: nn.Module) -> None:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            recorder.entered(name, module, (args, kwargs), is_again=_in_backward())

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        with torch.no_grad():
            recorder.left(name, module, output, is_again=_in_backward())

    stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(module.register_forward_hook(after, with_kwargs=True, always_call=True).remove)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001 - activation checkpointing asks so, too


def _recorded_backward(recorder: LayerRecorder) -> Callable[..., Any]:
    original = torch.autograd.backward
    running = [False]

    def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if running[0]:  # a mode of torch functions calls the function again, by its name
            return original(tensors, grad_tensors, *args, **kwargs)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else [*tensors]
        gradients = (
            [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else [*grad_tensors]
        )
        for root in roots if not any(each is not None for each in gradients) else ():
            if root.numel() == 1:
                recorder.scalar_backward(root.detach())
        running[0] = True
        try:
            return original(tensors, grad_tensors, *args, **kwargs)
        finally:
            running[0] = False

    return backward


def to_numpy(tensor: torch.Tensor) -> tuple[Array, str]:
    """See ``Tensors.to_numpy``."""
    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    if local.is_complex():
        local = torch.view_as_real(local)
    dtype = str(local.dtype).removeprefix("torch.")
    wide = getattr(torch, WIDE.get(dtype, dtype))
    return local.to(wide).contiguous().cpu().numpy(), dtype


class TorchTensors:
    """PyTorch's tensors; a ``Tensors``."""

    def leaves(self, values: Any) -> list[torch.Tensor]:
        """See ``Tensors``."""
        return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and not _is_meta(leaf)]

    to_numpy = staticmethod(to_numpy)

    def version(self, tensor: torch.Tensor) -> int:
        """See ``Tensors``."""
        return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - it has no public name

    def on_gradient(self, tensor: torch.Tensor, call: Callable[[torch.Tensor], None]) -> Any:
        """See ``Tensors``."""

        def hook(gradient: torch.Tensor) -> None:
            with torch.no_grad():
                call(gradient)

        return tensor.register_hook(hook) if tensor.requires_grad else None

    def layout_of(self, tensor: torch.Tensor, module: nn.Module, side: Literal["input", "output"]) -> Layout | None:
        """See ``Tensors``."""
        if hasattr(tensor, "placements"):
            return _dtensor_layout(tensor)
        weight = module._parameters.get("weight")  # noqa: SLF001 - ``getattr`` finds properties, too
        split = None if weight is None or hasattr(module, "num_embeddings") else _megatron_split(weight)
        return None if split is None else layout_at_boundary(tuple(tensor.shape), tuple(weight.shape), split, side)


def _is_meta(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_meta or tensor.is_sparse or tensor.is_nested)


def _parameter_layout(weight: torch.Tensor, gradient: torch.Tensor) -> Layout | None:
    if hasattr(gradient, "placements"):
        return _dtensor_layout(gradient)
    if hasattr(weight, "placements"):
        return _dtensor_layout(weight)
    split = _megatron_split(weight)
    return None if split is None else split_layout(tuple(gradient.shape), split)


def _dtensor_layout(tensor: Any) -> Layout:
    """Whole shape and this rank's range.

    Raises:
        ValueError: the tensor is a sum that is still to be made, or cut unevenly along several axes of the mesh.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a DTensor with placements {tensor.placements} is an unfinished sum: redistribute it first")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(tensor.shape), (tuple((o, o + n) for o, n in zip(offset, shape, strict=True)),)


def _megatron_split(weight: torch.Tensor) -> Split | None:
    if not getattr(weight, "tensor_model_parallel", False):
        return None
    state = sys.modules["megatron.core.parallel_state"]
    size, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
    return Split(weight.partition_dim, rank, size, weight.partition_stride) if size > 1 else None
