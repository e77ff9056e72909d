"""Sequences cut into splits: what crosses boundaries and groups is of one split."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.ops import OpKind
from pipeproof.verify.check_plan import check_subject
from tests.plans import plan_dict, refusal, subject

pytestmark = pytest.mark.usefixtures("known_notes")


def cut(num_splits, **sections):
    schedule = {"kind": "seq1f1b", "num_sequence_splits": num_splits, **sections.pop("schedule", {})}
    return subject(model={"seq_length": 24}, schedule=schedule, **sections)


@given(
    st.sampled_from([1, 2, 3]),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(["full", "partial"]),
    st.integers(1, 3),
)
@settings(deadline=None, max_examples=40)
def test_cut_sequences_are_proved_on_every_mesh(num_splits, pp, tp, sequence_parallel, transport, num_micro_batches):
    seen = cut(
        num_splits,
        schedule={"num_micro_batches": num_micro_batches},
        topology={"pp": pp, "tp": tp, "sequence_parallel": sequence_parallel},
        transport="full" if sequence_parallel else transport,
    )
    assert {f.code for f in check_subject(seen).findings} <= {"PP411", "PP202"}


def test_messages_and_collectives_have_the_size_of_a_split():
    whole, halves = cut(1, topology={"pp": 2, "tp": 2}), cut(2, topology={"pp": 2, "tp": 2})
    for kind in (OpKind.SEND_FORWARD, OpKind.ALL_REDUCE):
        of_whole, of_half = (
            next(s.graph.stop[i] for i, op in enumerate(s.graph.ops) if op.kind is kind and op.micro_batch is not None)
            for s in (whole, halves)
        )
        assert of_whole == 2 * of_half
    assert halves.graph.num_splits == 2
    assert str(halves.graph.ops[0]) == "0F0.s0"


def test_micro_batches_of_several_lengths_are_cut_too():
    seen = cut(2, schedule={"seq_lengths": [24, 12, 24, 8]})
    assert {f.code for f in check_subject(seen).findings} <= {"PP411"}
    graph = seen.graph
    sizes = {str(op): int(graph.stop[i]) for i, op in enumerate(graph.ops) if op.kind is OpKind.SEND_FORWARD}
    assert sizes["0SEND_F0.s1"] == 2 * sizes["0SEND_F1.s0"] == 3 * sizes["0SEND_F3.s1"]


@pytest.mark.parametrize(
    ("sections", "code", "fragment"),
    [
        ({"model": {"seq_length": 25}}, "PP108", "model.seq_length 25"),
        ({"topology": {"pp": 2, "tp": 4, "sequence_parallel": True}, "model": {"seq_length": 12}}, "PP108",
         "topology.tp 4"),
        ({"schedule": {"seq_lengths": [8, 8, 7, 8]}}, "PP108", "schedule.seq_lengths[2] 7"),
        ({"topology": {"pp": 2, "cp": 2}}, "PP106", "2 cp ranks"),
    ],
)  # fmt: skip
def test_sequences_that_do_not_divide_are_refused(sections, code, fragment):
    plan = plan_dict(**{"schedule": {}, **sections})
    plan["schedule"] |= {"kind": "seq1f1b", "num_sequence_splits": 2}
    finding = refusal(plan)
    assert finding.code == code
    assert fragment in finding.message


@pytest.mark.parametrize(
    ("programs", "num_splits", "words"),
    [
        ([["0F0", "0B0"]], 2, "0F0 names no split of its sequences, and schedule.num_sequence_splits is 2"),
        ([["0F0.s0", "0B0.s0"]], 1, "0F0.s0 is of split 0 of its sequences, and schedule.num_sequence_splits is 1"),
        ([["0F0.s0", "0F0.s2", "0B0.s0"]], 2, "0F0.s2 is of split 2"),
    ],
)
def test_programs_and_plan_agree_on_splits(programs, num_splits, words):
    schedule = {"kind": "custom", "programs": programs, "num_micro_batches": 1, "num_sequence_splits": num_splits}
    with pytest.raises(PlanFileError) as caught:
        subject(topology={"pp": 1}, schedule=schedule)
    (finding,) = caught.value.findings
    assert finding.code == "PP136"
    assert words in finding.message


def test_a_split_that_is_left_out_is_missed():
    programs = [["0F0.s0", "0B0.s0"]]
    schedule = {"kind": "custom", "programs": programs, "num_micro_batches": 1, "num_sequence_splits": 2}
    report = check_subject(subject(topology={"pp": 1}, schedule=schedule))
    assert [(f.code, "0F0.s1" in f.message) for f in report.findings] == [("PP121", True)]
