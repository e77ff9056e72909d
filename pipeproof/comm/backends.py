"""Observed behaviour of each backend: one table per backend and kind of device.

A table is the only place for such a fact. The deadlock rules read it, the
documentation prints it, a certificate names its version, and ``doctor`` checks
this machine against it. ``pipeproof.comm.backend_rows`` defines the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pipeproof.comm.backend_rows import BackendTable, Queue, RowValue
from pipeproof.specs.plan import PlanSpec

_MEASURED = "measured with paddlepaddle 3.3.1 on CPU"
_GLOO_SOURCE = "gloo, pair.cc"

_PADDLE_GLOO = BackendTable(
    name="paddle-gloo",
    send_completes="rendezvous",
    host_blocks_on_post=False,
    queue="directed_edge",
    isend_blocks_host=True,
    irecv_blocks_host=True,
    matching="fifo",
    tags=False,
    longer_message="abort",
    shorter_message="stale_rest",
    dtype_checked=False,
    all_gather="works",
    all_reduce="works",
    broadcast="works",
    barrier="works",
    reduce_scatter="missing",
    all_to_all="missing",
    partial_send_recv="missing",
    all_reduce_float16="wrong",
    serial_group_creation=True,
    max_group_size=2,
    max_batched_transfers=0,
    sources=MappingProxyType(
        {
            "send_completes": f"{_GLOO_SOURCE}: data moves once the receiver is ready; {_MEASURED}",
            "host_blocks_on_post": "pipeproof's adapter: transfers run in threads of their own",
            "queue": "pipeproof's adapter: a group and two threads for each edge and direction",
            "isend_blocks_host": _MEASURED,
            "irecv_blocks_host": _MEASURED,
            "matching": f"{_GLOO_SOURCE}: a FIFO for each pair and tag; {_MEASURED}",
            "tags": (
                "paddle.distributed.send has no tag argument; inside, tags are a counter of a rank's calls in a group"
            ),
            "longer_message": f"{_GLOO_SOURCE}: an enforced length check, SIGABRT; {_MEASURED}",
            "shorter_message": f"{_GLOO_SOURCE}; {_MEASURED}",
            "dtype_checked": f"{_GLOO_SOURCE}: bytes have no dtype; {_MEASURED}",
            "all_gather": _MEASURED,
            "all_reduce": _MEASURED,
            "broadcast": _MEASURED,
            "barrier": _MEASURED,
            "reduce_scatter": f"{_MEASURED}: not implemented",
            "all_to_all": f"{_MEASURED}: not implemented",
            "partial_send_recv": f"{_MEASURED}: not implemented",
            "all_reduce_float16": f"{_MEASURED}: returns inf, silently",
            "serial_group_creation": (
                f"{_MEASURED}: of 8 two-rank groups made freely by 4 processes, none came up in 6 runs; "
                "made one by one, all came up in 4 runs"
            ),
            "max_group_size": f"{_MEASURED}: sends in groups of three or more ranks time out",
            "max_batched_transfers": "gloo has no group calls: each transfer progresses by itself",
        }
    ),
)

_MEASURED_TORCH = "measured with torch 2.13.0 on CPU"

_TORCH_GLOO = BackendTable(
    name="torch-gloo",
    send_completes="rendezvous",
    host_blocks_on_post=False,
    queue="directed_edge",
    isend_blocks_host=False,
    irecv_blocks_host=False,
    matching="fifo",
    tags=True,
    longer_message="abort",
    shorter_message="stale_rest",
    dtype_checked=False,
    all_gather="works",
    all_reduce="works",
    broadcast="works",
    barrier="works",
    reduce_scatter="works",
    all_to_all="works",
    partial_send_recv="missing",
    all_reduce_float16="works",
    serial_group_creation=False,
    max_group_size=4,
    max_batched_transfers=0,
    sources=MappingProxyType(
        {
            "send_completes": f"{_GLOO_SOURCE}: data moves once the receiver is ready; {_MEASURED_TORCH}",
            "host_blocks_on_post": f"pipeproof's adapter posts with isend and irecv; {_MEASURED_TORCH}",
            "queue": "pipeproof's adapter: a group for each edge and direction",
            "isend_blocks_host": _MEASURED_TORCH,
            "irecv_blocks_host": _MEASURED_TORCH,
            "matching": f"{_GLOO_SOURCE}: a FIFO for each pair and tag; {_MEASURED_TORCH}",
            "tags": f"torch.distributed.send takes a tag; {_MEASURED_TORCH}",
            "longer_message": f"{_GLOO_SOURCE}: an enforced length check, SIGABRT; {_MEASURED_TORCH}",
            "shorter_message": f"{_GLOO_SOURCE}; {_MEASURED_TORCH}",
            "dtype_checked": f"{_GLOO_SOURCE}: bytes have no dtype; {_MEASURED_TORCH}",
            "all_gather": _MEASURED_TORCH,
            "all_reduce": _MEASURED_TORCH,
            "broadcast": _MEASURED_TORCH,
            "barrier": _MEASURED_TORCH,
            "reduce_scatter": _MEASURED_TORCH,
            "all_to_all": _MEASURED_TORCH,
            "partial_send_recv": "torch.distributed has no partial send",
            "all_reduce_float16": _MEASURED_TORCH,
            "serial_group_creation": "torch.distributed: groups meet at the store of rank 0",
            "max_group_size": "the largest that pipeproof's tests use; no limit is known",
            "max_batched_transfers": "gloo has no group calls: each transfer progresses by itself",
        }
    ),
)

_NCCL_GROUP_CALL = (
    "pytorch/pytorch issue 174288, pull request 174942 and NVIDIA/Megatron-LM pull request 7189: NCCL divides a large "
    "group call into kernels by the list of each rank, a send and its receive may be in kernels that wait for each "
    "other; hangs with about 2,000 operations on 4 H100 (PyTorch 2.9.1), and with 24,000 of them on NCCL 2.30; "
    "256 is the pull request's limit"
)
_NCCL_DOCS = "NCCL's documentation, point-to-point communication"
_TORCH_DOCS = "torch.distributed's documentation, its table of backends"
_TRIED = "tried with torch 2.11 and NCCL 2.28.9 on two H200s"

_NCCL_ALSO: Mapping[str, frozenset[RowValue]] = MappingProxyType(
    {
        "send_completes": frozenset({"eager", "slots"}),  # messages that its buffers hold
        "tags": frozenset({True}),  # taken, and never looked at
        "longer_message": frozenset({"abort", "error", "hang", "truncate"}),
        "shorter_message": frozenset({"abort", "error", "hang", "stale_rest"}),
    }
)
"""Behaviour of NCCL in addition to its tables: a send that is done early, and anything with messages of two sizes."""

_TORCH_NCCL = BackendTable(
    name="torch-nccl",
    send_completes="rendezvous",
    host_blocks_on_post=False,
    queue="directed_edge",
    isend_blocks_host=False,
    irecv_blocks_host=False,
    matching="fifo",
    tags=False,
    longer_message="other",
    shorter_message="other",
    dtype_checked=False,
    all_gather="works",
    all_reduce="works",
    broadcast="works",
    barrier="works",
    reduce_scatter="works",
    all_to_all="works",
    partial_send_recv="missing",
    all_reduce_float16="works",
    serial_group_creation=False,
    max_group_size=4,
    max_batched_transfers=256,
    sources=MappingProxyType(
        {
            "send_completes": "NVIDIA/nccl issues 479, 584, 783: buffers are finite, a send may wait for its receive",
            "host_blocks_on_post": f"kernels are launched, and the host continues while their queue has room; {_TRIED}",
            "queue": "pipeproof's adapter: a communicator with a stream of its own for each edge and direction",
            "isend_blocks_host": _TRIED,
            "irecv_blocks_host": _TRIED,
            "matching": f"nccl, enqueue.cc: a FIFO for each peer of a communicator; {_NCCL_DOCS}",
            "tags": "nccl, enqueue.cc: sends and receives have no tag",
            "longer_message": "sizes are not negotiated: a mismatch hangs, or leaves a part of the data",
            "shorter_message": "sizes are not negotiated: a mismatch hangs, or leaves a part of the data",
            "dtype_checked": "bytes have no dtype",
            "all_gather": _TORCH_DOCS,
            "all_reduce": _TRIED,
            "broadcast": _TORCH_DOCS,
            "barrier": "torch.distributed: an all-reduce that the host waits for",
            "reduce_scatter": _TORCH_DOCS,
            "all_to_all": _TORCH_DOCS,
            "partial_send_recv": "torch.distributed has no partial send",
            "all_reduce_float16": "NCCL's documentation, data types",
            "serial_group_creation": "torch.distributed: a communicator connects at its first use; the adapter uses "
            "each once before the first step, in one order",
            "max_group_size": "the largest that was tried; no limit is known",
            "max_batched_transfers": _NCCL_GROUP_CALL,
        }
    ),
    also=_NCCL_ALSO,
)

_TRIED_PADDLE = "tried with paddlepaddle-gpu 2.6.2 and NCCL 2.28 on H200s"
_PADDLE_SOURCE = "Paddle, ProcessGroupNCCL"

_PADDLE_NCCL = replace(
    _TORCH_NCCL,
    name="paddle-nccl",
    partial_send_recv="works",
    sources=MappingProxyType(
        {
            **_TORCH_NCCL.sources,
            "host_blocks_on_post": f"{_PADDLE_SOURCE}: a call that is not synchronous launches and returns",
            "isend_blocks_host": f"{_PADDLE_SOURCE}: a call that is not synchronous launches and returns",
            "irecv_blocks_host": f"{_PADDLE_SOURCE}: a call that is not synchronous launches and returns",
            "all_gather": _TRIED_PADDLE,
            "all_reduce": _TRIED_PADDLE,
            "broadcast": f"{_PADDLE_SOURCE}: ncclBroadcast",
            "barrier": f"{_PADDLE_SOURCE}: an all-reduce of what a kernel of Paddle's wrote, so the adapter waits at "
            "the store in its place",
            "reduce_scatter": _TRIED_PADDLE,
            "all_to_all": f"{_PADDLE_SOURCE}: sends and receives in one group",
            "partial_send_recv": f"{_TRIED_PADDLE}: the adapter's partial transport is made of these calls",
            "serial_group_creation": "a communicator connects at its first use; the adapter uses each once before the "
            "first step, in one order",
        }
    ),
)

TABLES: Mapping[tuple[str, str], BackendTable] = MappingProxyType(
    {
        ("paddle", "cpu"): _PADDLE_GLOO,
        ("torch", "cpu"): _TORCH_GLOO,
        ("torch", "gpu"): _TORCH_NCCL,
        ("paddle", "gpu"): _PADDLE_NCCL,
    }
)
"""By ``run.backend`` and ``run.device``."""


def backend_table(backend: str, device: str) -> BackendTable:
    """The table of a plan's ``run.backend`` on its ``run.device``.

    Raises:
        ValueError: no such table; the message lists those there are.
    """
    try:
        return TABLES[backend, device]
    except KeyError:
        table_names = ", ".join(f"{b} on {d}" for b, d in TABLES)
        raise ValueError(f"no backend table for {backend} on {device}; there are tables for {table_names}") from None


def table_named(name: str) -> BackendTable:
    """The table of a name such as ``paddle-gloo``, for programs without a plan.

    Raises:
        ValueError: no such table; the message lists those there are.
    """
    by_name = {table.name: table for table in TABLES.values()}
    if name not in by_name:
        raise ValueError(f"no backend {name!r}; there are tables for {', '.join(sorted(by_name))}")
    return by_name[name]


def declared_backend(spec: PlanSpec) -> BackendTable:
    """The table of the plan's backend, with the queues of ``transport.queue`` where that is given."""
    return with_queue(backend_table(spec.run.backend, spec.run.device), spec.transport.queue)


def with_queue(table: BackendTable, queue: Queue | None) -> BackendTable:
    """The same table with another queue of transfers and a name that states it; None keeps the backend's own queue."""
    if queue is None or queue == table.queue:
        return table
    return replace(table, name=f"{table.name} with one FIFO per {queue.replace('_', ' ')}", queue=queue)
