"""Recording a Paddle program: every call of a process group, whoever makes it, and every wait.

The methods of ``ProcessGroup`` and of its tasks are wrapped for a while, below
``paddle.distributed``, its ``stream`` functions and Fleet's P2P helpers:
``*_on_calc_stream`` and partial sends and receives are recorded alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import _GroupManager

from pipeproof.interop.record.marks import Marks
from pipeproof.interop.record.paddle_fleet import wrap_fleet
from pipeproof.interop.record.patches import Patches
from pipeproof.interop.record.recorder import Call, Recorder, Tensor

_ON_STREAM = "_on_calc_stream"
_IN_PLACE = {"all_reduce": "all_reduce", "allreduce": "all_reduce", "broadcast": "broadcast", "reduce": "reduce"}
_OUT_AND_IN = {
    "all_gather": "all_gather", "all_gather_into_tensor": "all_gather", "all_gather_partial": "all_gather",
    "all_to_all": "all_to_all", "all_to_all_tensor": "all_to_all", "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all", "alltoall_single": "all_to_all", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter", "scatter": "scatter", "scatter_tensor": "scatter", "gather": "gather",
}  # fmt: skip
_IN_FIRST = frozenset({"gather", "alltoall", "alltoall_single"})
"""What takes its input before its output."""
_MESSAGES = ("send", "recv", "send_partial", "recv_partial")
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})


@contextmanager
def record_paddle(directory: str | Path) -> Iterator[Recorder]:
    """Record what this rank communicates until the block ends, into ``directory/rank_N.jsonl``.

    Call it on every rank, around one step or a few, after
    ``paddle.distributed.init_parallel_env`` or ``fleet.init``. Whatever the
    block raises goes on, and the log is whole all the same.

    Raises:
        ValueError: the parallel environment is not initialised, or the directory has a log of this rank.
    """
    if not dist.is_initialized():
        raise ValueError("record_paddle needs process groups: call paddle.distributed.init_parallel_env first")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    recorder = Recorder(Path(directory), rank, num_ranks, f"paddle {paddle.__version__}", _version_of)
    patches = Patches()
    error: BaseException | None = None
    try:
        PaddleCalls(recorder).wrap(patches)
        yield recorder
    except BaseException as raised:
        error = raised
        raise
    finally:
        patches.undo()
        recorder.close(error)


class PaddleCalls:
    """Turns calls of process groups into lines of the log."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._tasks: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()
        self._marks = Marks()
        self._patches = Patches()
        self._waited: set[type] = set()

    def wrap(self, patches: Patches) -> None:
        """Wrap everything that communicates."""
        for group in _classes_of_groups():
            for method in (*_MESSAGES, *_IN_PLACE, *_OUT_AND_IN, "barrier"):
                for name in (method, method + _ON_STREAM):
                    patches.wrap(group, name, self._wrapping(method, on_stream=name != method))
            patches.wrap(group, "_start_coalescing", self._starts)
            patches.wrap(group, "_end_coalescing", self._ends)
        self._patches = patches
        self._waitable(paddle.base.core.task)
        wrap_fleet(patches, self._marks)

    def _wrapping(self, method: str, *, on_stream: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(group: Any, *args: Any, **kwargs: Any) -> Any:
                name, ranks = self._group_of(group)
                try:
                    about = _read(method, name, ranks, [*args, *kwargs.values()])
                except (AttributeError, IndexError, TypeError, ValueError) as error:  # of a release that is not known
                    self._recorder.unread(method, error)
                    return function(group, *args, **kwargs)
                blocks = on_stream or _is_plain_gloo(group)
                seq = self._recorder.call(replace(about, blocks=blocks), self._marks.of(about))
                try:
                    task = function(group, *args, **kwargs)
                except BaseException as error:
                    self._recorder.failed((seq,), error)
                    raise
                self._recorder.issued(seq)
                if blocks:
                    if not self._recorder.in_batch:
                        self._recorder.done((seq,))
                elif task is not None:
                    self._waitable(type(task))
                    self._tasks[task] = (seq,)
                return task

            return call

        return wrapping

    def _waitable(self, task: type) -> None:
        """Wrap how a class of tasks is waited for, once."""
        if task not in self._waited:
            self._waited.add(task)
            for method in ("wait", "synchronize"):
                self._patches.wrap(task, method, self._waiting)

    def _group_of(self, process_group: Any) -> tuple[str, list[int]]:
        """Name and global ranks of a process group."""
        backend = str(process_group.name()).lower()
        for number, group in _GroupManager.group_map_by_id.items():
            if group.process_group is process_group:
                name, ranks = str(number), list(group.ranks)
                self._recorder.group(name, ranks, backend, str(group.name or ""))
                return name, ranks
        name, ranks = f"unknown {id(process_group)}", list(range(process_group.size()))
        self._recorder.group(name, ranks, backend)
        return name, ranks

    def _starts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def start(group: Any, *args: Any) -> Any:
            if not _is_plain_gloo(group):  # Paddle's own gloo has no batches: its calls go one by one
                self._recorder.begin_batch()
            return function(group, *args)

        return start

    def _ends(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def end(group: Any, *args: Any) -> Any:
            result = function(group, *args)
            batch = self._recorder.end_batch()
            self._recorder.done([seq for seq in batch if self._recorder.blocks(seq)])
            return result

        return end

    def _waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(task: Any, *args: Any, **kwargs: Any) -> Any:
            seqs = tuple(seq for seq in self._tasks.get(task, ()) if self._recorder.is_pending(seq))
            if not seqs:
                return function(task, *args, **kwargs)
            self._recorder.waits(seqs)
            try:
                result = function(task, *args, **kwargs)
            except BaseException as error:
                self._recorder.failed(seqs, error)
                raise
            self._recorder.done(seqs)
            return result

        return wait


def _classes_of_groups() -> list[type]:
    """Classes of the objects behind groups: a program's own, where it has put some there, else Paddle's."""
    behind = {type(group.process_group) for group in _GroupManager.group_map_by_id.values() if group.process_group}
    own = sorted((one for one in behind if not issubclass(one, paddle.base.core.ProcessGroup)), key=str)
    return own or [paddle.base.core.ProcessGroup]


def _is_plain_gloo(process_group: Any) -> bool:
    """Whether calls return only when they have ended, and batches are none: so it is with Paddle's own gloo."""
    is_own = not isinstance(process_group, paddle.base.core.ProcessGroup)
    return not is_own and str(process_group.name()).lower() == "gloo"


def _tensor_of(tensor: Any) -> Tensor:
    """What the log says of a tensor."""
    shape, strides = tuple(tensor.shape), tuple(tensor.strides)
    start = int(tensor.data_ptr())
    span = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    stop = start + span * int(tensor.element_size()) if prod(shape) else start
    dtype = str(tensor.dtype).removeprefix("paddle.")
    return Tensor(shape, dtype, strides, start, stop, _version_of(tensor), tensor)


def _version_of(tensor: Any) -> int:
    return int(tensor.inplace_version)


def _tensors(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, paddle.Tensor):
        return (_tensor_of(value),)
    if isinstance(value, list | tuple):
        return tuple(tensor for part in value for tensor in _tensors(part))
    return ()


def _read(method: str, group: str, ranks: Sequence[int], given: Sequence[Any]) -> Call:
    """What a call of a process group says."""
    if method == "barrier":
        return Call("barrier", group)
    if method in _MESSAGES:
        tensor, peer = _tensor_of(given[0]), ranks[int(given[1])]
        if method.endswith("_partial"):
            tensor = _part(tensor, int(given[2]), int(given[3]))
        is_send = method.startswith("send")
        return Call(
            "send" if is_send else "recv", group, (tensor,) if is_send else (), () if is_send else (tensor,), peer
        )
    if method in _IN_PLACE:
        op, tensors = _IN_PLACE[method], _tensors(given[0])
        root = ranks[int(given[1])] if op in _ROOTED else None
        return Call(op, group, tensors, tensors, root, reduction=_reduction(given))
    op, outputs, inputs = _OUT_AND_IN[method], _tensors(given[0]), _tensors(given[1])
    if method in _IN_FIRST:
        outputs, inputs = inputs, outputs
    if method == "all_gather_partial":
        inputs = tuple(_part(tensor, int(given[2]), int(given[3])) for tensor in inputs)
    sent, received = (given[3], given[2]) if op == "all_to_all" and method.endswith("_single") else ((), ())
    if method in _IN_FIRST:
        sent, received = received, sent
    each = prod(inputs[0].shape[1:]) if inputs else 1
    return Call(
        op, group, inputs, outputs, ranks[int(given[2])] if op in _ROOTED else None, reduction=_reduction(given),
        sent_splits=tuple(int(n) * each for n in sent), received_splits=tuple(int(n) * each for n in received),
    )  # fmt: skip


def _part(tensor: Tensor, num_parts: int, part: int) -> Tensor:
    """The ``part``-th of equal parts of a flattened tensor, as partial calls take it."""
    count = prod(tensor.shape) // num_parts
    size = (tensor.stop - tensor.start) // prod(tensor.shape)
    start = tensor.start + part * count * size
    return replace(tensor, shape=(count,), strides=(1,), start=start, stop=start + count * size)


def _reduction(given: Sequence[Any]) -> str:
    for value in given:
        if isinstance(value, paddle.base.core.ReduceOp):
            return str(value).rpartition(".")[2].lower()
    return ""
