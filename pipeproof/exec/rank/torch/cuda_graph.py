"""A rank's step captured as a CUDA graph, with its communication, and replayed; progress of the GPU in a step."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import torch

# A word of host memory that a GPU's stream writes when it gets there: the GPU's progress, for the watch of a rank.


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


Result = TypeVar("Result")


def captured(
    work: Callable[[], None],
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    pool: tuple[int, int] | None = None,
) -> Callable[[], None]:
    """Return a function that replays everything that ``work`` launches on the GPU; nothing is computed now.

    It is captured on ``stream``, by default a new one, with the memory of ``pool``, by default its own.

    All ranks capture the same step at the same time. ``work`` has run before: kernels are loaded and connections are
    open; its shapes and memory do not change, it reads no values, and it waits for all its transfers. Other threads
    (NCCL's watchdog) are not affected.

    Raises:
        RuntimeError: ``work`` reads a value or allocates on the host, which cannot be captured.
    """
    torch.cuda.synchronize(device)
    graph, own = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    before = torch.cuda.current_stream(device)
    try:
        with torch.cuda.graph(
            graph, pool=own, stream=stream or torch.cuda.Stream(device), capture_error_mode="thread_local"
        ):
            work()
    except RuntimeError:
        torch.cuda.set_stream(before)
        _forget_failed_capture(device, own)
        raise
    replay: Callable[[], None] = graph.replay
    return replay


def _forget_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Reset allocator and generator, which PyTorch 2.11 to 2.13 leaves in capture mode if the end of a capture fails.

    The allocator would never give unused memory back, and each random number would be an error.
    """
    number = torch.cuda.current_device() if device.index is None else device.index
    with suppress(RuntimeError):  # it has ended there already
        torch._C._cuda_endAllocateToPool(number, pool)  # noqa: SLF001 - as torch.cuda.use_mem_pool
        torch._C._cuda_releasePool(number, pool)  # noqa: SLF001
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device)):
        torch.zeros(1, device=device)  # a successful capture ends the generator's capture


class CaptureStream:
    """A stream on which steps run before one of them is captured on it.

    Autograd adds to a weight's gradient on the stream on which the weight was first used, if a graph of that time is
    still alive: on the default stream, that would end a capture.

    The graphs that are captured here are replayed one after another, and share one pool of memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, work: Callable[[], Result]) -> Result:
        """Run work after all that was launched before; what is launched later waits for it."""
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            result = work()
        before.wait_stream(self._stream)
        return result

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of ``work``, see ``captured``."""
        return captured(work, self._device, self._stream, self._pool)


class TorchReplays(StreamWord):
    """Capture on the current GPU, and its progress; an ``exec.rank.step_replay.Replays``."""

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of ``work``, see ``captured``."""
        return captured(work, torch.device("cuda", self._device))


class TorchProgress:
    """Progress of the current GPU, which may replay a step; an ``exec.rank.step_replay.DeviceProgress``."""

    def __init__(self) -> None:
        self._step, self._op = StreamWord(), StreamWord()

    def begin(self, step: int) -> None:
        """Launch the writes of a step that has reached no operation; a captured step must not contain them."""
        self._op.write(NO_VALUE)
        self._step.write(step)

    def write(self, op_id: int) -> None:
        """Launch the write; the host does not wait."""
        self._op.write(op_id)

    def read(self) -> tuple[int, int]:
        """Return the last step and operation; the GPU may already be further."""
        return self._step.read(), self._op.read()
