"""A word of host memory that a GPU's stream writes when it gets there: the GPU's progress, for the watch of a rank."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, cast

import torch

NO_VALUE = -1


class StreamWord:
    """A number of the host's memory, -1 at first.

    The driver's stream write costs the host and the GPU a fraction of a copy, and is captured in a graph like one.
    """

    def __init__(self) -> None:
        self._word = torch.full([1], NO_VALUE, dtype=torch.int64, pin_memory=True)
        self._seen, self._address = self._word.numpy(), self._word.data_ptr()
        self._device, self._write = torch.cuda.current_device(), _stream_write()

    def write(self, value: int) -> None:
        """Launch the write of a number from -1 on the current stream.

        Raises:
            RuntimeError: the driver refused it.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._device)  # noqa: SLF001 - as Inductor; a Stream costs 2 us
        status = self._write(stream, self._address, value, 0)
        if status:
            raise RuntimeError(f"the driver refused to write a word in a stream: error {status}")

    def read(self) -> int:
        """Return the last number; the GPU may already be further."""
        return int(self._seen[0])


@functools.cache
def _stream_write() -> Callable[..., int]:
    write: Any = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue64_v2
    write.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)
    return cast("Callable[..., int]", write)
