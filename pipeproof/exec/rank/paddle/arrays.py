"""``Arrays`` of ``exec.rank.framework_protocol`` for Paddle."""

# ruff: noqa: D102 - `Arrays` documents the methods
from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import paddle

from pipeproof.exec.rank.framework_protocol import Array
from pipeproof.specs.axis_layout import dtype_bytes


class PaddleArrays:
    """Tensors on the device on which Paddle was started; an ``Arrays``."""

    def empty(self, shape: Sequence[int], dtype: str) -> paddle.Tensor:
        return paddle.empty(list(shape), dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> paddle.Tensor:
        return paddle.zeros(list(shape), dtype=dtype)

    def shaped(self, memory: paddle.Tensor, shape: Sequence[int], dtype: str, start: int = 0) -> paddle.Tensor:
        if start:  # first the type: Paddle takes the offset of a view in bytes for one in elements of its new type
            first = start // dtype_bytes(dtype)
            return memory.view(dtype)[first : first + prod(shape)].view(list(shape)).detach()
        return memory[: prod(shape) * dtype_bytes(dtype)].view(dtype).view(list(shape)).detach()

    def copy_into(self, target: paddle.Tensor, source: paddle.Tensor) -> paddle.Tensor:
        return paddle.assign(source, output=target)

    def numel(self, tensor: paddle.Tensor) -> int:
        return int(np.prod(tensor.shape, dtype=np.int64))

    def dtype(self, tensor: paddle.Tensor) -> str:
        return str(tensor.dtype).removeprefix("paddle.")

    def to_numpy(self, tensor: paddle.Tensor) -> Array:
        return np.array(tensor.numpy())

    def from_bytes(self, content: npt.NDArray[np.uint8], shape: Sequence[int], dtype: str) -> paddle.Tensor:
        return paddle.to_tensor(content.view(dtype).reshape(list(shape)))

    def to_bytes(self, tensor: paddle.Tensor) -> npt.NDArray[np.uint8]:
        return np.frombuffer(tensor.numpy().tobytes(), dtype=np.uint8)

    def synchronize(self) -> None:
        if paddle.device.get_device() != "cpu":
            paddle.device.cuda.synchronize()

    def want_gradient(self, tensor: paddle.Tensor, *, wanted: bool) -> None:
        tensor.stop_gradient = not wanted

    def gradient(self, tensor: paddle.Tensor) -> paddle.Tensor:
        return tensor.grad

    def release(self, tensor: paddle.Tensor) -> None:
        tensor._clear_data()  # noqa: SLF001 - as in Fleet: there is no public function
