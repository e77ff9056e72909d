"""A word of host memory that a GPU's stream writes when it gets there: the GPU's progress, for the watch of a rank."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

_NO_BARRIER = 1
"""``CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER``: the word says where the stream is, and guards no data."""
NO_VALUE = -1


class StreamWord:
    """A number of the host's memory, -1 at first.

    The driver's stream write costs the host and the GPU a fraction of a copy, and is captured in a graph like one.
    """

    def __init__(self) -> None:
        self._word = torch.full([1], NO_VALUE, dtype=torch.int64, pin_memory=True)
        self._seen = self._word.numpy()
        self._address, self._write = ctypes.c_uint64(self._word.data_ptr()), _stream_write()

    def write(self, value: int) -> None:
        """Launch the write on the current stream.

        Raises:
            RuntimeError: the driver refused it.
        """
        stream = torch.cuda.current_stream().cuda_stream
        status = self._write(ctypes.c_void_p(stream), self._address, ctypes.c_uint64(value), _NO_BARRIER)
        if status:
            raise RuntimeError(f"the driver refused to write a word in a stream: error {status}")

    def read(self) -> int:
        """Return the last number; the GPU may already be further."""
        return int(self._seen[0])


@functools.cache
def _stream_write() -> Callable[..., Any]:
    write: Callable[..., Any] = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue64_v2
    return write
