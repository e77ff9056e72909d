"""Observed behaviour of each backend: one table per backend and kind of device.

A table is the only place for such a fact. The deadlock rules read it, the
documentation prints it, a certificate names its version, and ``doctor`` checks
this machine against it. ``pipeproof.comm.backend_rows`` defines the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pipeproof.comm.backend_rows import BackendTable, Queue
from pipeproof.specs.plan import PlanSpec

_MEASURED = "measured with paddlepaddle 3.3.1 on CPU"
_GLOO_SOURCE = "gloo, pair.cc"

_PADDLE_GLOO = BackendTable(
    name="paddle-gloo",
    send_completes="rendezvous",
    host_blocks_on_post=False,
    queue="directed_edge",
    matching="fifo",
    all_gather="works",
    barrier="works",
    max_batched_transfers=0,
    sources=MappingProxyType(
        {
            "send_completes": f"{_GLOO_SOURCE}: data moves once the receiver is ready; {_MEASURED}",
            "host_blocks_on_post": "pipeproof's adapter: transfers run in threads of their own",
            "queue": "pipeproof's adapter: a group and two threads for each edge and direction",
            "matching": f"{_GLOO_SOURCE}: a FIFO for each pair and tag; {_MEASURED}",
            "all_gather": _MEASURED,
            "barrier": _MEASURED,
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
    matching="fifo",
    all_gather="works",
    barrier="works",
    max_batched_transfers=0,
    sources=MappingProxyType(
        {
            "send_completes": f"{_GLOO_SOURCE}: data moves once the receiver is ready; {_MEASURED_TORCH}",
            "host_blocks_on_post": f"pipeproof's adapter posts with isend and irecv; {_MEASURED_TORCH}",
            "queue": "pipeproof's adapter: a group for each edge and direction",
            "matching": f"{_GLOO_SOURCE}: a FIFO for each pair and tag; {_MEASURED_TORCH}",
            "all_gather": _MEASURED_TORCH,
            "barrier": _MEASURED_TORCH,
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

_TORCH_NCCL = BackendTable(
    name="torch-nccl",
    send_completes="rendezvous",
    host_blocks_on_post=False,
    queue="directed_edge",
    matching="fifo",
    all_gather="works",
    barrier="works",
    max_batched_transfers=256,
    sources=MappingProxyType(
        {
            "send_completes": "NVIDIA/nccl issues 479, 584, 783: buffers are finite, a send may wait for its receive",
            "host_blocks_on_post": f"kernels are launched, and the host continues while their queue has room; {_TRIED}",
            "queue": "pipeproof's adapter: a communicator with a stream of its own for each edge and direction",
            "matching": f"nccl, enqueue.cc: a FIFO for each peer of a communicator; {_NCCL_DOCS}",
            "all_gather": _TORCH_DOCS,
            "barrier": "torch.distributed: an all-reduce that the host waits for",
            "max_batched_transfers": _NCCL_GROUP_CALL,
        }
    ),
    also=MappingProxyType({"send_completes": frozenset({"eager", "slots"})}),  # messages that its buffers hold
)

_TRIED_PADDLE = "tried with paddlepaddle-gpu 2.6.2 and NCCL 2.28 on H200s"
_PADDLE_SOURCE = "Paddle, ProcessGroupNCCL"

_PADDLE_NCCL = replace(
    _TORCH_NCCL,
    name="paddle-nccl",
    sources=MappingProxyType(
        {
            **_TORCH_NCCL.sources,
            "host_blocks_on_post": f"{_PADDLE_SOURCE}: a call that is not synchronous launches and returns",
            "all_gather": _TRIED_PADDLE,
            "barrier": f"{_PADDLE_SOURCE}: an all-reduce of what a kernel of Paddle's wrote, so the adapter waits at "
            "the store in its place",
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
    """The table of the plan's backend, with the queues of ``transport.queue``, if given."""
    return with_queue(backend_table(spec.run.backend, spec.run.device), spec.transport.queue)


def with_queue(table: BackendTable, queue: Queue | None) -> BackendTable:
    """The same table with another queue of transfers and a name that states it; None keeps the backend's own queue."""
    if queue is None or queue == table.queue:
        return table
    return replace(table, name=f"{table.name} with one FIFO per {queue.replace('_', ' ')}", queue=queue)
