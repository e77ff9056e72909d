"""Rehearsals of all ranks in this process: correct plans pass, and each injected fault is named with its range."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeproof.exec.rehearse.rehearsal_arrivals import ArrivalChecks, findings_of
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check, check_subject
from tests.exec.rehearsal_world import MIXTURES, Faults, proved_subject, rehearsed, swapped
from tests.plans import subject

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "aux_loss": 0.1, "expert_bias_rate": 0.01}


def found_in(checked):
    return findings_of([fault for one in checked for fault in one.faults])


def message_of(checked):
    """The first thing that is wrong."""
    return found_in(checked)[0].message


@pytest.mark.parametrize(
    "sections",
    [
        {"topology": {"pp": 4}, "schedule": {"kind": "gpipe"}},
        {"topology": {"pp": 2, "tp": 2, "sequence_parallel": True}},
        {"topology": {"pp": 2, "tp": 2}, "transport": "partial"},
        {"topology": {"pp": 2, "ep": 2}, "model": {"moe": MOE}},
        {"topology": {"pp": 1, "cp": 2, "dp": 2}},
        {
            "topology": {"pp": 2, "dp": 2},
            "schedule": {"kind": "zb_v", "num_chunks": 2},
            "memory": {"shard_optimizer": "dp"},
            "run": {"clip_norm": 1.0, "main_grad_dtype": "float64"},
        },
        {"schedule": {"kind": "dualpipe"}, "buffers": {"receive_slots": 4, "send_slots": 4}},
        {"topology": {"tp": 2}, "schedule": {"kind": "interleaved", "num_chunks": 2, "seq_lengths": [8, 4, 8, 6]}},
        {
            "topology": {"tp": 2},
            "boundaries": [
                {"name": "hidden", "dims": "sbh"},
                {"name": "labels", "dims": "bs", "dtype": "int64", "tp": "sharded(s)", "receiver_tp": "sharded(b)"},
            ],
        },
    ],
    ids=["gpipe", "sequence parallel", "partial", "experts", "context", "sharded", "slots", "uneven", "laid out anew"],
)
def test_where_nothing_fails_everything_is_right_and_all_of_it_was_read(sections):
    one = subject(**sections).unfolded()
    checked = rehearsed(one)
    assert found_in(checked) == ()
    graph = one.graph
    for rank, mine in enumerate(checked):
        ops = [graph.ops[i] for i in graph.rank_ops(rank)]
        assert mine.messages == 2 * sum(op.kind.name.startswith("RECV") for op in ops)
        assert mine.collectives == 2 * sum(
            graph.group[i] >= 0 and not op.kind.name.startswith("GATHER")
            for i, op in zip(graph.rank_ops(rank), ops, strict=True)
        )
    assert sum(one.elements for one in checked) > 0


@settings(deadline=None, max_examples=25, derandomize=True)
@given(*MIXTURES)
def test_a_rehearsal_of_a_proved_plan_is_correct(features, topology, kind):
    assert found_in(rehearsed(proved_subject(features, topology, kind))) == ()


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.sampled_from(["forward", "backward"]), st.integers(0, 7), st.integers(0, 4 * 128 - 1), st.integers(1, 255))
def test_a_single_bit_is_noticed_wherever_it_is(direction, place, byte, mask):
    """Faults of gathered slices are found by the receiver and by all ranks that gather them."""

    def message(channel, number, sent):
        whole = sent[number].copy()
        if (channel.communicator, channel.src % 2, number) == (direction, 1, place):
            whole[byte] ^= mask
        return whole

    checked = rehearsed(subject(topology={"tp": 2}, transport="partial"), Faults(message=message))
    step, batch = divmod(place, 4)
    first, stage = (2, 1) if direction == "forward" else (0, 0)
    element = byte // 4
    faults = [(fault.rank, fault.step, fault.op) for one in checked for fault in one.faults]
    letter = direction[0].upper()
    gathers = [(first + tp, step, f"{stage}GATHER_{letter}{batch}") for tp in (0, 1)]
    assert sorted(faults) == sorted([*gathers, (first + 1, step, f"{stage}RECV_{letter}{batch}")])
    (own,) = (fault for one in checked for fault in one.faults if "RECV" in fault.op)
    assert own.fact.startswith(f"elements {element}..{element + 1} are ")


def partial_under_sequence_parallelism(**model):
    return subject(
        topology={"pp": 2, "tp": 2, "sequence_parallel": True}, model=model, transport="partial", run={"steps": 2}
    )


def test_partial_under_sequence_parallelism_loses_just_what_check_predicts():
    one = partial_under_sequence_parallelism()
    found = {finding.message.split(":")[0]: finding for finding in found_in(rehearsed(one))}
    predicted = [finding for finding in check_subject(one).findings if finding.code == "PP201"]
    assert len(found) == len(predicted) == 2
    for finding in predicted:
        real = found[finding.message.split(":")[0]]
        assert real.code == "PP915"
        assert real.witness == finding.witness
        assert "128 of 256 elements are wrong in each of 4 micro-batches of 2 steps" in real.message


def test_two_ranks_hold_what_fleet_gave_them():
    """In the pull request's example rank k has 10 (8k + 1) .. 10 (8k + 8), and both receive the same halves."""
    tiny = {"hidden_size": 4, "num_heads": 2, "ffn_size": 4, "seq_length": 4}
    one = partial_under_sequence_parallelism(**tiny).loaded.spec.model_dump(mode="json", exclude_unset=True)
    one["schedule"] |= {"micro_batch_size": 1}
    finding = next(f for f in found_in(rehearsed(check(plan_from_dict(one)).subject)) if "forward" in f.message)
    held = {rank: [10 * (8 * (rank - 2) + i + 1) for i in range(8)] for rank in (2, 3)}
    for lost, foreign in zip(finding.witness.lost, finding.witness.foreign, strict=True):
        for i, there in zip(range(lost.start, lost.stop), range(foreign.start, foreign.stop), strict=True):
            held[lost.rank][i] = 10 * (8 * foreign.source_rank + there + 1)
    assert held[2] == held[3] == [10, 20, 30, 40, 130, 140, 150, 160]


def test_two_ranks_exchanged_are_named_with_whom_they_heard():
    messages = [f.message for f in found_in(rehearsed(subject(topology={"tp": 2}), Faults(wiring=swapped(2, 3))))]
    assert messages == [
        f"rank {rank}, step 0, 1RECV_F0 over forward {peer}->{rank}: elements 0..256 are elements 0..256 of 0SEND_F0 "
        f"of rank {heard}, step 0; expected are elements 0..256 of 0SEND_F0 of rank {peer}, step 0; 7 more faults on it"
        for rank, peer, heard in ((2, 0, 1), (3, 1, 0))
    ]


def on_forward(act, place=1):
    """A fault of one message of the channel that goes forward."""

    def message(channel, number, sent):
        return act(sent, number) if channel.communicator == "forward" and number == place else sent[number]

    return Faults(message=message)


@pytest.mark.parametrize(
    ("act", "place", "fact"),
    [
        (lambda sent, n: sent[n - 1], 1, "elements 0..256 are elements 0..256 of 0SEND_F0 of rank 0, step 0"),
        (lambda sent, n: sent[n - 4], 5, "elements 0..256 are elements 0..256 of 0SEND_F1 of rank 0, step 0"),
        (lambda sent, n: sent[n][: 4 * 100], 1, "elements 100..256 are zeros"),
        (lambda sent, n: sent[n][4 * 16 :], 1, "elements 0..240 are elements 16..256 of 0SEND_F1 of rank 0, step 0"),
        (lambda sent, n: sent[n] ^ 1, 1, "elements 0..256 are elements that no rank sends"),
    ],
    ids=["another message", "of the step before", "truncated", "shifted", "spoilt"],
)
def test_what_a_channel_did_to_a_message_is_named(act, place, fact):
    message = message_of(rehearsed(subject(), on_forward(act, place)))
    step, batch = divmod(place, 4)
    assert message.startswith(f"rank 1, step {step}, 1RECV_F{batch} over forward 0->1: {fact}; expected are elements ")


def test_a_range_inside_a_message_is_named_alone():
    def message(channel, number, sent):
        whole = sent[number].copy()
        if channel.communicator == "backward" and number == 2:
            whole[4 * 32 : 4 * 48] = sent[0][4 * 32 : 4 * 48]
        return whole

    (finding,) = found_in(rehearsed(subject(), Faults(message=message)))
    assert finding.code == "PP914"
    assert "0RECV_B2 over backward 1->0: elements 32..48 are elements 32..48 of 1SEND_B0" in finding.message
    assert finding.witness.ops[0].rank == 0


def test_two_messages_that_a_backend_swaps_are_both_named():
    swap = {1: 2, 2: 1}

    def message(channel, number, sent):
        there = swap.get(number, number) if channel.communicator == "forward" else number
        return sent[there]

    # GPipe has sent all before the first is waited for
    one = subject(schedule={"kind": "gpipe"})
    faults = [fault for checked in rehearsed(one, Faults(message=message), num_steps=1) for fault in checked.faults]
    assert [fault.op for fault in faults] == ["1RECV_F1", "1RECV_F2"]
    assert "are elements 0..256 of 0SEND_F2" in faults[0].fact
    assert "are elements 0..256 of 0SEND_F1" in faults[1].fact


def on_kind(one, kind, act, rank=0):
    """A fault of the first collective of a kind that a rank issues."""
    graph = one.unfolded().graph
    op_id = next(i for i in graph.rank_ops(rank) if graph.ops[i].kind.name == kind and graph.group[i] >= 0)
    place = int(graph.group[op_id]), int(graph.position[op_id])
    text = str(graph.ops[op_id])
    return Faults(gathered=lambda r, g, call, parts: act(parts) if (r, g, call) == (rank, *place) else parts), text


@pytest.mark.parametrize(
    ("kind", "axis", "sections"),
    [
        ("ALL_GATHER", "tp", {"topology": {"pp": 1, "tp": 2, "sequence_parallel": True}}),
        ("ALL_TO_ALL", "ep", {"topology": {"pp": 1, "ep": 2}, "model": {"moe": {**MOE, "expert_bias_rate": None}}}),
    ],
)
def test_parts_that_come_from_another_member_are_named(kind, axis, sections):
    one = subject(**sections)
    faults, text = on_kind(one, kind, lambda parts: parts[::-1])
    message = message_of(rehearsed(one, faults))
    assert message.startswith(f"rank 0, step 0, {text} over {axis} ranks 0, 1: elements 0..")
    assert f" of {text} of rank 1, step 0; expected are elements 0.." in message


def test_a_member_whose_share_is_not_in_a_sum_is_named():
    one = subject(topology={"pp": 1, "tp": 2})
    faults, text = on_kind(one, "ALL_REDUCE", lambda parts: [parts[0], parts[1] * 0])
    (finding,) = found_in(rehearsed(one, faults))
    assert finding.message.startswith(f"rank 0, step 0, {text} over tp ranks 0, 1: elements ")
    assert "the input of rank 1 is missing" in finding.message


def test_a_sum_that_is_wrong_at_one_element_is_named_with_it():
    def spoil(parts):
        parts[1] = parts[1].copy()
        parts[1][7] += 3
        return parts

    one = subject(topology={"pp": 1, "tp": 2})
    faults, _ = on_kind(one, "ALL_REDUCE", spoil)
    assert "elements 7..8 are not the sum over ranks [0, 1]: element 7 is " in message_of(rehearsed(one, faults))


@pytest.mark.parametrize("sections", [{"schedule": {"kind": "gpipe"}}, {"topology": {"pp": 4}}])
def test_a_slot_that_is_taken_too_early_is_seen_when_it_is_read(sections):
    """Check says how many slots are enough; with them all is right, and with one less the first message is gone."""
    enough = 4
    one = subject(buffers={"receive_slots": enough}, **sections)
    assert "PP504" not in {finding.code for finding in check_subject(one).findings}
    assert found_in(rehearsed(one)) == ()
    fewer = subject(buffers={"receive_slots": 2}, **sections)
    assert "PP504" in {finding.code for finding in check_subject(fewer).findings}
    messages = [finding.message for finding in found_in(rehearsed(fewer))]
    assert any("1RECV_F0 over forward 0->1: when 1B0 reads it, elements 0..256 are " in message for message in messages)


def test_the_checks_of_a_rank_are_written_to_a_file():
    checked = rehearsed(partial_under_sequence_parallelism())[0]
    adapter = TypeAdapter(ArrivalChecks)
    assert adapter.validate_json(adapter.dump_json(checked)) == checked
