"""State of a rank (position, transfers, slots, tensors) before each operation, and wrong states, which are found."""

import pytest
from hypothesis import given, settings

from pipeproof.exec.rank.machine import ProtocolError
from pipeproof.exec.rank.message_buffers import Slots
from pipeproof.exec.rank.transfers import RankTransfers
from pipeproof.schedule.ops import OpKind
from tests.exec.rehearsal_world import MIXTURES, Faults, proved_subject, rehearsed
from tests.plans import subject


def validated(program):
    """Let a program validate its state before each operation."""
    execute = program.adapter.execute

    def validate_and_execute(instruction):
        program.validate_state()
        execute(instruction)

    program.adapter.execute = validate_and_execute


@settings(deadline=None, max_examples=25, derandomize=True)
@given(*MIXTURES)
def test_the_state_is_valid_before_each_operation_of_a_proved_plan(features, topology, kind):
    rehearsed(proved_subject(features, topology, kind), prepare=validated)


def failing(one, prepare=validated):
    with pytest.raises(ProtocolError) as refused:
        rehearsed(one, prepare=prepare)
    return refused.value


def after_each(change, rank=0):
    """Validate before each operation, and call ``change`` after each operation of a rank."""

    def prepare(program):
        validated(program)
        execute = program.adapter.execute

        def changed(instruction):
            execute(instruction)
            if program.adapter.rank == rank:
                change(instruction, program.adapter)

        program.adapter.execute = changed

    return prepare


def test_a_wait_that_leaves_its_transfer_posted_is_found(monkeypatch):
    end = RankTransfers._end

    def leave(transfers, step, target):
        transfer = transfers._posted[target]
        entry = end(transfers, step, target)
        if entry.op == "0SEND_F0":
            transfers._posted[target] = transfer
        return entry

    monkeypatch.setattr(RankTransfers, "_end", leave)
    assert "posted, although the wait for it is finished: 0SEND_F0 (op " in str(failing(subject()))


def test_a_transfer_that_is_not_posted_is_found(monkeypatch):
    post = RankTransfers._post
    monkeypatch.setattr(RankTransfers, "_post", lambda transfers, op_id, *others: (
        None if transfers._message(op_id).text == "0SEND_F1" else post(transfers, op_id, *others)
    ))  # fmt: skip
    assert "under way, but not posted: 0SEND_F1 (op " in str(failing(subject()))


def test_a_transfer_that_is_posted_twice_is_refused():
    def again(instruction, adapter):
        if str(instruction.op) == "0SEND_F1":
            adapter.transfers.post(instruction.op_id)

    assert "0SEND_F1 (op " in str(error := failing(subject(), after_each(again)))
    assert str(error).endswith("is posted twice")


@pytest.mark.parametrize(("kind", "slots"), [("1f1b", "receive_slots"), ("gpipe", "send_slots")])
def test_a_slot_that_is_taken_twice_is_found(monkeypatch, kind, slots):
    take = Slots.take

    def take_first(self, *arguments):
        self._counts.clear()
        return take(self, *arguments)

    one = subject(topology={"pp": 3}, schedule={"kind": kind}, buffers={slots: 4})
    rehearsed(one, prepare=validated)
    monkeypatch.setattr(Slots, "take", take_first)
    assert f"{slots.split('_')[0]} slot 0 of " in str(error := failing(one))
    assert " has several messages: " in str(error)


@pytest.mark.parametrize("field", ["input", "output_grad", "input_grad", "received", "sliced"])
def test_a_tensor_that_is_left_at_the_end_of_a_step_is_found(field):
    def leave(instruction, adapter):
        if instruction.op.kind is OpKind.STEP:
            tensors = adapter.transfers._tensors[0, 2]
            getattr(tensors, field)[0] = object()

    error = failing(subject(), after_each(leave))
    assert str(error) == f"the step is complete, but work item 2 of stage 0 has: {field.replace('_', ' ')}"


def test_an_error_has_the_state_of_its_rank_as_a_note():
    class BrokenError(Exception):
        pass

    def fail(instruction, adapter):
        if str(instruction.op) == "0F2":
            raise BrokenError

    one = subject(schedule={"kind": "gpipe"}, buffers={"send_slots": 4})
    with pytest.raises(BrokenError) as raised:
        rehearsed(one, prepare=after_each(fail))
    (note_text,) = raised.value.__notes__
    lines = note_text.splitlines()
    assert lines[0].startswith("rank 0, step 0, is at 0F2 (op ")
    assert "  work item 0 of stage 0 has: output" in lines
    assert "wrong" not in note_text


def test_the_note_of_an_error_names_what_is_posted_and_its_slot():
    class BrokenError(Exception):
        pass

    def fail(channel, number, sent):
        raise BrokenError

    one = subject(buffers={"receive_slots": 4})
    with pytest.raises(BrokenError) as raised:
        rehearsed(one, Faults(message=fail))
    lines = raised.value.__notes__[0].splitlines()
    receive = next(i for i in one.graph.rank_ops(1) if str(one.graph.ops[i]) == "1RECV_F0")
    assert lines == [
        f"rank 1, step 0, is at WAIT(1RECV_F0) (op {receive + 1})",
        f"  posted: 1RECV_F0 (op {receive})",
        f"  receive slot 0 of forward 0->1, forward: 1RECV_F0 (op {receive})",
        "  work item 0 of stage 1 has: input",
    ]


def test_a_computation_whose_input_was_never_received_is_named():
    def forget(instruction, adapter):
        if str(instruction.op) == "WAIT(1RECV_F1)":
            adapter.transfers._tensors[1, 1].input.clear()

    text = "1F1 reads member 0 of its boundary, for which no receive is posted"
    assert str(failing(subject(), after_each(forget, rank=1))) == text
