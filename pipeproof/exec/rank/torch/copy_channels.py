"""Channels between GPUs of one host whose messages are copies by copy engines, see ``exec.rank.slot_protocol``.

All of it is the driver's: IPC handles map another process's memory, a copy between two GPUs runs on a copy engine, and
a stream writes and awaits words without a kernel. The words are in host memory that both processes share, so that a
store by the host can release a stream. Multicast objects are not used.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from pipeproof.comm.channel_models import message_bytes
from pipeproof.exec.rank.group_channels import PostedTransfer, connecting
from pipeproof.exec.rank.slot_protocol import NUM_SLOTS, Ended, SlotEnd
from pipeproof.foreign_text import decode_json
from pipeproof.schedule.op_table import Channel, OpGraph
from pipeproof.schedule.ops import SEND_KINDS

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


_ALIGNMENT: Final = 512
_FIRST_MESSAGE_S: Final = 20.0
_RELEASE_S: Final = 1.5
_RELEASE_POLL_S: Final = 0.001
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def slot_sizes(graph: OpGraph) -> dict[Channel, int]:
    """Bytes of the largest message of each channel, rounded up."""
    sizes, sends = message_bytes(graph), np.flatnonzero(graph.is_kind(SEND_KINDS))
    largest = dict.fromkeys(graph.channels, 1)
    for op_id in sends.tolist():
        channel = graph.channels[int(graph.channel[op_id])]
        largest[channel] = max(largest[channel], int(sizes[op_id]))
    return {channel: -(-num_bytes // _ALIGNMENT) * _ALIGNMENT for channel, num_bytes in largest.items()}


class CopyChannels:
    """Ends of the channels of one rank, whose GPU is the current one; a ``Channels``.

    ``words`` are the words of each channel, of which this rank awaits half.
    """

    def __init__(self, rank: int, ends: Mapping[Channel, SlotEnd], words: Mapping[Channel, SharedWords]) -> None:
        self._rank, self._ends, self._words = rank, ends, words
        self._device = torch.cuda.current_device()
        self._local: CudaCopyStream | None = None

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[PostedTransfer] = ()) -> PostedTransfer:
        """Start moving a contiguous buffer over this rank's end; ``after`` is on the same channel, a FIFO."""
        posted_ns = time.monotonic_ns()
        end = self._ends[channel]
        return PostedTransfer(buffer, end.post(buffer.data_ptr(), _bytes_of(buffer)), posted_ns)

    def move(
        self, messages: Sequence[tuple[Channel, torch.Tensor]], copied: tuple[torch.Tensor, torch.Tensor] | None
    ) -> AllEnded:
        """Start moving contiguous buffers over this rank's ends; all of them wait for one event of the current stream.

        ``copied`` are a target and a source, contiguous tensors of this rank, copied on a stream of their own.
        """
        after = torch.cuda.current_stream(self._device).record_event()
        ends = [self._ends[channel].post(part.data_ptr(), _bytes_of(part), after) for channel, part in messages]
        if copied is not None:
            if self._local is None:
                self._local = CudaCopyStream()
            target, source = copied
            self._local.begin(after)
            self._local.copy(target.data_ptr(), source.data_ptr(), _bytes_of(source))
            ends.append(self._local.end())
        return AllEnded(ends, self._device)

    def close(self) -> None:
        """Do nothing: the rank has waited for every transfer, and the memory ends with the process."""

    def abort(self) -> None:
        """Release all streams that wait for a peer; what they move afterwards is lost.

        A released stream clears its word and may wait for the next, so words are set until all streams are idle.
        """
        streams = [end.stream for end in self._ends.values()]
        last = time.monotonic() + _RELEASE_S
        while time.monotonic() < last:
            for channel, words in self._words.items():
                for index in _awaited(is_sender=channel.src == self._rank):
                    words.store(index, 1)
            if all(stream.is_idle() for stream in streams):
                return
            time.sleep(_RELEASE_POLL_S)


class AllEnded:
    """The ends of several messages and copies."""

    __slots__ = ("_device", "_ends")

    def __init__(self, ends: Sequence[Ended], device: int) -> None:
        self._ends, self._device = ends, device

    def wait(self) -> None:
        """Make the current stream wait for all."""
        stream = torch.cuda.current_stream(self._device)
        for end in self._ends:
            end.wait(stream)


def _bytes_of(tensor: torch.Tensor) -> int:
    num_bytes: int = tensor.numel() * tensor.element_size()
    return num_bytes


def _awaited(*, is_sender: bool) -> range:
    """Indices of the words that an end awaits: those of ``empty`` are the first, those of ``full`` the others."""
    return range(NUM_SLOTS) if is_sender else range(NUM_SLOTS, 2 * NUM_SLOTS)


def connect_copies(
    slots: Mapping[Channel, int],
    rank: int,
    device: torch.device,
    store: dist.Store,
    progress: Callable[[str], None],
    timeout_s: float,
    key: str = "send_recv",
) -> CopyChannels:
    """Map the memory of every channel of this rank, and move a first message over each.

    ``slots`` has the bytes of a slot of each channel, the same on all ranks. ``key`` of ``transport`` asks for them.
    Every rank must call this.

    Raises:
        RuntimeError: the two GPUs of a channel are on different hosts, the driver refuses a call, or the first message
            does not arrive. Both ranks of the channel raise it, with the reason.
    """
    ends: dict[Channel, SlotEnd] = {}
    words: dict[Channel, SharedWords] = {}
    with torch.cuda.device(device):
        channels = CopyChannels(rank, ends, words)
        for channel, slot_bytes in slots.items():
            progress(connecting(channel))
            if rank in (channel.src, channel.dst):
                meeting = _Meeting(channel, store, timeout_s, key, is_sender=rank == channel.src)
                connect = _sending if meeting.is_sender else _receiving
                ends[channel], words[channel] = connect(meeting, slot_bytes)
                try:
                    meeting.agree(partial(_try, ends[channel], device, is_sender=meeting.is_sender))
                except RuntimeError:
                    channels.abort()
                    raise
    return channels


class _Meeting:
    """Exchanges of both ends of a channel over the store."""

    def __init__(self, channel: Channel, store: dist.Store, timeout_s: float, key: str, *, is_sender: bool) -> None:
        self._channel, self.is_sender, self._timeout, self._key = channel, is_sender, timedelta(seconds=timeout_s), key
        self._store, self._round = dist.PrefixStore(f"copies/{channel}/", store), 0

    def agree(self, offer: Callable[[], Any]) -> Any:
        """Exchange the results of ``offer``.

        Raises:
            RuntimeError: one of the two failed.
        """
        self._round += 1
        content: dict[str, Any] = {"error": None, "value": None}
        try:
            content["value"] = offer()
        except (RuntimeError, OSError) as error:
            content["error"] = str(error)
        names = [f"{self._round}/{side}" for side in ("sender", "receiver")]
        own, other = names if self.is_sender else reversed(names)
        self._store.set(own, json.dumps(content))
        self._store.wait([other], self._timeout)
        theirs = decode_json(self._store.get(other))
        for reason in (content["error"], theirs["error"]):
            if reason is not None:
                raise self.refusal(reason)
        return theirs["value"]

    def refusal(self, reason: str) -> RuntimeError:
        """The error of a channel that cannot be connected."""
        return RuntimeError(
            f"`transport.{self._key}: copy_engine` is not possible on {self._channel}: {reason}; use "
            f"`{self._key}: backend`"
        )

    def require_one_host(self) -> None:
        """Refuse ends on two hosts."""
        name = socket.gethostname()
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else name
        other_name, other_boot = self.agree(lambda: [name, boot])
        if other_boot != boot:
            raise self.refusal(f"it is for GPUs of one host, and the ranks are on {name} and {other_name}")


def _receiving(meeting: _Meeting, slot_bytes: int) -> tuple[SlotEnd, SharedWords]:
    """The end of the receiver, which makes the memory and the words."""
    meeting.require_one_host()
    made: list[Any] = []

    def offer() -> list[str]:
        words = SharedWords(2 * NUM_SLOTS)
        made.append(words)
        for index in _awaited(is_sender=True):
            words.store(index, 1)  # every slot is empty
        address, handle = new_memory(NUM_SLOTS * slot_bytes)
        made.append(address)
        return [handle, words.path.name]

    try:
        meeting.agree(offer)
        meeting.agree(lambda: None)  # the sender has opened them
    finally:
        if made:
            made[0].path.unlink()
    words, address = made
    return _end(words, address, slot_bytes, is_sender=False), words


def _sending(meeting: _Meeting, slot_bytes: int) -> tuple[SlotEnd, SharedWords]:
    """The end of the sender, which maps the receiver's memory and words."""
    meeting.require_one_host()
    handle, name = meeting.agree(lambda: None)
    made: list[Any] = []
    meeting.agree(lambda: made.extend((SharedWords(2 * NUM_SLOTS, name), mapped_memory(handle))))
    words, address = made
    return _end(words, address, slot_bytes, is_sender=True), words


def _end(words: SharedWords, address: int, slot_bytes: int, *, is_sender: bool) -> SlotEnd:
    own, other = ([words.address(i) for i in _awaited(is_sender=side)] for side in (is_sender, not is_sender))
    slots = [address + slot_bytes * index for index in range(NUM_SLOTS)]
    return SlotEnd(CudaCopyStream(), own, other, slots, slot_bytes, is_sender=is_sender)


def _try(end: SlotEnd, device: torch.device, *, is_sender: bool) -> None:
    """Move a message of known bytes, more than the channel has slots; the host waits for each.

    Raises:
        RuntimeError: one does not arrive in time, or other bytes do.
    """
    num_bytes = min(end.slot_bytes, 256)
    for number in range(NUM_SLOTS + 1):
        expected = torch.arange(num_bytes, device=device).add_(number).to(torch.uint8)
        buffer = expected if is_sender else torch.zeros_like(expected)
        event = end.post(buffer.data_ptr(), num_bytes)
        last = time.monotonic() + _FIRST_MESSAGE_S
        while not end.stream.is_idle():
            if time.monotonic() > last:
                raise RuntimeError(f"its first messages do not arrive within {_FIRST_MESSAGE_S:g} s")
            time.sleep(_RELEASE_POLL_S)
        event.wait()
        if not torch.equal(buffer, expected):
            raise RuntimeError("its first messages arrive with other bytes")
