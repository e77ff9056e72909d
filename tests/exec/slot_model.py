"""All interleavings of a channel's two streams, for small numbers of slots and messages.

The steps are those of ``pipeproof.exec.rank.slot_protocol``. A copy is two moves, so that the other side may come in
between: a slot that is being written is torn, and a reader sees one half of it at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeproof.exec.rank.slot_protocol import Step

BEGIN, END = "begin", "end"
Move = Step | str
TORN = -1


def moves_of(steps: Sequence[Step]) -> tuple[Move, ...]:
    """The moves of a message, with a copy in two."""
    return tuple(move for step in steps for move in ((BEGIN, END) if step is Step.COPY else (step,)))


@dataclass(frozen=True)
class State:
    """Words, slots, and how far each side is: its message, its move in it, and what it has read of the slot."""

    empty: tuple[int, ...]
    full: tuple[int, ...]
    slots: tuple[int, ...]
    sender: tuple[int, int] = (0, 0)
    receiver: tuple[int, int] = (0, 0)
    half: int = TORN


OTHER_BYTES, LOST_SIGNAL, NEVER_ENDS, NO_REPLAY = "other bytes", "lost signal", "never ends", "cannot be replayed"


def explore(
    num_slots: int, order: Sequence[int], sender: Sequence[Move], receiver: Sequence[Move], *, aborts: bool = False
) -> tuple[int, frozenset[str]]:
    """Run all interleavings of ``len(order)`` messages, message k through slot ``order[k]``.

    Returns the number of states and what is violated: bytes of another message are read, a signal comes to a word that
    is 1 already, a stream never ends, or words are left otherwise than they were, so that the step cannot be replayed.

    With ``aborts`` the host sets the words that the receiver awaits.
    """
    first = State((1,) * num_slots, (0,) * num_slots, (TORN,) * num_slots)
    seen, stack, violated = {first}, [first], set[str]()
    while stack:
        state = stack.pop()
        after = []
        for is_sender, moves in ((True, sender), (False, receiver)):
            following, violation = _moved(state, order, moves, is_sender=is_sender)
            if violation is not None:
                violated.add(violation)
            if following is not None:
                after.append(following)
        if aborts and state.receiver[0] < len(order):
            after.append(replace(state, full=_put(state.full, order[state.receiver[0]], 1)))
        if not after and (state.sender[0], state.receiver[0]) != (len(order), len(order)):
            violated.add(NEVER_ENDS)
        elif not after and (state.empty, state.full) != (first.empty, first.full):
            violated.add(NO_REPLAY)
        for each in after:
            if each not in seen:
                seen.add(each)
                stack.append(each)
    return len(seen), frozenset(violated)


def _moved(
    state: State, order: Sequence[int], moves: Sequence[Move], *, is_sender: bool
) -> tuple[State | None, str | None]:
    """The state after a side's next move, None if it cannot move, and what the move violates."""
    number, position = state.sender if is_sender else state.receiver
    if number == len(order):
        return None, None
    slot, move = order[number], moves[position]
    own, other = ("empty", "full") if is_sender else ("full", "empty")
    place = (number, position + 1) if position + 1 < len(moves) else (number + 1, 0)
    own_words, other_words = getattr(state, own), getattr(state, other)
    if move is Step.AWAIT and not own_words[slot]:
        return None, None
    state = replace(state, sender=place) if is_sender else replace(state, receiver=place)
    if move is Step.CLEAR:
        return replace(state, **{own: _put(own_words, slot, 0)}), None
    if move is Step.SIGNAL:
        return replace(state, **{other: _put(other_words, slot, 1)}), LOST_SIGNAL if other_words[slot] else None
    if move in (BEGIN, END) and is_sender:
        return replace(state, slots=_put(state.slots, slot, TORN if move == BEGIN else number)), None
    if move == BEGIN:
        return replace(state, half=state.slots[slot]), None
    if move == END:
        is_right = (state.half, state.slots[slot]) == (number, number)
        return replace(state, half=TORN), None if is_right else OTHER_BYTES
    return state, None


def _put(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])
