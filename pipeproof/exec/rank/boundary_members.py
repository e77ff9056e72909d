"""Members of boundaries that a GPT's run supports.

One member of each edge is the activation. The others come from the micro-batch and have no gradient: ``tokens``,
``labels`` and ``mask`` (the positions that count in the loss). The first stage that sends one takes it from its own
micro-batch; a stage that receives one uses it instead of its own, and the last stage computes the loss with it. So a
wrong delivery is a wrong loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.problems import KeyPath, listed
from pipeproof.specs.axis_layout import Placement
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.layer import is_empty
from pipeproof.stages.describe.model_family import describe_boundaries
from pipeproof.stages.describe.synthetic import IGNORED, Batch

TOKENS, LABELS, MASK = "tokens", "labels", "mask"
_DTYPES = {TOKENS: ("int64", "int32"), LABELS: ("int64", "int32"), MASK: ("bool", "int64", "int32")}
_EXACT = {
    "float64": ("float64",),
    "float32": ("float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
}
"""Types that represent all values of a type of activations."""


def activation_index(members: Sequence[Boundary]) -> int:
    """Index of the activation among an edge's members: the first with the dims s, b and h."""
    return next(index for index, member in enumerate(members) if sorted(member.dims) == ["b", "h", "s"])


def member_values(batch: Batch, member: Boundary) -> npt.NDArray[np.generic]:
    """Values of a member for a micro-batch or a sequence split of one, over all TP ranks."""
    values = {TOKENS: batch.tokens, LABELS: batch.labels, MASK: batch.labels != IGNORED}[member.member]
    return np.ascontiguousarray(values if member.dims == "bs" else values.T).astype(member.dtype)


def with_member(batch: Batch, member: Boundary, received: npt.NDArray[np.generic]) -> Batch:
    """Return the micro-batch, or sequence split of one, with a received member instead of its derived.

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
