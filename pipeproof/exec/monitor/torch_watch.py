"""Watch of a PyTorch rank: its collectives and messages in a ring that another process reads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from pipeproof.exec.monitor.ring import CAPACITY
from pipeproof.exec.monitor.ring_recorder import IsDone, RingRecorder, Watch, ring_directory
from pipeproof.interop.traces.torch_calls import BARRIERS, IN_PLACE, MESSAGES, OUT_AND_IN, TorchCalls

_CAPTURE_MODE_RELAXED: Final = 2
"""``cudaStreamCaptureModeRelaxed`` of CUDA's driver_types.h."""


def watch(
    group: Any = None, directory: str | Path | None = None, *, shared: bool = False, capacity: int = CAPACITY
) -> Watch:
    """Record the collectives and messages of this rank in ``directory/rank_N.ring``, until the program ends.

    Call it once on every rank, after ``init_process_group``. Then
    ``pipeproof job hang --follow DIRECTORY`` names the cause of a hang.

    Args:
        group: the process group to record; None for all groups of the rank.
        directory: directory of the rings, the same on all ranks; default ``$PIPEPROOF_WATCH``, or ``pipeproof-rings``.
        shared: the directory is on a file server that monitors on other hosts read.
        capacity: operations that the ring keeps.

    Raises:
        OSError: the ring cannot be created.
        ValueError: there is no default process group, or the capacity is not positive.
    """
    if not dist.is_initialized():
        raise ValueError("watch needs a process group: call torch.distributed.init_process_group first")
    only = None if group is None else frozenset({str(group.group_name)})
    recorder = RingRecorder(
        ring_directory(directory), dist.get_rank(), dist.get_world_size(), f"torch {torch.__version__}", only=only,
        marker=DeviceMarker(), shared=shared, capacity=capacity,
    )  # fmt: skip
    return Watch(recorder, _WatchedCalls(recorder))


class DeviceMarker:
    """Marks points of the current stream by events, which the heartbeat's thread queries."""

    def __init__(self) -> None:
        self._has_prepared_thread = False

    def __call__(self, backend: str) -> IsDone | None:
        """Return the query of an event on the current stream; None if the host itself waits for the backend."""
        if backend != "nccl" or torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event()
        event.record()
        return partial(self._is_done, event, torch.cuda.current_device())

    def _is_done(self, event: torch.cuda.Event, device: int) -> bool:
        if not self._has_prepared_thread:
            self._has_prepared_thread = True
            _allow_captures_of_other_threads()
        if torch.cuda.current_device() != device:  # of this thread: otherwise a query would make a context on device 0
            torch.cuda.set_device(device)
        try:
            return bool(event.query())
        except RuntimeError:  # the device has faulted: nothing ends on it any more
            return False


def _allow_captures_of_other_threads() -> None:
    """Let this thread query events while another thread captures a CUDA graph, which CUDA forbids by default."""
    with suppress(AttributeError):  # of a build whose runtime is not among the global symbols
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class _WatchedCalls(TorchCalls):
    """Calls of process groups, read for a ring: without addresses and strides, which would cost more than the rest."""

    def __init__(self, recorder: RingRecorder) -> None:
        super().__init__(recorder)
        self._ring = recorder
        self._known: WeakKeyDictionary[Any, tuple[str, list[int]]] = WeakKeyDictionary()  # groups must be able to end
        self._dtypes: dict[torch.dtype, str] = {}

    def _call(self, method: str, function: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        ring = self._ring
        try:
            cached = self._known.get(group)
            if cached is None:
                cached = self._known[group] = self._group_of(group), dist.get_process_group_ranks(group)
            seq = self._record(method, *cached, [*args, *kwargs.values()] if kwargs else args)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # of an unknown release
            ring.unread(method, error)
            return function(group, *args, **kwargs)
        with ring.issuing(seq):
            work = function(group, *args, **kwargs)
        if work is not None:
            self._handles[work] = (seq,)
            ring.issued(seq)
        elif not ring.in_batch:  # the backend has already waited for it
            ring.done((seq,))
        return work

    def _end_batch(self, function: Callable[..., Any], group: Any, *args: Any) -> Any:
        batch = self._ring.end_batch()
        work = function(group, *args)
        if work is not None:
            self._handles[work] = batch
        for seq in batch:
            self._ring.issued(seq)
        return work

    def _wait(self, function: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
        seqs = self._handles.pop(handle, None)
        if seqs is None:
            return function(handle, *args, **kwargs)
        with self._ring.waiting(seqs):
            result = function(handle, *args, **kwargs)
        self._ring.done(seqs)
        return result

    def _end(self, handle: Any, seqs: Sequence[int]) -> None:
        self._ring.done(seqs)

    def _record(self, method: str, group: str, ranks: list[int], args: Sequence[Any]) -> int:
        if method in BARRIERS:
            return self._ring.issue("barrier", group, None, 0, "", (), 0, 0)
        first, num_first = _first_and_size(args[0])
        dtype, shape = "", ()
        if first is not None:
            shape = tuple(first.shape)
            dtype = self._dtypes.get(first.dtype) or self._dtypes.setdefault(
                first.dtype, str(first.dtype).rpartition(".")[2]
            )
        if method in MESSAGES:
            peer = None if method == "recv_anysource" else ranks[int(args[1])]
            is_send = method == "send"
            mark = self._marks.take(first.data_ptr(), is_send=is_send) if self._marks and first is not None else None
            return self._ring.issue(
                "send" if is_send else "recv", group, peer, int(args[-1]), dtype, shape,
                num_first if is_send else 0, 0 if is_send else num_first, mark,
            )  # fmt: skip
        op = IN_PLACE.get(method)
        if op is not None:
            return self._ring.issue(op, group, None, 0, dtype, shape, num_first, num_first)
        first, num_inputs = _first_and_size(args[1])
        shape = () if first is None else tuple(first.shape)
        return self._ring.issue(OUT_AND_IN[method], group, None, 0, dtype, shape, num_inputs, num_first)


def _first_and_size(value: Any) -> tuple[Any, int]:
    """Return the first tensor in nested lists (None without tensors), and the number of elements of all tensors."""
    if isinstance(value, torch.Tensor):
        return value, value.numel()
    first, size = None, 0
    for item in value:
        item_first, item_size = _first_and_size(item)
        first = item_first if first is None else first
        size += item_size
    return first, size
