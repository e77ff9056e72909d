"""PyTorch's tensors, as ``pipeproof.exec.framework.Arrays`` asks for them."""

# ruff: noqa: D102 - what each method does stands once, at `Arrays`
from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from pipeproof.exec.framework import Array
from pipeproof.specs.dtypes import dtype_bytes


class TorchArrays:
    """Tensors on one device; an ``Arrays``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: dict[torch.dtype, str] = {}

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)

    def shaped(self, memory: torch.Tensor, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return memory[: prod(shape) * dtype_bytes(dtype)].view(getattr(torch, dtype)).view(shape)

    def copy_into(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return target.copy_(source)

    def numel(self, tensor: torch.Tensor) -> int:
        return int(tensor.numel())

    def dtype(self, tensor: torch.Tensor) -> str:
        name = self._names.get(tensor.dtype)
        if name is None:
            name = self._names[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
        return name

    def to_numpy(self, tensor: torch.Tensor) -> Array:
        there = tensor.detach().cpu()
        if there.dtype in (torch.bfloat16, torch.float16):
            there = there.float()
        return np.array(there.numpy())

    def from_bytes(self, content: npt.NDArray[np.uint8], shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.from_numpy(content).to(self._device).view(getattr(torch, dtype)).view(shape)

    def to_bytes(self, tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
        there = tensor.detach().cpu().flatten()
        return np.array(there.view(torch.uint8).numpy())

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def want_gradient(self, tensor: torch.Tensor, *, wanted: bool) -> None:
        tensor.requires_grad_(wanted)

    def gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.grad

    def release(self, tensor: torch.Tensor) -> None:
        # The memory alone: autograd goes on to look at the shape of what it goes back from.
        tensor.untyped_storage().resize_(0)
