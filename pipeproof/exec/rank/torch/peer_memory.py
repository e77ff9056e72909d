"""Memory of a GPU that another process writes, words in host memory that streams await, and copies by copy engines.

All of it is the driver's: IPC handles map the memory, a copy between two GPUs runs on a copy engine, and a stream
writes and awaits words without a kernel. The words are in host memory that both processes share, so that a store by the
host can release a stream. Multicast objects are not used.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from pipeproof.exec.rank.slot_protocol import Ended

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - memory of two processes, in a file of this user alone
WORD_SPACING: Final = 128
"""Bytes from one word to the next, so that no two are in one line of a cache."""
_LAZY_PEER_ACCESS: Final = 1
_PORTABLE, _DEVICE_MAPPED = 1, 2
_EQUAL: Final = 1
_NON_BLOCKING: Final = 1
_HIGH_PRIORITY: Final = -1
_REGISTERED: Final[list[mmap.mmap]] = []
"""Memory that the driver knows, for the life of the process: an unmapped address could be given to the next mapping."""


class _IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


_ADDRESS, _POINTER, _NUMBER = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32
_SIGNATURES: Final = {
    "cuMemAlloc_v2": (_POINTER, ctypes.c_size_t),
    "cuIpcGetMemHandle": (_POINTER, _ADDRESS),
    "cuIpcOpenMemHandle_v2": (_POINTER, _IpcHandle, _NUMBER),
    "cuMemHostRegister_v2": (_POINTER, ctypes.c_size_t, _NUMBER),
    "cuMemHostGetDevicePointer_v2": (_POINTER, _POINTER, _NUMBER),
    "cuStreamCreateWithPriority": (_POINTER, _NUMBER, ctypes.c_int),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _POINTER),
    "cuStreamWriteValue32_v2": (_POINTER, _ADDRESS, _NUMBER, _NUMBER),
    "cuStreamWaitValue32_v2": (_POINTER, _ADDRESS, _NUMBER, _NUMBER),
}


class Driver:
    """Functions of the CUDA driver by name, for the context of the current device.

    Raises:
        RuntimeError: the driver is missing or older than CUDA 11.7.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libcuda.so.1")
            self.functions = {name: getattr(self._library, name) for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"the CUDA driver lacks what is needed: {error}") from None
        for name, function in self.functions.items():
            function.argtypes, function.restype = _SIGNATURES[name], ctypes.c_int

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            RuntimeError: it returned an error; the message has its name.
        """
        self.require(self.functions[name](*arguments), name)

    def require(self, status: int, name: str) -> None:
        """Raise RuntimeError for the status of a failed call."""
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name} failed: {(text.value or b'unknown error').decode()}")

    def address(self, name: str, *arguments: Any) -> int:
        """Call a function that writes an address to its first argument, and return the address."""
        value = _ADDRESS()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value


@functools.cache
def driver() -> Driver:
    """The driver of this process."""
    return Driver()


def new_memory(num_bytes: int) -> tuple[int, str]:
    """Allocate memory on the current GPU for the life of the process; return its address and its handle, in hex."""
    address, handle = driver().address("cuMemAlloc_v2", num_bytes), _IpcHandle()
    driver().call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return address, bytes(handle).hex()


def mapped_memory(handle: str) -> int:
    """Map another process's memory for copies by the current GPU, and return its address here.

    Raises:
        RuntimeError: the driver cannot, such as without a link between the two GPUs.
    """
    return driver().address(
        "cuIpcOpenMemHandle_v2", _IpcHandle.from_buffer_copy(bytes.fromhex(handle)), _LAZY_PEER_ACCESS
    )


class SharedWords:
    """Words of host memory that two processes share, 0 at first, and that their GPUs write and read.

    ``name`` is that of the file in shared memory; without it a new one is made.

    Raises:
        OSError: the file cannot be made or opened: the other process has another ``/dev/shm``.
        RuntimeError: the driver cannot register the memory.
    """

    def __init__(self, num_words: int, name: str | None = None) -> None:
        size = -(-num_words * WORD_SPACING // mmap.PAGESIZE) * mmap.PAGESIZE
        if name is None:
            end, path = tempfile.mkstemp(prefix="pipeproof_words_", dir=_SHARED_MEMORY)
            self.path = Path(path)
            os.ftruncate(end, size)
        else:
            self.path = _SHARED_MEMORY / name
            end = os.open(self.path, os.O_RDWR)
        try:
            self._memory = mmap.mmap(end, size)
        finally:
            os.close(end)
        self._host = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        driver().call("cuMemHostRegister_v2", self._host, size, _PORTABLE | _DEVICE_MAPPED)
        _REGISTERED.append(self._memory)
        self._device = driver().address("cuMemHostGetDevicePointer_v2", self._host, 0)

    def address(self, index: int) -> int:
        """Address of a word for the GPU."""
        return self._device + WORD_SPACING * index

    def store(self, index: int, value: int) -> None:
        """Write a word from the host."""
        _NUMBER.from_address(self._host + WORD_SPACING * index).value = value


class CudaCopyStream:
    """A stream of the current GPU for one end of a channel; a ``CopyStream``.

    It is none of PyTorch's pool, whose streams a script may have as well: work of the script would wait for messages.
    """

    def __init__(self) -> None:
        handle = driver().address("cuStreamCreateWithPriority", _NON_BLOCKING, _HIGH_PRIORITY)
        self._handle, self._device = handle, torch.cuda.current_device()
        self._stream = torch.cuda.ExternalStream(handle, self._device)
        functions = driver().functions
        self._await, self._write = functions["cuStreamWaitValue32_v2"], functions["cuStreamWriteValue32_v2"]
        self._copy = functions["cuMemcpyDtoDAsync_v2"]

    def begin(self, after: torch.cuda.Event | None = None) -> None:
        """Make what follows wait for an event, by default for the current stream."""
        if after is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._stream.wait_event(after)

    def await_word(self, word: int) -> None:
        """Launch a wait of the stream, which occupies no multiprocessor."""
        if status := self._await(self._handle, word, 1, _EQUAL):
            driver().require(status, "cuStreamWaitValue32")

    def write_word(self, word: int, value: int) -> None:
        """Launch a write; the driver puts a fence of the whole system before it."""
        if status := self._write(self._handle, word, value, 0):
            driver().require(status, "cuStreamWriteValue32")

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Launch a copy."""
        if status := self._copy(target, source, num_bytes, self._handle):
            driver().require(status, "cuMemcpyDtoDAsync")

    def end(self) -> Ended:
        """Return an event."""
        return _EventEnd(self._stream.record_event(), self._device)

    def is_idle(self) -> bool:
        """Return True if the GPU has finished all work of the stream."""
        return bool(self._stream.query())


class _EventEnd:
    """An event that a stream can wait for."""

    __slots__ = ("_device", "_event")

    def __init__(self, event: torch.cuda.Event, device: int) -> None:
        self._event, self._device = event, device

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make a stream wait, by default the current one."""
        (torch.cuda.current_stream(self._device) if stream is None else stream).wait_event(self._event)
