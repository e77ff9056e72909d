"""Recorder of Paddle programs: every call of a process group, and every wait.

The methods of ``ProcessGroup`` and of its tasks are wrapped while the recorder
runs. They are below ``paddle.distributed``, its ``stream`` functions and
Fleet's P2P helpers, so ``*_on_calc_stream`` and partial sends and receives are
recorded, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import _GroupManager

from pipeproof.interop.traces.message_hooks import ROOTED, GroupCalls, Marks, Patches, log_entry, tensors_in
from pipeproof.interop.traces.recorder import Call, CallSink, Recorder, Tensor

_ON_STREAM = "_on_calc_stream"
_IN_PLACE = {"all_reduce": "all_reduce", "allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce"}
_OUT_AND_IN = {
    "all_gather": "all_gather", "all_gather_into_tensor": "all_gather", "all_gather_partial": "all_gather",
    "all_to_all": "all_to_all", "all_to_all_tensor": "all_to_all", "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all", "alltoall_single": "all_to_all", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "scatter": "scatter", "scatter_tensor": "scatter", "gather": "gather",
}  # fmt: skip
_IN_FIRST = frozenset({"gather", "alltoall", "alltoall_single"})
"""Calls that take their input before their output."""
_MESSAGES = ("send", "recv", "send_partial", "recv_partial")


@contextmanager
def record_paddle(directory: str | Path) -> Iterator[Recorder]:
    """Record the communication of this rank until the block ends, into ``directory/rank_N.jsonl``.

    Call it on every rank, around one step or a few, after
    ``paddle.distributed.init_parallel_env`` or ``fleet.init``. An exception of
    the block propagates after the log is closed.

    Raises:
        ValueError: the parallel environment is not initialised, or the directory has a log of this rank.
    """
    if not dist.is_initialized():
        raise ValueError("record_paddle needs process groups: call paddle.distributed.init_parallel_env first")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    recorder = Recorder(Path(directory), rank, num_ranks, f"paddle {paddle.__version__}", _version_of)
    with PaddleCalls(recorder).recording():
        yield recorder


class PaddleCalls(GroupCalls):
    """Converts calls of process groups into lines of the log."""

    def __init__(self, recorder: CallSink) -> None:
        super().__init__(recorder)
        self._patches = Patches()
        self._waited: set[type] = set()

    def wrap(self, patches: Patches) -> None:
        """Wrap all functions that communicate."""
        for group in _classes_of_groups():
            for method in (*_MESSAGES, *_IN_PLACE, *_OUT_AND_IN, "barrier"):
                for name in (method, method + _ON_STREAM):
                    patches.wrap(group, name, partial(self._call, method, name != method))
            patches.wrap(group, "_start_coalescing", self._start)
            patches.wrap(group, "_end_coalescing", self._end_batch)
        self._patches = patches
        self._waitable(paddle.base.core.task)
        wrap_fleet(patches, self._marks)

    def _call(
        self, method: str, on_stream: bool, function: Callable[..., Any], group: Any, *args: Any, **kwargs: Any
    ) -> Any:
        name, ranks = self._group_of(group)
        blocks = on_stream or _is_plain_gloo(group)
        seq, task = self._issue(
            method,
            lambda: replace(_read(method, name, ranks, [*args, *kwargs.values()]), blocks=blocks),
            lambda: function(group, *args, **kwargs),
        )
        if seq is None:
            return task
        if blocks:
            if not self._recorder.in_batch:
                self._recorder.done((seq,))
        elif task is not None:
            self._waitable(type(task))
            self._handles[task] = (seq,)
        return task

    def _waitable(self, task: type) -> None:
        """Wrap the wait methods of a class of tasks, once."""
        if task not in self._waited:
            self._waited.add(task)
            for method in ("wait", "synchronize"):
                self._patches.wrap(task, method, self._wait)

    def _group_of(self, process_group: Any) -> tuple[str, list[int]]:
        """Return the name and the global ranks of a process group."""
        backend = str(process_group.name()).lower()
        for number, group in _GroupManager.group_map_by_id.items():
            if group.process_group is process_group:
                name, ranks = str(number), list(group.ranks)
                self._recorder.group(name, ranks, backend, str(group.name or ""))
                return name, ranks
        name, ranks = f"unknown {id(process_group)}", list(range(process_group.size()))
        self._recorder.group(name, ranks, backend)
        return name, ranks

    def _start(self, function: Callable[..., Any], group: Any, *args: Any) -> Any:
        if not _is_plain_gloo(group):  # Paddle's own gloo has no batches: each of its calls is issued alone
            self._recorder.begin_batch()
        return function(group, *args)

    def _end_batch(self, function: Callable[..., Any], group: Any, *args: Any) -> Any:
        result = function(group, *args)
        batch = self._recorder.end_batch()
        self._recorder.done([seq for seq in batch if self._recorder.blocks(seq)])
        return result


def _classes_of_groups() -> list[type]:
    """Classes of the objects behind groups: those that the program has put there, if any, else Paddle's."""
    classes = {type(group.process_group) for group in _GroupManager.group_map_by_id.values() if group.process_group}
    custom = sorted((cls for cls in classes if not issubclass(cls, paddle.base.core.ProcessGroup)), key=str)
    return custom or [paddle.base.core.ProcessGroup]


def _is_plain_gloo(process_group: Any) -> bool:
    """True for Paddle's own gloo, where calls return only when they have ended, and there are no batches."""
    is_custom = not isinstance(process_group, paddle.base.core.ProcessGroup)
    return not is_custom and str(process_group.name()).lower() == "gloo"


def _tensor_of(tensor: Any) -> Tensor:
    """Return the log entry of a tensor."""
    return log_entry(tensor, tuple(tensor.strides), _version_of(tensor))


def _version_of(tensor: Any) -> int:
    return int(tensor.inplace_version)


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return tensors_in(value, paddle.Tensor, _tensor_of)


def _read(method: str, group: str, ranks: Sequence[int], args: Sequence[Any]) -> Call:
    """Return the log entry of a call of a process group."""
    if method == "barrier":
        return Call("barrier", group)
    if method in _MESSAGES:
        tensor, peer = _tensor_of(args[0]), ranks[int(args[1])]
        if method.endswith("_partial"):
            tensor = _partial_tensor(tensor, int(args[2]), int(args[3]))
        is_send = method.startswith("send")
        return Call(
            "send" if is_send else "recv", group, (tensor,) if is_send else (), () if is_send else (tensor,), peer
        )
    if method in _IN_PLACE:
        op, tensors = _IN_PLACE[method], _tensors(args[0])
        root = ranks[int(args[1])] if op in ROOTED else None
        return Call(op, group, tensors, tensors, root, reduction=_reduction(args))
    op, outputs, inputs = _OUT_AND_IN[method], _tensors(args[0]), _tensors(args[1])
    if method in _IN_FIRST:
        outputs, inputs = inputs, outputs
    if method == "all_gather_partial":
        inputs = tuple(_partial_tensor(tensor, int(args[2]), int(args[3])) for tensor in inputs)
    sent, received = (args[3], args[2]) if op == "all_to_all" and method.endswith("_single") else ((), ())
    if method in _IN_FIRST:
        sent, received = received, sent
    row_size = prod(inputs[0].shape[1:]) if inputs else 1
    return Call(
        op, group, inputs, outputs, ranks[int(args[2])] if op in ROOTED else None, reduction=_reduction(args),
        sent_splits=tuple(int(n) * row_size for n in sent), received_splits=tuple(int(n) * row_size for n in received),
    )  # fmt: skip


def _partial_tensor(tensor: Tensor, num_parts: int, part: int) -> Tensor:
    """Return the ``part``-th of equal parts of a flattened tensor, for partial calls."""
    count = prod(tensor.shape) // num_parts
    size = (tensor.stop - tensor.start) // prod(tensor.shape)
    start = tensor.start + part * count * size
    return replace(tensor, shape=(count,), strides=(1,), start=start, stop=start + count * size)


def _reduction(args: Sequence[Any]) -> str:
    for value in args:
        if isinstance(value, paddle.base.core.ReduceOp):
            return str(value).rpartition(".")[2].lower()
    return ""


_TENSORS = (("B", True), ("F", False), ("F", True), ("B", False))
"""Direction and "is sent" of four arguments: to and from the previous stage, to and from the next one."""


def wrap_fleet(patches: Patches, marks: Marks) -> None:
    """Mark each tensor that Fleet's helper is about to send or receive with its direction, batched or not.

    A stage with several chunks has both neighbour ranks on either side, so the
    peer does not distinguish an activation from a gradient.
    """
    from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

    def prepare(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for value, (kind, is_send) in zip(args, _TENSORS, strict=False):
            for tensor in tensors_in(value, paddle.Tensor, lambda tensor: tensor):
                marks.add(tensor, int(tensor.data_ptr()), {"kind": kind}, is_send=is_send)
        return function(*args, **kwargs)

    for name in ("_p2p_ops", "_batched_p2p_ops"):
        patches.wrap(p2p_communication, name, prepare)
