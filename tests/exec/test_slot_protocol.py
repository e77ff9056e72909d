"""The protocol of messages through slots: all interleavings of small sizes, and what each other order breaks."""

from collections.abc import Sequence
from itertools import permutations, product

import pytest

from pipeproof.exec.rank.slot_protocol import STEPS, Step
from tests.exec.slot_model import (
    BEGIN,
    END,
    LOST_SIGNAL,
    NEVER_ENDS,
    NO_REPLAY,
    OTHER_BYTES,
    Move,
    explore,
    moves_of,
)

MOVES = moves_of(STEPS)
SIZES = [(slots, messages) for slots in (1, 2, 3) for messages in (1, 2, 3, 4)]


def in_turn(num_slots: int, num_messages: int) -> list[int]:
    return [number % num_slots for number in range(num_messages)]


@pytest.mark.parametrize(("num_slots", "num_messages"), SIZES)
def test_no_interleaving_violates_a_property(num_slots, num_messages):
    num_states, violated = explore(num_slots, in_turn(num_slots, num_messages), MOVES, MOVES)
    assert not violated
    assert num_states > len(MOVES) * num_messages * 2  # more than one interleaving


@pytest.mark.parametrize(("num_slots", "num_messages"), SIZES)
def test_a_captured_step_is_replayed(num_slots, num_messages):
    twice = in_turn(num_slots, num_messages) * 2  # the second time the slots come in the captured order again
    assert not explore(num_slots, twice, MOVES, MOVES)[1]


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_any_order_of_slots_that_both_sides_have(num_slots):
    for order in product(range(num_slots), repeat=3):
        assert not explore(num_slots, order, MOVES, MOVES)[1]


def violations(sender: Sequence[Move], receiver: Sequence[Move]) -> set[str]:
    """The violations at any size."""
    return {name for slots, messages in SIZES for name in explore(slots, in_turn(slots, messages), sender, receiver)[1]}


MUTANTS = {
    "the sender signals before it copies":
        ((Step.AWAIT, Step.CLEAR, Step.SIGNAL, BEGIN, END), MOVES, {OTHER_BYTES}),
    "the sender signals during its copy":
        ((Step.AWAIT, Step.CLEAR, BEGIN, Step.SIGNAL, END), MOVES, {OTHER_BYTES}),
    "the sender awaits no credit":
        ((Step.CLEAR, BEGIN, END, Step.SIGNAL), MOVES, {OTHER_BYTES, LOST_SIGNAL, NEVER_ENDS}),
    "the sender keeps its credit":
        ((Step.AWAIT, BEGIN, END, Step.SIGNAL), MOVES, {OTHER_BYTES, LOST_SIGNAL, NEVER_ENDS}),
    "the sender takes its credit back late":
        ((Step.AWAIT, BEGIN, END, Step.SIGNAL, Step.CLEAR), MOVES, {NEVER_ENDS}),
    "the receiver does not wait":
        (MOVES, (Step.CLEAR, BEGIN, END, Step.SIGNAL), {OTHER_BYTES}),
    "the receiver gives credit before it has read":
        (MOVES, (Step.AWAIT, Step.CLEAR, Step.SIGNAL, BEGIN, END), {OTHER_BYTES}),
    "the receiver gives credit while it reads":
        (MOVES, (Step.AWAIT, Step.CLEAR, BEGIN, Step.SIGNAL, END), {OTHER_BYTES}),
    "the receiver gives no credit":
        (MOVES, (Step.AWAIT, Step.CLEAR, BEGIN, END), {NEVER_ENDS, NO_REPLAY}),
    "the receiver does not clear its word":
        (MOVES, (Step.AWAIT, BEGIN, END, Step.SIGNAL), {OTHER_BYTES, LOST_SIGNAL, NO_REPLAY}),
    "the receiver clears a word that is signalled again":
        (MOVES, (Step.AWAIT, BEGIN, END, Step.SIGNAL, Step.CLEAR), {NEVER_ENDS}),
}  # fmt: skip


@pytest.mark.parametrize(("sender", "receiver", "violated"), MUTANTS.values(), ids=list(MUTANTS))
def test_a_mutant_is_caught(sender, receiver, violated):
    assert violations(sender, receiver) >= violated


def test_the_orders_without_a_violation():
    """The word may be cleared after the copy. A sender may also await its credit last: at first it has it."""
    a, c, d, s = Step.AWAIT, Step.CLEAR, Step.COPY, Step.SIGNAL

    def is_right(sender: Sequence[Move], receiver: Sequence[Move]) -> bool:
        sizes = ((1, 1), (1, 2), (2, 3), (2, 4))
        return all(not explore(slots, in_turn(slots, num), sender, receiver)[1] for slots, num in sizes)

    of_receiver = {steps for steps in permutations(Step) if is_right(MOVES, moves_of(steps))}
    of_sender = {steps for steps in permutations(Step) if is_right(moves_of(steps), MOVES)}
    assert of_receiver == {(a, c, d, s), (a, d, c, s)}
    assert of_sender == {*of_receiver, (c, d, s, a), (d, c, s, a)}


def test_a_receiver_without_a_sender_ends_once_the_host_sets_its_words():
    gone = (Step.AWAIT,)  # a sender that launches nothing
    assert NEVER_ENDS in explore(1, [0, 0], gone, MOVES)[1]
    assert NEVER_ENDS not in explore(1, [0, 0], gone, MOVES, aborts=True)[1]
