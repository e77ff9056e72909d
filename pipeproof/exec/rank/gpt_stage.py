"""A stage of the plan's GPT on one rank between its boundaries, of either framework.

The tensors between stages are tuples, one tensor per member of the edge, in the order of the edge's members.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.problems import KeyPath, listed
from pipeproof.exec.rank.framework_protocol import Routers, Tensor, Value, Weight, WeightGradients
from pipeproof.schedule.ops import KIND_CODE, OpKind
from pipeproof.specs.axis_layout import Placement
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.layer import is_empty
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.model_family import describe_boundaries
from pipeproof.stages.describe.synthetic import IGNORED, Batch

# --- Members of boundaries that a GPT's run supports ---
# One member of each edge is the activation. The others come from the micro-batch and have no gradient: ``tokens``,
# ``labels`` and ``mask`` (the positions that count in the loss). The first stage that sends such a member takes it from
# its own micro-batch; a stage that receives it uses it instead of its own, and the last stage computes the loss with
# it. So a wrong delivery gives a wrong loss.


TOKENS, LABELS, MASK = "tokens", "labels", "mask"
_DTYPES = {TOKENS: ("int64", "int32"), LABELS: ("int64", "int32"), MASK: ("bool", "int64", "int32")}
_EXACT = {
    "float64": ("float64",),
    "float32": ("float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
}
"""Types that can represent all values of an activation's type."""


def activation_index(members: Sequence[Boundary]) -> int:
    """Index of the activation among an edge's members: the first with the dims s, b and h."""
    return next(index for index, member in enumerate(members) if sorted(member.dims) == ["b", "h", "s"])


def member_values(batch: Batch, member: Boundary) -> npt.NDArray[np.generic]:
    """Values of a member for a micro-batch or its sequence split, over all TP ranks."""
    values = {TOKENS: batch.tokens, LABELS: batch.labels, MASK: batch.labels != IGNORED}[member.member]
    return np.ascontiguousarray(values if member.dims == "bs" else values.T).astype(member.dtype)


def with_member(batch: Batch, member: Boundary, received: npt.NDArray[np.generic]) -> Batch:
    """Return the micro-batch, or its sequence split, with a received member instead of its derived value.

    Received tokens change the labels too: the label of every position but the last is the next token.
    """
    values = received if member.dims == "bs" else received.T
    if member.member == LABELS:
        return replace(batch, labels=values.astype(np.int64))
    if member.member == MASK:
        return replace(batch, labels=np.where(values.astype(bool), batch.labels, IGNORED))
    tokens, labels = values.astype(np.int64), batch.labels.copy()
    labels[:, :-1] = np.where(labels[:, :-1] == IGNORED, IGNORED, tokens[:, 1:])
    return Batch(tokens, labels)


def tp_shard(
    whole: npt.NDArray[np.generic], placement: Placement, rank: int, num_ranks: int
) -> npt.NDArray[np.generic]:
    """Shard of a tensor on one TP rank."""
    return whole if placement.dim is None else np.split(whole, num_ranks, axis=placement.dim)[rank]


def unsupported_boundaries(plan: LoweredPlan) -> Iterator[tuple[KeyPath, str]]:
    """Yield the key path and the reason of each declared boundary tensor that a run does not support."""
    spec = plan.spec
    if not spec.boundaries:
        return
    derived_edges = describe_boundaries(spec.model_copy(update={"boundaries": ()}))
    for edge, (declared, derived) in enumerate(zip(plan.edges, derived_edges, strict=True)):
        entries = [index for index, entry in enumerate(spec.boundaries) if entry.edge in (None, edge)]
        for members, (activation,) in zip(declared.variants, derived.variants, strict=True):
            by_entry = dict(zip(entries, members, strict=True)) if entries else {}
            for index, fact in _edge_problems(plan, edge, by_entry, activation) if by_entry else ():
                yield ("boundaries", index), fact


def _edge_problems(
    plan: LoweredPlan, edge: int, members: dict[int, Boundary], activation: Boundary
) -> Iterator[tuple[int, str]]:
    """Yield the unsupported entries of one edge, for one size of micro-batches."""
    declared = next((i for i, member in members.items() if sorted(member.dims) == ["b", "h", "s"]), None)
    if declared is None:
        yield min(members), f"edge {edge} is given no activation (dims {activation.dims})"
        return
    yield from ((declared, fact) for fact in _activation_problems(plan, edge, members[declared], activation))
    tokens = {dim: size for dim, size in zip(activation.dims, activation.shape, strict=True) if dim != "h"}
    for index, member in members.items():
        if index != declared:
            yield from ((index, fact) for fact in _batch_member_problems(plan, edge, member, tokens))
        if member.changes_layout and set(plan.holders[edge]) & set(plan.holders[edge + 1]):
            yield index, f"`{member.member}` changes its layout between stages {edge} and {edge + 1} of one rank"


def _activation_problems(plan: LoweredPlan, edge: int, member: Boundary, derived: Boundary) -> Iterator[str]:
    name = f"the activation `{member.member}`"
    if (member.dims, member.shape) != (derived.dims, derived.shape):
        yield f"{name} is {member.dims} {list(member.shape)} where the layers make {derived.dims} {list(derived.shape)}"
    if member.dtype not in _EXACT[derived.dtype]:
        yield f"{name} travels as {member.dtype}, which rounds {derived.dtype}"
    if not member.has_gradient:
        yield f"{name} brings no gradient back"
    for at_sender, stage in ((True, edge), (False, edge + 1)):
        placement = member.placement(at_sender=at_sender, gradient=False)
        if placement != derived.tp and not all(map(is_empty, plan.stages[stage])):
            yield f"{name} is {placement} on stage {stage}, whose layers have it {derived.tp}"


def _batch_member_problems(plan: LoweredPlan, edge: int, member: Boundary, tokens: dict[str, int]) -> Iterator[str]:
    name = f"`{member.member}`"
    if member.member not in _DTYPES:
        yield f"{name} is not a tensor of a GPT's run, which has its activation, {listed([*_DTYPES], 'and')}"
        return
    if plan.spec.gpt.mtp is not None:
        yield f"{name} crosses together with the streams of multi-token prediction"
    dtypes = _DTYPES[member.member]
    if member.dtype not in dtypes or member.has_gradient:
        yield f"{name} is {member.dtype}, and runs have it as {listed(dtypes)}"
    if sorted(member.dims) != ["b", "s"] or member.shape != tuple(tokens[dim] for dim in member.dims):
        yield f"{name} is {member.dims} {list(member.shape)}, and runs have one value per token, as bs or sb"
    arrives = member.placement(at_sender=False, gradient=False)
    if arrives.dim is None:
        return
    next_members = plan.edges[edge + 1].variants[0] if edge + 1 < len(plan.edges) else ()
    sent_on = [next_member for next_member in next_members if next_member.member == member.member]
    if edge + 2 == len(plan.stages):
        yield f"{name} arrives {arrives} at the last stage, which needs all of it"
    elif any(next_member.placement(at_sender=True, gradient=False) != arrives for next_member in sent_on):
        yield f"{name} arrives {arrives} at stage {edge + 1}, which sends it on with another placement"


def adds_by_block(plan: LoweredPlan) -> bool:
    """True if a whole backward adds the weight gradients of a recomputed block before it recomputes the next block.

    Otherwise it would keep inputs and output gradients of the products of all blocks to its end. False if I and W are
    separate, with overlapped pairs, which may compute W while they wait, and if W gathers again: its collectives come
    last.
    """
    memory, graph = plan.spec.memory, plan.graph
    is_apart = bool((graph.kind == KIND_CODE[OpKind.BACKWARD_INPUT]).any()) or len(graph.pairs) > 0
    return memory.recompute == "full" and memory.sequence_parallel_activations == "keep" and not is_apart


class GptStage(ABC):
    """A ``RankStage`` around the framework's ``stage``; each framework has its own form of work items."""

    def __init__(self, plan: LoweredPlan, number: int, coords: Mapping[str, int], stage: Any) -> None:
        self._plan, self._number, self._stage, self._tp = plan, number, stage, coords["tp"]
        self._cp_rank = coords["cp"] if plan.spec.topology.cp > 1 else None
        self.parameters: dict[str, Weight] = stage.parameters
        self.balance: Routers = stage.balance
        stage.adds_by_block = adds_by_block(plan)

    def forward(self, inputs: Value, *, step: int, index: int, split: int, watch: LayerWatch | None) -> Value:
        """Run one work item on the stage's micro-batch; received members of the edge replace the stage's own values."""
        members, after = self._members(self._number - 1, index, split), self._members(self._number, index, split)
        split = split if self._cp_rank is None else self._cp_rank
        work_item, activation = self._work_item(step, index, split), None
        shards: dict[str, Tensor] = {}
        if members:
            position = activation_index(members)
            activation = self._as(inputs[position], self._plan.spec.run.dtype)
            for member, received in zip(members, inputs, strict=True):
                if member is members[position]:
                    continue
                if member.placement(at_sender=False, gradient=False).dim is None:
                    work_item = self._with_member(work_item, split, member, received)
                else:  # this stage only sends its shard on
                    shards[member.member] = received
        output = self._stage.forward(activation, work_item, step=step, index=index, split=split, watch=watch)
        if not after:
            losses = self._stage.losses
            return (output,) if losses is None or not losses.shape else (output, self._reported(losses))
        position = activation_index(after)
        return tuple(
            self._as(output, member.dtype)
            if member is after[position]
            else shards[member.member].clone()
            if member.member in shards
            else self._outgoing(work_item, split, member)
            for member in after
        )

    def backward_input(self, outputs: Value, gradients: Sequence[Tensor | None]) -> WeightGradients:
        """Run one work item backward to the activation."""
        position = next((index for index, gradient in enumerate(gradients) if gradient is not None), 0)
        deferred: WeightGradients = self._stage.backward_input(outputs[position], gradients[position])
        return deferred

    def return_gradients(self) -> None:
        """Return the gradients of borrowed weights, see ``stages.common.stage.Stage.return_gradients``."""
        self._stage.return_gradients()

    def _members(self, edge: int, index: int, split: int) -> tuple[Boundary, ...]:
        """Members of an edge for one work item; empty before the first stage and after the last."""
        schedule = self._plan.spec.schedule
        work_item = index % schedule.num_micro_batches * schedule.num_sequence_splits + split
        return self._plan.edges[edge].members(work_item) if 0 <= edge < len(self._plan.edges) else ()

    @abstractmethod
    def _work_item(self, step: int, index: int, split: int) -> Any:
        """Return the work item as ``stage`` takes it."""

    @abstractmethod
    def _with_member(self, work_item: Any, split: int, member: Boundary, received: Tensor) -> Any:
        """Return the work item with a received member, whole, in place of its own values."""

    @abstractmethod
    def _outgoing(self, work_item: Any, split: int, member: Boundary) -> Tensor:
        """Return a copy of this rank's part of a member that comes from the micro-batch; sent tensors are freed."""

    @abstractmethod
    def _as(self, tensor: Tensor, dtype: str) -> Tensor:
        """Cast a tensor to the type of its message or of the computation."""

    def _reported(self, losses: Any) -> Tensor:
        """Return the vector of losses as a tensor."""
        return losses
