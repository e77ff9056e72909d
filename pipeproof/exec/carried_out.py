"""What of a plan is checked and simulated, and not carried out on real processes yet (PP909)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pipeproof.comm.step_end import GRADIENTS_QUEUE
from pipeproof.exec.codes import NOT_CARRIED_OUT
from pipeproof.exec.gpt_members import not_understood
from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE, NONE
from pipeproof.schedule.ops import (
    CHILD_KINDS,
    COMPUTE_KINDS,
    GATHER_KINDS,
    META_KINDS,
    SLICE_KINDS,
    TRANSFER_KINDS,
    UPDATE_KINDS,
    OpKind,
)
from pipeproof.specs.finding import Finding, PipeproofError, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.problems import KeyPath
from pipeproof.verify.deadlock.rows import early_transfers, rows_of
from pipeproof.verify.subject import Subject

_KNOWN = (
    TRANSFER_KINDS - META_KINDS | SLICE_KINDS | GATHER_KINDS
    | COMPUTE_KINDS | UPDATE_KINDS | {OpKind.WAIT, OpKind.FREE, OpKind.STEP}
    | {OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL}
)  # fmt: skip
"""Kinds of operations that the adapter knows."""

Refusal = tuple[KeyPath, str]
"""The place in the plan, and what stands there."""


def require_carried_out(subject: Subject) -> None:
    """Refuse a plan that would train something else than it says.

    Raises:
        PipeproofError: it asks for what is not carried out yet.
    """
    _refuse(subject, (*_of_the_plan(subject), *_of_the_graph(subject)))


def require_issued(subject: Subject) -> None:
    """Refuse a plan whose operations cannot be issued, whatever they compute.

    Raises:
        PipeproofError: it has such operations.
    """
    spec = subject.plan.spec
    _refuse(subject, (*_of_queues(spec), *_of_rehearsed_slots(spec), *_of_the_graph(subject)))


def _refuse(subject: Subject, refusals: Iterable[Refusal]) -> None:
    """Raise the first of them."""
    for path, fact in refusals:
        raise PipeproofError(
            Finding(
                NOT_CARRIED_OUT.code,
                Severity.ERROR,
                f"{fact}, which is checked and simulated but not run yet",
                location=subject.locate(*path),
                help="`pipeproof check` and `pipeproof simulate` take the plan as it is",
            )
        )


def _of_the_plan(subject: Subject) -> Iterator[Refusal]:
    spec = subject.plan.spec
    if spec.own_layers is not None and spec.buffers.release_output != "after_backward":
        # a layer's backward may read what it gave: only of a GPT's blocks it is known that theirs does not
        yield ("buffers", "release_output"), f"the plan has own layers and release_output {spec.buffers.release_output}"
    if spec.own_layers is not None and spec.run.device == "gpu":
        yield ("run", "device"), "the plan has own layers, which are tried and started on the CPU, and device gpu"
    yield from _of_queues(spec)
    if spec.topology.cp > 1:
        yield from _beside_context_parallel(spec)
    for key in ("nodes_per_token", "dispatch_dtype"):
        if getattr(spec.model.moe, key, None) is not None:
            yield ("model", "moe", key), f"the plan has model.moe.{key}"
    if spec.own_layers is None:
        yield from not_understood(subject.plan)


def _beside_context_parallel(spec: PlanSpec) -> Iterator[Refusal]:
    """What stages do not do with a part of each sequence."""
    model, fact = spec.model, f"the plan has cp {spec.topology.cp}"
    if model.mla is not None:
        yield ("topology", "cp"), f"{fact} and latent attention, whose heads share a key"
    for key in ("aux_loss", "z_loss"):
        if getattr(model.moe, key, 0):
            yield ("topology", "cp"), f"{fact} and model.moe.{key}, which is of whole micro-batches"


def _of_queues(spec: PlanSpec) -> Iterator[Refusal]:
    queue = spec.transport.queue
    if not _has_threads(spec) and queue not in (None, "directed_edge"):
        who = "PyTorch's transfers" if spec.run.backend == "torch" else "Paddle's transfers on GPUs"
        yield ("transport", "queue"), f"the plan has queue {queue}, and {who} wait for those of their edge"


def _of_rehearsed_slots(spec: PlanSpec) -> Iterator[Refusal]:
    """Ranges of a buffer are views that Paddle makes by kernels, which may do nothing on a GPU, and say nothing."""
    if spec.run.backend == "paddle" and spec.run.device == "gpu":
        for key in ("receive_slots", "send_slots"):
            if getattr(spec.buffers, key) is not None:
                yield ("buffers", key), f"the plan has buffers.{key}, rehearsed by Paddle on a GPU"


def _has_threads(spec: PlanSpec) -> bool:
    """Whether transfers have threads of their own, which can wait for those on other channels."""
    return spec.run.backend == "paddle" and spec.run.device == "cpu"


def _of_the_graph(subject: Subject) -> Iterator[Refusal]:
    graph, spec = subject.graph, subject.plan.spec
    transfers = graph.is_kind(TRANSFER_KINDS)
    on_other_queue = ~transfers & ~np.isin(graph.queue, (NONE, COMPUTE_QUEUE, HOST_QUEUE))
    if spec.schedule.reduce_gradients == "when_ready" and GRADIENTS_QUEUE in graph.queues:
        on_other_queue &= graph.queue != graph.queues.index(GRADIENTS_QUEUE)
    if not _has_threads(spec):
        on_other_queue |= transfers & (graph.queue != NONE)
    for op_id in np.flatnonzero(on_other_queue)[:1].tolist():
        yield ("schedule",), f"{graph.ops[op_id]} runs on queue {graph.queues[int(graph.queue[op_id])]}"
    batched = graph.batch != NONE
    computes = graph.is_kind(COMPUTE_KINDS)
    keys = graph.rank * (int(graph.batch.max(initial=0)) + 1) + graph.batch
    mixed = batched & ~computes & (~transfers | np.isin(keys, keys[batched & computes]))
    for op_id in np.flatnonzero(mixed)[:1].tolist():
        yield ("schedule",), f"{graph.ops[op_id]} is in one batch with operations of another kind"
    if batched.any():
        for early, ahead in zip(*early_transfers(rows_of(graph)), strict=True):
            one, other = graph.ops[ahead], graph.ops[early]
            yield ("schedule",), f"the batch of {one} is closed behind {other}, a later message of its channel"
    unknown = ~graph.is_kind(_KNOWN)
    if spec.run.clip_norm is None:  # the collectives that the adapter knows by themselves are those of the norm
        unknown |= graph.is_kind(CHILD_KINDS) & (graph.parent == NONE)
    for op_id in np.flatnonzero(unknown)[:1].tolist():
        yield ("schedule",), f"rank {int(graph.rank[op_id])} runs {graph.ops[op_id]}"
