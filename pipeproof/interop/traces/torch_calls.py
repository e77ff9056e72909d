"""Recorder of PyTorch programs: every call of a process group, and every wait.

The methods of ``ProcessGroup`` and ``Work`` are wrapped while the recorder
runs. They are below the functions of ``torch.distributed``, so functions that
were imported earlier, the schedules of ``torch.distributed.pipelining`` and
libraries are recorded, too. Functional collectives
(``_functional_collectives``, DTensor) call C++ without these methods and are
wrapped where they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup, Work

from pipeproof.interop.traces.message_hooks import ROOTED, GroupCalls, Marks, Patches, log_entry, tensors_in
from pipeproof.interop.traces.recorder import Call, CallSink, Recorder, Tensor

# --- Functional collectives of PyTorch (``torch.ops._c10d_functional``), as DTensor and compiled code call them ---


_OPS = {
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip


class _Packet:
    """Replacement of an operator: it records calls; all attributes are the operator's."""

    def __init__(self, packet: Any, call: Callable[..., Any]) -> None:
        self._packet, self._call = packet, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packet, name)


def wrap_functional(
    patches: Patches, recorder: CallSink, group_of: Callable[[Any], str], tensor_of: Callable[[Any], Tensor]
) -> None:
    """Record functional collectives outside of compiled code, and the waits for their results."""
    pending: dict[int, int] = {}

    def issuing(op: str) -> Callable[[Any], _Packet]:
        def wrapping(packet: Any) -> _Packet:
            def call(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
                group = dist.distributed_c10d._resolve_process_group(args[-1])  # noqa: SLF001 - it takes only a name
                ranks = dist.get_process_group_ranks(group)
                splits = (tuple(map(int, args[1])), tuple(map(int, args[0]))) if op == "all_to_all" else ((), ())
                seq = recorder.call(
                    Call(
                        op, group_of(group), (tensor_of(tensor),), peer=ranks[args[0]] if op == "broadcast" else None,
                        reduction=str(args[0]).lower() if "reduce" in op else "",
                        sent_splits=splits[0], received_splits=splits[1],
                    )
                )  # fmt: skip
                result: torch.Tensor = packet(tensor, *args)
                recorder.issued(seq)
                pending[result.data_ptr()] = seq
                return result

            return _Packet(packet, call)

        return wrapping

    def waiting(packet: Any) -> _Packet:
        def wait(tensor: torch.Tensor) -> torch.Tensor:
            seq = pending.pop(tensor.data_ptr(), None)
            if seq is None:
                untouched: torch.Tensor = packet(tensor)
                return untouched
            recorder.waits((seq,))
            result: torch.Tensor = packet(tensor)
            recorder.done((seq,))
            return result

        return _Packet(packet, wait)

    namespace = torch.ops._c10d_functional  # noqa: SLF001 - the name of the operators
    for name, op in _OPS.items():
        patches.replace(namespace, name, issuing(op))
    patches.replace(namespace, "wait_tensor", waiting)


MESSAGES = ("send", "recv", "recv_anysource")
BARRIERS = ("barrier", "monitored_barrier")
IN_PLACE = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "broadcast": "broadcast", "reduce": "reduce",
}  # fmt: skip
OUT_AND_IN = {
    "allgather": "all_gather", "_allgather_base": "all_gather", "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather", "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_single_coalesced": "all_gather", "gather": "gather", "scatter": "scatter",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter", "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}  # fmt: skip


@contextmanager
def record_torch(directory: str | Path) -> Iterator[Recorder]:
    """Record the communication of this rank until the block ends, into ``directory/rank_N.jsonl``.

    Call it on every rank, around one step or a few. ``torch.distributed`` must
    be initialised. An exception of the block propagates after the log is closed.

    Raises:
        ValueError: there is no default process group, or the directory has a log of this rank.
    """
    if not dist.is_initialized():
        raise ValueError("record_torch needs a process group: call torch.distributed.init_process_group first")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    recorder = Recorder(Path(directory), rank, num_ranks, f"torch {torch.__version__}", version_of)
    with TorchCalls(recorder).recording():
        yield recorder


class TorchCalls(GroupCalls):
    """Converts calls of process groups into lines of the log."""

    def __init__(self, recorder: CallSink) -> None:
        super().__init__(recorder)
        self._any_source: set[int] = set()

    def wrap(self, patches: Patches) -> None:
        """Wrap all functions that communicate."""
        for method in (*MESSAGES, *IN_PLACE, *OUT_AND_IN, *BARRIERS):
            patches.wrap(ProcessGroup, method, partial(self._call, method))
        patches.wrap(ProcessGroup, "_start_coalescing", self._start)
        patches.wrap(ProcessGroup, "_end_coalescing", self._end_batch)
        for owner in {Work, *Work.__subclasses__()}:
            for method in ("wait", "synchronize"):
                if owner is Work or method in vars(owner):
                    patches.wrap(owner, method, self._wait)
        patches.wrap(Work, "is_completed", self._poll)
        patches.wrap(dist.distributed_c10d, "_new_process_group_helper", self._create)
        wrap_stages(patches, self._marks)
        wrap_functional(patches, self._recorder, self._group_of, tensor_of)

    def _call(self, method: str, function: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        name, ranks = self._group_of(group), dist.get_process_group_ranks(group)
        seq, work = self._issue(
            method,
            lambda: _read(method, name, ranks, [*args, *kwargs.values()]),
            lambda: function(group, *args, **kwargs),
        )
        if seq is None:
            return work
        if method == "recv_anysource":
            self._any_source.add(seq)
        if work is not None:
            self._handles[work] = (seq,)
        elif not self._recorder.in_batch:  # the backend has already waited for it
            self._recorder.waits((seq,))
            self._recorder.done((seq,))
        return work

    def _group_of(self, group: Any) -> str:
        name = str(group.group_name)
        backend = str(dist.get_backend(group)).rpartition(":")[2]
        eager = getattr(group, "bound_device_id", None) is not None
        self._recorder.group(name, dist.get_process_group_ranks(group), backend, "eager" if eager else "")
        return name

    def _start(self, function: Callable[..., Any], group: Any, *args: Any) -> Any:
        self._recorder.begin_batch()
        return function(group, *args)

    def _end_batch(self, function: Callable[..., Any], group: Any, *args: Any) -> Any:
        batch = self._recorder.end_batch()
        work = function(group, *args)
        if work is not None:
            self._handles[work] = batch
        return work

    def _poll(self, function: Callable[..., Any], work: Any) -> Any:
        completed = function(work)
        seqs = self._pending(work)
        if completed and seqs:
            self._recorder.waits(seqs)
            self._end(work, seqs)
        return completed

    def _end(self, handle: Any, seqs: Sequence[int]) -> None:
        source = None
        if self._any_source.intersection(seqs):
            source = int(handle._source_rank())  # noqa: SLF001 - nothing else gives the source of a message from any rank
        self._recorder.done(seqs, source)

    def _create(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ranks = kwargs.get("global_ranks_in_group", args[2] if len(args) > 2 else ())
        self._recorder.write("create", ranks=list(ranks) or list(range(dist.get_world_size())))
        return function(*args, **kwargs)


def tensor_of(tensor: torch.Tensor) -> Tensor:
    """Return the log entry of a tensor."""
    local = getattr(tensor, "_local_tensor", tensor)
    return log_entry(local, tuple(local.stride()), version_of(local))


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's count of in-place writes."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  # PyTorch documents it, with its underscore


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return tensors_in(value, torch.Tensor, tensor_of)


def _read(method: str, group: str, ranks: Sequence[int], args: Sequence[Any]) -> Call:
    """Return the log entry of a call of a process group."""
    if method in BARRIERS:
        return Call("barrier", group)
    tensors, options = _tensors(args[0]), args[1:]
    if method in MESSAGES:
        *peers, tag = (int(number) for number in options[: 1 if method == "recv_anysource" else 2])
        peer = ranks[peers[0]] if peers else None
        if method == "send":
            return Call("send", group, inputs=tensors, peer=peer, tag=tag)
        return Call("recv", group, outputs=tensors, peer=peer, tag=tag)
    if method in IN_PLACE:
        op = IN_PLACE[method]
        return Call(op, group, tensors, tensors, _root(op, ranks, options), reduction=_reduction(options))
    op, inputs, options = OUT_AND_IN[method], _tensors(args[1]), args[2:]
    splits = [[int(n) for n in value] for value in options if isinstance(value, list | tuple)]
    received, sent = splits if op == "all_to_all" and len(splits) == len(("received", "sent")) else ([], [])
    row_size = prod(inputs[0].shape[1:]) if inputs else 1
    return Call(
        op, group, inputs, tensors, _root(op, ranks, options), reduction=_reduction(options),
        sent_splits=tuple(n * row_size for n in sent), received_splits=tuple(n * row_size for n in received),
    )  # fmt: skip


def _root(op: str, ranks: Sequence[int], options: Sequence[Any]) -> int | None:
    if op not in ROOTED:
        return None
    for option in options:
        root = option if isinstance(option, int) else getattr(option, "rootRank", None)
        if root is not None:
            return ranks[int(root)]
    return None


def _reduction(options: Sequence[Any]) -> str:
    for option in options:
        reduce_op = getattr(option, "reduceOp", None)
        if reduce_op is not None:
            return str(getattr(reduce_op, "op", reduce_op)).rpartition(".")[2].lower()
    return ""


_METHODS = {"get_fwd_recv_ops": "F", "get_fwd_send_ops": "F", "get_bwd_recv_ops": "B", "get_bwd_send_ops": "B"}


def wrap_stages(patches: Patches, marks: Marks) -> None:
    """Mark each message with its meaning when a stage of ``torch.distributed.pipelining`` prepares it."""
    try:
        from torch.distributed.pipelining.stage import _PipelineStageBase
    except ImportError:  # built without pipelining
        return

    def prepare(kind: str, function: Callable[..., Any], stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        ops = function(stage, chunk, *args, **kwargs)
        for op in ops:
            mark = {"stage": stage.stage_index, "micro_batch": chunk, "kind": kind}
            marks.add(op.tensor, op.tensor.data_ptr(), mark, is_send=op.op.__name__ == "isend")
        return ops

    for method, kind in _METHODS.items():
        patches.wrap(_PipelineStageBase, method, partial(prepare, kind))
