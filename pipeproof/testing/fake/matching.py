"""Whether what meets in a fake world means the same, and what its members get of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeproof.schedule.ops import OpKind
from pipeproof.testing.fake.errors import MismatchError
from pipeproof.testing.fake.operations import Array, Call, Transfer
from pipeproof.verify.pairs import partner_of


def check_pair(send: Transfer, receive: Transfer) -> None:
    """Hold the two ends of a message to each other: PP302, PP303 and PP304 as they happen.

    Raises:
        MismatchError: another tensor is meant, or its shape or type differs.
    """
    where = f"message {send.position} from rank {send.rank} to rank {receive.rank}"
    meant = partner_of(send.op)._replace(split=send.op.split)
    if receive.op != meant:
        raise MismatchError(f"{where}: {send.words} means {meant}, but meets {receive.words}")
    if receive.into is None:
        return
    assert send.array is not None
    sent, wanted = (
        f"{dtype} {list(array.shape)}" for dtype, array in ((send.dtype, send.array), (receive.dtype, receive.into))
    )
    if sent != wanted:
        raise MismatchError(f"{where}: {send.words} sends {sent}, but {receive.words} receives into {wanted}")


def fill(receive: Transfer, send: Transfer) -> None:
    """A message has come."""
    assert send.array is not None
    receive.array = send.array.copy()
    if receive.into is not None:
        receive.into[...] = send.array


def check_calls(first: Call, other: Call) -> None:
    """Hold a member's part in a collective to that of the member that came first: PP306 as it happens.

    Raises:
        MismatchError: they differ in kind, shape, type, reduction or root.
    """
    if first.form != other.form:
        raise MismatchError(
            f"collective {first.position} of {first.group.axis} group {list(first.group.ranks)} is "
            f"{first.form_words} on rank {first.rank} but {other.form_words} on rank {other.rank}"
        )


_REDUCE: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {"sum": lambda stacked: stacked.sum(axis=0), "max": lambda stacked: stacked.max(axis=0)}
)


def _reduced(stacked: Array, reduction: str) -> Array:
    if reduction == "avg":
        mean: Array = np.asarray(stacked.sum(axis=0) / len(stacked))
        return mean
    reduced: Array = _REDUCE[reduction](stacked).astype(stacked.dtype)
    return reduced


def results(members: Sequence[Call]) -> list[Any]:
    """What each member gets, in the order of ``members``. Sums are taken in the order of the group."""
    ranks = members[0].group.ranks
    by_rank = {member.rank: member for member in members}
    ordered = [by_rank[rank] for rank in ranks]
    return [_result(member, ordered, ranks.index(member.rank)) for member in members]


def _result(member: Call, ordered: Sequence[Call], place: int) -> Any:
    kind, all_put = member.op.kind, [one.arrays for one in ordered]
    match kind:
        case OpKind.BARRIER:
            return None
        case OpKind.ALL_GATHER:
            return [arrays[0].copy() for arrays in all_put]
        case OpKind.ALL_TO_ALL:
            return [arrays[place].copy() for arrays in all_put]
        case OpKind.BROADCAST:
            return next(one.arrays[0] for one in ordered if one.rank == member.root).copy()
    whole = _reduced(np.stack([arrays[0] for arrays in all_put]), member.reduction)
    return whole if kind is OpKind.ALL_REDUCE else np.split(whole, len(ordered))[place].copy()
