"""Times of a stage's forward and backward on its device, measured at the start of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeproof.exec.train.torch.boundary_inference import real_tensor, unchanged_state
from pipeproof.exec.train.torch.module_stage import without_autocast
from pipeproof.exec.train.torch.split_linear import gradients_aside
from pipeproof.exec.train.train_errors import PipelineError

_WARM_UPS, _ROUNDS = 2, 5


def time_stage(
    number: int, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[float, float]:
    """Median microseconds of a stage's forward and of its whole backward, for one micro-batch.

    Tensors without values become zeros. Gradients, buffers and the random state are put back. The loss function is not
    included: the output's gradient is one everywhere.

    Raises:
        PipelineError: the module raises.
    """
    try:
        with gradients_aside([*module.parameters()]), unchanged_state([module], device), torch.enable_grad():
            times = [_time_once(module, args, kwargs, device) for _ in range(_WARM_UPS + _ROUNDS)]
    except Exception as error:
        raise PipelineError(f"stage {number} fails while it is timed: {type(error).__name__}: {error}") from error
    forward, backward = zip(*times[_WARM_UPS:], strict=True)
    return round(median(forward) / 1e3, 3), round(median(backward) / 1e3, 3)


def _time_once(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[int, int]:
    """Nanoseconds of one forward and its backward."""
    run_args, run_kwargs = tree_map_only(
        torch.Tensor, lambda tensor: real_tensor(tensor, device), (tuple(args), dict(kwargs))
    )
    start = _now(device)
    value = module(*run_args, **run_kwargs)
    middle = _now(device)
    roots = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    before_backward = _now(device)
    if roots:
        with without_autocast(device.type):
            torch.autograd.backward(roots, gradients)
    return middle - start, _now(device) - before_backward


def _now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter_ns()
