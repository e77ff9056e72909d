"""Messages that bring a tensor from one layout to another, each element once and from the nearest holder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeproof.specs.layout import Placement
from pipeproof.stages.describe.index_map import IndexMap, Piece, layout_map


class Message(NamedTuple):
    """``length`` elements from ``send_start`` of the ``sender``-th rank's tensor to ``recv_start`` of the receiver's.

    Ranks count within their side's TP group; starts count flattened local elements.
    """

    sender: int
    receiver: int
    send_start: int
    recv_start: int
    length: int


def reshard_messages(
    shape: Sequence[int], sender: Placement, num_senders: int, receiver: Placement, num_receivers: int
) -> tuple[Message, ...]:
    """What must travel so that ``num_receivers`` ranks hold a tensor of global ``shape`` as ``receiver`` says.

    By receiver, then by position. Where several senders hold an element, the
    one with the receiver's own number sends it, else the first in order.

    Raises:
        ValueError: a layout does not divide, or the receivers want what no
            sender holds (addends of a tensor that is already summed).
    """
    held = [layout_map(shape, sender, num_senders, rank) for rank in range(num_senders)]
    messages = []
    for rank in range(num_receivers):
        wanted = layout_map(shape, receiver, num_receivers, rank)
        nearest = [rank] if rank < num_senders else []
        order = nearest + [other for other in range(num_senders) if other != rank]
        messages += _messages_to(rank, wanted, [(other, held[other].inverted()) for other in order])
    return tuple(messages)


def _messages_to(receiver: int, wanted: IndexMap, holders: Sequence[tuple[int, IndexMap]]) -> list[Message]:
    found: list[Message] = []
    open_pieces = wanted.pieces
    for sender, by_whole in holders:
        still_open: list[Piece] = []
        for piece in open_pieces:
            taken = by_whole.part(piece.whole, piece.whole + piece.length, piece.local)  # receiver's to sender's index
            found += [Message(sender, receiver, there, here, length) for here, there, length in taken.pieces]
            still_open += _rest(piece, taken)
        open_pieces = still_open
    if open_pieces:
        raise ValueError(f"no sender holds what receiver {receiver} wants at {open_pieces[0].local} of its tensor")
    return sorted(found, key=lambda message: message.recv_start)


def _rest(piece: Piece, taken: IndexMap) -> list[Piece]:
    """What is left of a wanted piece after ``taken`` (by the receiver's local index)."""
    rest = []
    position = piece.local
    for here, _, length in (*taken.pieces, Piece(piece.local + piece.length, 0, 0)):
        if here > position:
            rest.append(Piece(position, piece.whole + position - piece.local, here - position))
        position = here + length
    return rest
