"""Plan features that the executor does not support yet (PP909): they are checked and simulated, but not run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pipeproof.comm.step_end_rows import GRADIENTS_QUEUE
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.diagnostics.problems import KeyPath
from pipeproof.exec.rank.gpt_stage import unsupported_boundaries
from pipeproof.exec.store.run_codes import NOT_EXECUTED
from pipeproof.schedule.columns import COMPUTE_QUEUE, HOST_QUEUE, NONE
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import (
    CHILD_KINDS,
    COMPUTE_KINDS,
    GATHER_KINDS,
    META_KINDS,
    PART_KINDS,
    SLICE_KINDS,
    TRANSFER_KINDS,
    UPDATE_KINDS,
    OpKind,
)
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.stage_memory import shards_weights
from pipeproof.verify.deadlock.wait_columns import early_transfers, rows_of
from pipeproof.verify.subject import Subject

_KNOWN = (
    TRANSFER_KINDS - META_KINDS | SLICE_KINDS | GATHER_KINDS
    | COMPUTE_KINDS | UPDATE_KINDS | {OpKind.WAIT, OpKind.FREE, OpKind.STEP}
    | {OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL} | PART_KINDS
)  # fmt: skip
"""Kinds of operations that the adapter executes."""

Refusal = tuple[KeyPath, str]
"""Key path in the plan, and the unsupported feature there."""


def require_executable(subject: Subject) -> None:
    """Refuse a plan with a feature that the executor does not support; a run would train another model than planned.

    Raises:
        PipeproofError: PP909, with the location in the plan.
    """
    if subject.plan.spec.is_custom:
        raise PipeproofError(
            NOT_EXECUTED.finding(
                "the plan declares the layers of a training script, which `pipeproof run` does not have",
                location=subject.locate("model", "kind"),
                help="train them with pipeproof.torch.Pipeline or pipeproof.paddle.Pipeline; `compare` of either runs "
                "a step next to the unpartitioned model",
            )
        )
    _refuse(subject, (*_plan_refusals(subject), *_graph_refusals(subject)))


def require_issuable(subject: Subject) -> None:
    """Refuse a plan with operations that a rehearsal cannot issue.

    Raises:
        PipeproofError: PP909, with the location in the plan.
    """
    spec = subject.plan.spec
    _refuse(subject, (*_transport_refusals(spec), *_rehearsal_refusals(spec), *_graph_refusals(subject)))


def _refuse(subject: Subject, refusals: Iterable[Refusal]) -> None:
    for path, fact in refusals:
        raise PipeproofError(
            NOT_EXECUTED.finding(
                f"{fact}, which is checked and simulated but not run yet",
                location=subject.locate(*path),
                help="`pipeproof check` and `pipeproof simulate` take the plan as it is",
            )
        )


def _plan_refusals(subject: Subject) -> Iterator[Refusal]:
    spec = subject.plan.spec
    yield from _transport_refusals(spec)
    if spec.topology.cp > 1:
        yield from _context_parallel_refusals(spec)
    if spec.schedule.alternation is not None and spec.run.backend != "torch":
        yield ("schedule", "overlap"), "the plan has schedule.overlap and backend paddle, whose collectives all block"
    if shards_weights(spec) and spec.run.main_grad_dtype is not None:
        yield ("memory", "shard_weights"), "the plan has memory.shard_weights and run.main_grad_dtype"
    for key in ("nodes_per_token", "dispatch_dtype"):
        if getattr(spec.model.moe, key, None) is not None:
            yield ("model", "moe", key), f"the plan has model.moe.{key}"
    yield from _recompute_refusals(spec)
    yield from unsupported_boundaries(subject.plan)


def _recompute_refusals(spec: PlanSpec) -> Iterator[Refusal]:
    """Modules whose recomputation would still keep memory: their output, or gathered tokens for shared experts."""
    memory, path = spec.memory, ("memory", "recompute_modules")
    if memory.recompute != "selective":
        return
    for module in memory.recompute_modules:
        if module in ("layernorm", "mla_up_proj", "moe_act"):
            yield path, f"the plan has recompute_modules [{module}], whose output its reader keeps"
    if "shared_experts" in memory.recompute_modules and memory.sequence_parallel_activations == "regather":
        yield path, "the plan has recompute_modules [shared_experts] and regather, whose gathered input is kept"


def _context_parallel_refusals(spec: PlanSpec) -> Iterator[Refusal]:
    """Features that stages do not support with a part of each sequence."""
    model, fact = spec.gpt, f"the plan has cp {spec.topology.cp}"
    if model.mla is not None:
        yield ("topology", "cp"), f"{fact} and latent attention, whose heads share one key"
    for key in ("aux_loss", "z_loss"):
        if getattr(model.moe, key, 0):
            yield ("topology", "cp"), f"{fact} and model.moe.{key}, which is computed over whole micro-batches"


def _transport_refusals(spec: PlanSpec) -> Iterator[Refusal]:
    if spec.transport.shape_exchange != "none":
        yield ("transport", "shape_exchange"), f"the plan has shape_exchange {spec.transport.shape_exchange}"
    queue = spec.transport.queue
    if not _has_threads(spec) and queue not in (None, "directed_edge"):
        transfers = "PyTorch's transfers" if spec.run.backend == "torch" else "Paddle's transfers on GPUs"
        yield ("transport", "queue"), f"the plan has queue {queue}; {transfers} only wait for transfers of their edge"


def _rehearsal_refusals(spec: PlanSpec) -> Iterator[Refusal]:
    """Messages and overlapped pairs that cannot be rehearsed.

    A packed message has bytes, which cannot be marked like elements. Stages without values do not alternate. Paddle on
    a GPU makes views of a slot with kernels, which may fail silently.
    """
    if spec.transport.messages == "packed":
        yield ("transport", "messages"), "the plan has packed messages and is rehearsed"
    if any(edge.route == "direct" for edge in spec.edges):
        yield ("edges",), "the plan has direct edges and is rehearsed"
    if spec.schedule.alternation is not None:
        yield ("schedule", "overlap"), "the plan is rehearsed with schedule.overlap"
    if spec.run.backend == "paddle" and spec.run.device == "gpu":
        for key in ("receive_slots", "send_slots"):
            if getattr(spec.buffers, key) is not None:
                yield ("buffers", key), f"the plan has buffers.{key} and is rehearsed by Paddle on a GPU"


def _has_threads(spec: PlanSpec) -> bool:
    """Return True if each channel has a thread, which can wait for transfers on other channels."""
    return spec.run.backend == "paddle" and spec.run.device == "cpu"


def factors_not_executed(graph: OpGraph) -> Iterator[str]:
    """Facts about rows whose scale or reduction changes gradients, which stages compute without.

    Stages apply the loss normalization of the plan, and they add and sum gradients.
    """
    other = [graph.reduction_names.index(name) for name in ("avg", "overwrite")]
    for op_id in np.flatnonzero((graph.scale != 0) | np.isin(graph.reduction, other)).tolist():
        row = graph.row(op_id)
        attribute = f"scale {row.scale}" if row.scale else f"reduction {row.reduction}"
        yield f"{row.op} has {attribute}"


def _graph_refusals(subject: Subject) -> Iterator[Refusal]:
    graph, spec = subject.graph, subject.plan.spec
    for fact in factors_not_executed(graph):
        yield ("schedule",), fact
    transfers = graph.is_kind(TRANSFER_KINDS)
    on_other_queue = ~transfers & ~np.isin(graph.queue, (NONE, COMPUTE_QUEUE, HOST_QUEUE))
    if spec.schedule.reduce_gradients == "when_ready" and GRADIENTS_QUEUE in graph.queues:
        on_other_queue &= graph.queue != graph.queues.index(GRADIENTS_QUEUE)
    on_other_queue &= graph.part_before == NONE  # collectives of alternating pairs run while the rank computes
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
            yield (
                ("schedule",),
                f"the batch of {graph.ops[ahead]} is closed after {graph.ops[early]}, a later message of its channel",
            )
    unknown = ~graph.is_kind(_KNOWN | {OpKind.RESHARD} if shards_weights(spec) else _KNOWN)
    if spec.run.clip_norm is None:  # collectives without a parent are sums of norms
        unknown |= graph.is_kind(CHILD_KINDS) & (graph.parent == NONE)
    for op_id in np.flatnonzero(unknown)[:1].tolist():
        yield ("schedule",), f"rank {int(graph.rank[op_id])} runs {graph.ops[op_id]}"
