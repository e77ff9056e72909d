"""Uses of buffers: slices, tuples, neighbouring stages, other ranks' memory; texts of findings."""

import re
from pathlib import Path

import pytest

from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.verify import content_rules
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.lifetime import RULES as LIFETIME_RULES
from pipeproof.verify.lifetime.buffer_uses import uses_of
from pipeproof.verify.lifetime.races import MOST_PER_CODE
from pipeproof.verify.subject import program_subject
from tests.plans import subject

RULES = sorted((*LIFETIME_RULES, *content_rules.RULES), key=lambda rule: rule.doc.code)


def codes(one):
    return {finding.code for rule in RULES for finding in rule.check(one)}


def lifetime_findings(text):
    return [finding for finding in check_subject(program_subject(text)).findings if finding.code.startswith("PP5")]


def moved(base, rank, text, before):
    """The subject with one row of a rank moved before another."""
    rows = base.graph.rows()
    row = rows[rank].pop(place(rows[rank], text))
    rows[rank].insert(place(rows[rank], before), row)
    return base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))


def place(rows, text):
    return next(i for i, row in enumerate(rows) if row.op == parse_op(text))


SLICED = {"topology": {"pp": 2, "tp": 2}, "schedule": {"num_micro_batches": 2}, "transport": "partial"}


@pytest.mark.parametrize(
    ("rank", "text", "before", "expected"),
    [
        (2, "1GATHER_F0", "WAIT(1RECV_F0)", "PP502"),  # the gather reads the slice that is being received
        (0, "0SEND_F0", "0SLICE_F0", "PP501"),  # the slice is cut while it may be under way
        (0, "0SLICE_F0", "0F0", "PP506"),  # ... cut before its tensor is computed
        (2, "1F0", "1GATHER_F0", "PP506"),  # ... used before it is joined
        (0, "0B0", "0GATHER_B0", "PP506"),
    ],
)
def test_slices_are_cut_sent_and_joined_in_order(rank, text, before, expected):
    base = subject(**SLICED)
    assert codes(base) == set()
    assert codes(moved(base, rank, text, before)) == {expected}


TUPLE = """
tensor hidden: shape=8 dtype=float32
tensor mask: shape=4 dtype=float32 placement=replicated
tensor hidden_in: shape=8 dtype=float32
tensor mask_in: shape=4 dtype=float32 placement=replicated
rank 0: 0F0 0SEND_F0{{peer=1 tensor=0 range=0..8 batch=0}} 0SEND_F0{{peer=1 tensor=1 range=0..4 batch=0}}
    WAIT(0SEND_F0) WAIT(0SEND_F0)
rank 1: 1RECV_F0{{peer=0 tensor=2 range=0..8 batch=0}} 1RECV_F0{{peer=0 tensor=3 range=0..4 batch=0}}
    WAIT(1RECV_F0) {first} {second}
"""


def test_a_stage_waits_for_each_tensor_of_a_tuple():
    assert lifetime_findings(TUPLE.format(first="WAIT(1RECV_F0)", second="1F0")) == []
    (found,) = lifetime_findings(TUPLE.format(first="1F0", second="WAIT(1RECV_F0)"))
    assert found.code == "PP502"


def test_what_one_stage_hands_to_the_next_on_its_rank_is_a_buffer_too():
    assert lifetime_findings("rank 0: 0F0 1F0 1B0 0B0") == []
    (found,) = lifetime_findings("rank 0: 0F0{queue=side} 1F0 WAIT(0F0) 1B0 0B0 WAIT(0B0){queue=side}")
    assert found.code == "PP507"
    assert "what 0F0 makes" in found.message


def test_a_backward_reads_what_its_forward_kept():
    (found,) = lifetime_findings("rank 0: 0F0 0B0{queue=side} WAIT(0B0) WAIT(0B0){queue=side}")
    assert found.code == "PP507"
    assert "0F0 on" not in found.help
    assert found.help == "let queue `side` wait for 0F0 before 0B0"


def test_weights_are_whole_between_unshard_and_reshard():
    (found,) = lifetime_findings("rank 0: 0F0 0UNSHARD 0B0 0RESHARD")
    assert found.code == "PP506"
    assert "the weights of stage 0, but 0UNSHARD writes it only later" in found.message


def test_replicas_are_checked_once():
    plan = {"model": {"num_layers": 8}, "topology": {"pp": 8, "tp": 4, "dp": 16}, "schedule": {"num_micro_batches": 32}}
    folded = subject(**plan, transport="partial", buffers={"receive_slots": 1})
    assert folded.lowered.folded
    assert codes(folded) == set()  # slices are joined at once
    folded = subject(**plan, buffers={"receive_slots": 6})
    (found,) = (finding for rule in RULES for finding in rule.check(folded))
    assert found.code == "PP504"
    assert "needs 7 slots" in found.message


def test_many_races_of_one_kind_are_counted():
    base = subject(schedule={"num_micro_batches": MOST_PER_CODE + 10})
    rows = base.graph.rows()
    for micro_batch in range(MOST_PER_CODE + 10):
        at = place(rows[1], f"WAIT(1RECV_F{micro_batch})")
        rows[1][at], rows[1][at + 1] = rows[1][at + 1], rows[1][at]
    one = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    found = [finding.message for finding in check_subject(one).errors]
    assert len(found) == MOST_PER_CODE + 1
    assert found[-1].startswith("and 10 more ")


def test_a_wait_before_its_post_is_one_finding():
    """PP402 reports that nothing is under way; the missing wait of the receive is not reported again."""
    report = check_subject(
        program_subject("rank 0: 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)\nrank 1: WAIT(1RECV_F0) 1RECV_F0{peer=0} 1F0")
    )
    assert {finding.code for finding in report.errors} == {"PP402"}


def test_a_buffer_that_only_the_optimizer_writes_is_there_from_the_start():
    assert lifetime_findings("rank 0: 0F0{reads=w} 0B0{reads=w} 0STEP{writes=w}") == []


def test_an_empty_graph_has_no_buffers():
    assert codes(subject().with_graph(build_graph([[]], (), ()))) == set()
    assert len(uses_of(build_graph([[Row(parse_op("0BARRIER:pp"))]], (), ()))) == 0


def test_the_page_on_lifetimes_shows_what_check_finds():
    page = (Path(__file__).parents[2] / "docs" / "lifetimes.md").read_text()
    program, shown, _, round_trip = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    (found,) = check_subject(program_subject(program)).errors
    assert shown.strip() == f"error[{found.code}]: {found.message}"
    assert lifetime_findings(round_trip) == []
