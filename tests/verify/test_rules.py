"""Each rule kills its mutant of a correct plan, and leaves the plan itself alone."""

from __future__ import annotations

import dataclasses

import pytest

from pipeproof.diagnostics.finding import CycleWitness, OpsWitness
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import RECV_KINDS
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.registry import RULES, Selection, suppress
from tests.plans import subject
from tests.verify.programs import codes, crossing_waits, mutated, place, remove, replace_row, swap

# --- mutants of graphs, with exactly the codes that they must bring ---


def swap_two_receives(rows):
    """Both are posted before either is waited for, in the wrong order."""
    receives = [place(rows[1], "1RECV_F0"), place(rows[1], "1RECV_F1")]
    late = rows[1].pop(receives[1])
    rows[1].insert(receives[0], late)


def tensor_mutant(base, name, **changes):
    tensors = [dataclasses.replace(t, **changes) if t.name == name else t for t in base.graph.tensors]
    return base.with_graph(build_graph(base.graph.rows(), tensors, base.graph.groups))


def test_same_number_of_elements_in_another_dim_order():
    base = subject()
    assert codes(tensor_mutant(base, "input of stage 1", shape=(2, 8, 16), dims="bsh")) == {"PP303"}


def test_layouts_of_the_two_sides_differ():
    base = subject(topology={"pp": 2, "tp": 2})
    assert codes(base) == set()
    assert codes(tensor_mutant(base, "input of stage 1", placement="sharded(0)")) == {"PP305"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: replace_row(rows[1], "0F0/1.ALL_REDUCE:tp", stop=7), {"PP306"}),
        (lambda rows: swap(rows[1], "0F0/1.ALL_REDUCE:tp", "0F0/2.ALL_REDUCE:tp"), {"PP306"}),
        (lambda rows: replace_row(rows[1], "0F0/1.ALL_REDUCE:tp", reduction="max"), {"PP306"}),
        (lambda rows: remove(rows[1], "0F0/1.ALL_REDUCE:tp"), {"PP306", "PP402"}),
    ],
)
def test_collectives_of_a_group_must_be_the_same(change, expected):
    base = subject(topology={"pp": 2, "tp": 2})
    assert codes(mutated(base, change)) == expected


def test_uneven_but_whole_placement_is_accepted():
    assert codes(subject(stages=[["embed"], ["layer.0", "layer.1", "layer.2", "layer.3", "norm", "head"]])) == set()


# --- witnesses ---


def test_the_deadlock_witness_is_a_shortest_cycle_over_both_ranks():
    report = check_subject(mutated(subject(), crossing_waits))
    (found,) = [f for f in report.findings if f.code == "PP401"]
    assert isinstance(found.witness, CycleWitness)
    texts = [(op.rank, op.op) for op in found.witness.ops]
    assert {rank for rank, _ in texts} == {0, 1}
    assert (0, "WAIT(0SEND_F1)") in texts
    assert (1, "WAIT(1SEND_B0)") in texts
    assert "rank 0" in found.message
    assert "paddle-gloo" in found.message


def test_swapped_receives_are_named_with_their_place():
    report = check_subject(mutated(subject(), swap_two_receives))
    found = [f for f in report.findings if f.code == "PP302"]
    assert len(found) == 2
    assert isinstance(found[0].witness, OpsWitness)
    assert [op.op for op in found[0].witness.ops] == ["0SEND_F0", "1RECV_F1"]
    assert "position 0" in found[0].message


# --- no false alarms ---


def test_an_irecv_before_the_send_on_one_side_only_is_right():
    """DESIGN invariant 4: ``irecv X; send Y; wait X`` against ``recv Y; send X`` must pass."""
    base = subject(schedule={"num_micro_batches": 2})

    def post_backward_receive_early(rows):
        early = rows[0].pop(place(rows[0], "0RECV_B0"))
        rows[0].insert(place(rows[0], "0SEND_F1"), early)

    assert codes(mutated(base, post_backward_receive_early)) == set()


def test_codes_are_unique_and_documented():
    docs = [rule.doc for rule in RULES]
    assert len({doc.code for doc in docs}) == len(docs)
    for doc in docs:
        assert doc.explanation
        assert doc.wrong
        assert doc.right


def test_a_row_for_a_missing_tensor_is_refused():
    base = subject()
    rows = base.graph.rows()
    receive = next(i for i, row in enumerate(rows[1]) if row.op.kind in RECV_KINDS)
    rows[1][receive] = dataclasses.replace(rows[1][receive], tensor=99)
    with pytest.raises(ValueError, match=r"rank 1, 1RECV_F0: tensor 99"):
        build_graph(rows, base.graph.tensors, base.graph.groups)
    rows = base.graph.rows()
    replace_row(rows[0], "0SEND_F0", peer=9)
    with pytest.raises(ValueError, match="peer 9"):
        build_graph(rows, base.graph.tensors, base.graph.groups)


def reported(code, *select):
    one = subject(suppress=[{"code": code, "reason": "known"}])
    return [f for f in check_subject(one, selection=Selection(select)).findings if f.code in ("PP150", "PP151")]


@pytest.mark.parametrize(("code", "about"), [("PP401", "PP150"), ("PP999", "PP150"), ("PP202", "PP151")])
def test_a_suppression_that_can_do_nothing_is_reported_of_only_by_a_rule_that_runs(code, about):
    assert [f.code for f in reported(code)] == [about]
    assert [f.code for f in reported(code, about, code)] == [about]
    assert reported(code, "PP4", "PP202") == []


def test_what_could_be_suppressed_are_warnings_and_notes():
    (found,) = reported("PP999")
    assert "PP202" in found.help
    assert "PP401" not in found.help


def test_only_findings_of_the_code_that_are_no_errors_are_set_aside():
    docs = {rule.doc.code: rule.doc for rule in RULES}
    one = subject(suppress=[{"code": "PP202", "reason": "known"}, {"code": "PP401", "reason": "known"}])
    found = [docs[code].finding("text") for code in ("PP516", "PP202", "PP401", "PP202")]
    kept, suppressed = suppress(one, found, docs, {"PP150", *docs})
    assert [finding.code for finding in kept] == ["PP516", "PP401", "PP150"]
    assert [(item.finding.code, item.reason) for item in suppressed] == [("PP202", "known")] * 2
    kept, _ = suppress(one, found, docs, docs.keys() - {"PP150"})
    assert [finding.code for finding in kept] == ["PP516", "PP401"]
