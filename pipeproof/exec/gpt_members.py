"""What a run of a GPT understands of the tensors that a plan declares at its boundaries.

One member of each edge is the activation. The others come from the
micro-batch and have no gradient: ``tokens``, ``labels`` and ``mask`` (which
positions count in the loss). The first stage that sends one takes it from its
own micro-batch; a stage that receives one uses it in place of its own, and
the last stage computes the loss with it. So a wrong delivery is a wrong loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.specs.layout import Placement
from pipeproof.specs.problems import KeyPath, listed
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.edges import describe_boundaries
from pipeproof.stages.describe.order import is_empty
from pipeproof.stages.describe.synthetic import IGNORED, Batch

TOKENS, LABELS, MASK = "tokens", "labels", "mask"
_DTYPES = {TOKENS: ("int64", "int32"), LABELS: ("int64", "int32"), MASK: ("bool", "int64", "int32")}
_EXACT = {
    "float64": ("float64",),
    "float32": ("float32", "float64"),
    "bfloat16": ("bfloat16", "float32", "float64"),
    "float16": ("float16", "float32", "float64"),
}
"""By the type of activations, those that hold all its values."""

Words = npt.NDArray[np.int64]


def activation_place(members: Sequence[Boundary]) -> int:
    """Which member of an edge is the activation: the first with the dims s, b and h."""
    return next(place for place, member in enumerate(members) if sorted(member.dims) == ["b", "h", "s"])


def taken_from(batch: Batch, member: Boundary) -> npt.NDArray[np.generic]:
    """What a member has of a micro-batch, or of a piece of one, over all TP ranks."""
    words = {TOKENS: batch.tokens, LABELS: batch.labels, MASK: batch.labels != IGNORED}[member.member]
    return np.ascontiguousarray(words if member.dims == "bs" else words.T).astype(member.dtype)


def put_into(batch: Batch, member: Boundary, received: npt.NDArray[np.generic]) -> Batch:
    """The micro-batch, or piece of one, with what was received in place of its own.

    Tokens stand in the labels, too: a position's label is the next token, but for the last one's.
    """
    words = received if member.dims == "bs" else received.T
    if member.member == LABELS:
        return replace(batch, labels=words.astype(np.int64))
    if member.member == MASK:
        return replace(batch, labels=np.where(words.astype(bool), batch.labels, IGNORED))
    tokens, labels = words.astype(np.int64), batch.labels.copy()
    labels[:, :-1] = np.where(labels[:, :-1] == IGNORED, IGNORED, tokens[:, 1:])
    return Batch(tokens, labels)


def local_part(
    whole: npt.NDArray[np.generic], placement: Placement, rank: int, num_ranks: int
) -> npt.NDArray[np.generic]:
    """What one TP rank holds of a tensor."""
    return whole if placement.dim is None else np.split(whole, num_ranks, axis=placement.dim)[rank]


def not_understood(plan: LoweredPlan) -> Iterator[tuple[KeyPath, str]]:
    """Where, and why, a run does not carry out what a plan declares at its boundaries."""
    spec = plan.spec
    if not spec.boundaries:
        return
    own_edges = describe_boundaries(spec.model_copy(update={"boundaries": ()}))
    for edge, (declared, own) in enumerate(zip(plan.edges, own_edges, strict=True)):
        entries = [index for index, entry in enumerate(spec.boundaries) if entry.edge in (None, edge)]
        for members, (activation,) in zip(declared.variants, own.variants, strict=True):
            named = dict(zip(entries, members, strict=True)) if entries else {}
            for index, fact in _of_edge(plan, edge, named, activation) if named else ():
                yield ("boundaries", index), fact


def _of_edge(
    plan: LoweredPlan, edge: int, members: dict[int, Boundary], activation: Boundary
) -> Iterator[tuple[int, str]]:
    """The entries of one edge, for one size of micro-batches, that a run does not understand."""
    declared = next((i for i, member in members.items() if sorted(member.dims) == ["b", "h", "s"]), None)
    if declared is None:
        yield min(members), f"edge {edge} is given no activation (dims {activation.dims})"
        return
    yield from ((declared, fact) for fact in _of_activation(plan, edge, members[declared], activation))
    tokens = {dim: size for dim, size in zip(activation.dims, activation.shape, strict=True) if dim != "h"}
    for index, member in members.items():
        if index != declared:
            yield from ((index, fact) for fact in _of_words(plan, edge, member, tokens))
        if member.changes_layout and set(plan.holders[edge]) & set(plan.holders[edge + 1]):
            yield index, f"`{member.member}` changes its layout between stages {edge} and {edge + 1} of one rank"


def _of_activation(plan: LoweredPlan, edge: int, member: Boundary, own: Boundary) -> Iterator[str]:
    name = f"the activation `{member.member}`"
    if (member.dims, member.shape) != (own.dims, own.shape):
        yield f"{name} is {member.dims} {list(member.shape)} where the layers make {own.dims} {list(own.shape)}"
    if member.dtype not in _EXACT[own.dtype]:
        yield f"{name} travels as {member.dtype}, which rounds {own.dtype}"
    if not member.has_gradient:
        yield f"{name} brings no gradient back"
    for at_sender, stage in ((True, edge), (False, edge + 1)):
        held = member.placement(at_sender=at_sender, gradient=False)
        if held != own.tp and not all(map(is_empty, plan.stages[stage])):
            yield f"{name} is {held} on stage {stage}, whose layers have it {own.tp}"


def _of_words(plan: LoweredPlan, edge: int, member: Boundary, tokens: dict[str, int]) -> Iterator[str]:
    name = f"`{member.member}`"
    if member.member not in _DTYPES:
        yield f"{name} is no tensor of a GPT's run, which has its activation, {listed([*_DTYPES], 'and')}"
        return
    if plan.spec.model.mtp is not None:
        yield f"{name} crosses beside what modules of multi-token prediction hand on"
    dtypes = _DTYPES[member.member]
    if member.dtype not in dtypes or member.has_gradient:
        yield f"{name} is {member.dtype}, and runs have it as {listed(dtypes)}"
    if sorted(member.dims) != ["b", "s"] or member.shape != tuple(tokens[dim] for dim in member.dims):
        yield f"{name} is {member.dims} {list(member.shape)}, and runs have it for each token, as bs or sb"
    arrives = member.placement(at_sender=False, gradient=False)
    if arrives.dim is None:
        return
    after = [other for other in _members_after(plan, edge) if other.member == member.member]
    if edge + 2 == len(plan.stages):
        yield f"{name} arrives {arrives} at the last stage, which needs all of it"
    elif any(other.placement(at_sender=True, gradient=False) != arrives for other in after):
        yield f"{name} arrives {arrives} at stage {edge + 1}, which is to send it on as another part"


def _members_after(plan: LoweredPlan, edge: int) -> Sequence[Boundary]:
    return plan.edges[edge + 1].variants[0] if edge + 1 < len(plan.edges) else ()
