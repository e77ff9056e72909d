"""``Arrays`` of ``exec.rank.framework_protocol`` for PyTorch."""

# ruff: noqa: D102 - `Arrays` documents the methods
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from pipeproof.exec.rank.framework_protocol import Array
from pipeproof.specs.axis_layout import dtype_bytes


class TorchArrays:
    """Tensors on one device; an ``Arrays``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: dict[torch.dtype, str] = {}

    def empty(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)

    def zeros(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)

    def shaped(self, memory: torch.Tensor, shape: Sequence[int], dtype: str, start: int = 0) -> torch.Tensor:
        return memory[start : start + prod(shape) * dtype_bytes(dtype)].view(getattr(torch, dtype)).view(shape)

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
        values = tensor.detach().cpu()
        if values.dtype in (torch.bfloat16, torch.float16):
            values = values.float()
        return np.array(values.numpy())

    def from_bytes(self, content: npt.NDArray[np.uint8], shape: Sequence[int], dtype: str) -> torch.Tensor:
        return torch.from_numpy(content).to(self._device).view(getattr(torch, dtype)).view(shape)

    def to_bytes(self, tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
        values = tensor.detach().cpu().flatten()
        return np.array(values.view(torch.uint8).numpy())

    def synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def want_gradient(self, tensor: torch.Tensor, *, wanted: bool) -> None:
        tensor.requires_grad_(wanted)

    def gradient(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.grad

    def release(self, tensor: torch.Tensor) -> None:
        # Free only the memory: autograd still reads the tensor's shape.
        tensor.untyped_storage().resize_(0)


def as_this_thread(device: torch.device) -> Callable[[], None]:
    """Return a function that a new thread calls to compute with PyTorch as this thread does now.

    That is on the same device and stream, which may be captured, with the same number of threads (on which the bits of
    products depend), gradient mode and autocast.
    """
    num_threads, records = torch.get_num_threads(), torch.is_grad_enabled()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    is_cast, cast_to = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    keeps_casts = torch.is_autocast_cache_enabled()

    def set_up() -> None:
        torch.set_num_threads(num_threads)
        if stream is not None:
            torch.cuda.set_device(device)
            torch.cuda.set_stream(stream)
        torch.set_grad_enabled(records)
        torch.set_autocast_enabled(device.type, is_cast)
        torch.set_autocast_dtype(device.type, cast_to)
        torch.set_autocast_cache_enabled(keeps_casts)
        if is_cast:  # otherwise the end of a nested autocast would clear the casts of all threads
            torch.autocast_increment_nesting()

    return set_up
