"""One fault is one finding: causes, consequences, and a second fault stays visible."""

import dataclasses
import json
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipeproof.cli.check_report import CheckResult, show_all
from pipeproof.diagnostics.finding import Severity, by_cause, relinked
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.schedule.ops import COMPUTE_KINDS, TRANSFER_KINDS
from pipeproof.specs.load_plan import load_plan
from pipeproof.verify.check_plan import CHECK_CODES, FOLLOWS, check_subject
from pipeproof.verify.check_text import BRIEF, WHOLE, render_report
from pipeproof.verify.completeness import exchanges
from pipeproof.verify.subject import make_subject, program_subject
from tests.cli.commands import EXAMPLES, invoke
from tests.plans import plan_dict, subject
from tests.verify.programs import double, mutated, place, remove, swap

FOUR_STAGES = {"topology": {"pp": 4}}
REPLICAS = {"topology": {"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True}}
CHUNKS = {"topology": {"pp": 2}, "schedule": {"kind": "interleaved", "num_chunks": 2}}


def problems(one):
    """The findings of a check but notes."""
    return [finding for finding in check_subject(one).findings if finding.severity is not Severity.NOTE]


def dropped(rank, *texts):
    return lambda rows: remove(rows[rank], *texts)


def doubled(rank, text):
    return lambda rows: double(rows[rank], text)


def swapped(rank, one, other):
    return lambda rows: swap(rows[rank], one, other)


SINGLE = {
    "a forward": (FOUR_STAGES, dropped(2, "2F1", "WAIT(2RECV_F1)"), 2, "PP121", "2F1"),
    "a send": (FOUR_STAGES, dropped(1, "1SEND_F2"), 4, "PP301", "2RECV_F2"),
    "a send and its wait": (FOUR_STAGES, dropped(1, "1SEND_F2", "WAIT(1SEND_F2)"), 3, "PP301", "2RECV_F2"),
    "a send of a gradient": (FOUR_STAGES, dropped(2, "2SEND_B1", "WAIT(2SEND_B1)"), 4, "PP301", "1RECV_B1"),
    "a receive": (FOUR_STAGES, dropped(2, "2RECV_F1"), 5, "PP301", "1SEND_F1"),
    "a receive and its wait": (FOUR_STAGES, dropped(2, "2RECV_F1", "WAIT(2RECV_F1)"), 4, "PP301", "1SEND_F1"),
    "a wait for a receive": (FOUR_STAGES, dropped(2, "WAIT(2RECV_F1)"), 2, "PP505", "2RECV_F1"),
    "a send twice": (FOUR_STAGES, doubled(1, "1SEND_F2"), 4, "PP301", "1SEND_F2"),
    "a receive twice": (FOUR_STAGES, doubled(2, "2RECV_F1"), 6, "PP301", "2RECV_F1"),
    "a wait twice": (FOUR_STAGES, doubled(2, "WAIT(2RECV_F1)"), 1, "PP402", "WAIT(2RECV_F1)"),
    "a backward twice": (FOUR_STAGES, doubled(2, "2B1"), 2, "PP122", "2B1"),
    "sends exchanged": (FOUR_STAGES, swapped(1, "1SEND_F1", "1SEND_F2"), 3, "PP302", "1SEND_F2"),
    "receives exchanged": (FOUR_STAGES, swapped(2, "2RECV_F0", "2RECV_F1"), 4, "PP302", "1SEND_F0"),
    "forwards exchanged": (FOUR_STAGES, swapped(2, "2F0", "2F1"), 3, "PP123", "2F1"),
    "backwards exchanged": (FOUR_STAGES, swapped(2, "2B1", "2B2"), 3, "PP123", "2B2"),
    "a forward and a backward exchanged": (FOUR_STAGES, swapped(2, "2F1", "2B0"), 3, "PP123", "2B0"),
    "forwards of two chunks exchanged": (CHUNKS, swapped(0, "0F2", "2F0"), 2, "PP123", "0F2"),
    "a collective of one rank": (REPLICAS, dropped(0, "0F1/1.ALL_GATHER:tp"), 2, "PP306", "0F1/2.REDUCE_SCATTER:tp"),
    "a collective twice on one rank": (REPLICAS, doubled(0, "0F1/1.ALL_GATHER:tp"), 2, "PP306", "0F1/1.ALL_GATHER:tp"),
    "a reduction of one rank": (
        REPLICAS, dropped(0, "0REDUCE_GRAD:dp/0.ALL_REDUCE:dp"), 3, "PP306", "0REDUCE_GRAD:dp/1.ALL_REDUCE:dp",
    ),
    "the last reduction of one rank": (
        REPLICAS, dropped(0, "0REDUCE_GRAD:dp/14.ALL_REDUCE:dp"), 3, "PP306", "0REDUCE_GRAD:dp/14.ALL_REDUCE:dp",
    ),
    "a reduction of one rank that others share": (
        REPLICAS, dropped(2, "0REDUCE_GRAD:tp/3.ALL_REDUCE:tp"), 4, "PP306", "0REDUCE_GRAD:tp/3.ALL_REDUCE:tp",
    ),
    "a send of one of many ranks": (REPLICAS, dropped(0, "0SEND_F1", "WAIT(0SEND_F1)"), 4, "PP301", "1RECV_F1"),
}  # fmt: skip
"""A plan, one change of its rows, how many findings it has, and the code and the first operation of the one shown."""


@pytest.mark.parametrize("name", SINGLE)
def test_one_fault_is_one_finding(name):
    sections, change, before, code, first = SINGLE[name]
    found = problems(mutated(subject(**sections), change))
    assert len(found) == before
    ((cause, following),) = by_cause(found)
    assert cause.code == code
    assert cause.witness.ops[0].op == first
    assert len(following) == before - 1
    assert all(finding.cause == cause for finding in following)
    assert found == [cause, *following]


def numbers_of_causes(one, change, ranks=None):
    """Operations by the number of errors that a change of them shows."""
    rows = one.graph.rows()
    ops = [(rank, text) for rank in ranks or range(len(rows)) for text in sorted({str(row.op) for row in rows[rank]})]
    shown = {}
    for rank, text in ops:
        found = problems(mutated(one, change(rank, text)))
        number = sum(cause.severity is Severity.ERROR for cause, _ in by_cause(found))
        shown.setdefault(number, set()).add(text)
    return shown


ZERO_BUBBLE = {"topology": {"pp": 2}, "schedule": {"kind": "zb_h1"}}


@pytest.mark.slow
@pytest.mark.parametrize("change", [dropped, doubled])
@pytest.mark.parametrize("sections", [FOUR_STAGES, CHUNKS, ZERO_BUBBLE], ids=["1f1b", "interleaved", "zb_h1"])
def test_every_operation_that_is_left_out_or_doubled_is_one_error(sections, change):
    assert numbers_of_causes(subject(**sections), change).keys() == {1}


@pytest.mark.slow
def test_every_operation_of_replicas_that_is_left_out_or_doubled_is_one_error():
    """On one rank of each stage. Of a reduction the calls count; tokens of a doubled backward also count twice."""
    one = subject(**REPLICAS)
    headings = {"0REDUCE_GRAD:dp", "0REDUCE_GRAD:tp", "1REDUCE_GRAD:dp", "1REDUCE_GRAD:tp"}
    missing, twice = (numbers_of_causes(one, change, ranks=[2, 5]) for change in (dropped, doubled))
    assert (missing.keys(), missing[0]) == ({0, 1}, headings)
    assert (twice.keys(), twice[0]) == ({0, 1, 2}, headings)
    assert twice[2] == {f"{stage}B{micro_batch}" for stage in range(2) for micro_batch in range(4)}


@pytest.mark.parametrize(("op", "code"), [("0UNSHARD", "PP506"), ("3F0", "PP121"), ("0SEND_F0", "PP301")])
def test_an_operation_that_a_schedule_file_lacks_is_one_error(tmp_path, op, code):
    text = (EXAMPLES / "schedules" / "zbv_pp2.csv").read_text()
    file = tmp_path / "schedule.csv"
    file.write_text(text.replace(f"{op},", "", 1))
    shown = invoke("check", "--from", "schedule", file).output
    assert shown.count("error[") == 1
    assert f"error[{code}]" in shown
    assert "refused: 1 error" in shown


def test_right_plans_have_no_finding():
    for sections in (FOUR_STAGES, REPLICAS, CHUNKS):
        assert problems(subject(**sections)) == []


# --- a second fault stays visible ---

SIX_STAGES = subject(topology={"pp": 6}, model={"num_layers": 6})


@st.composite
def faults(draw, rank):
    """A change of one rank's rows: a transfer, a wait or a computation is left out, doubled or exchanged."""
    program = SIX_STAGES.graph.rows()[rank]
    kinds = sorted(TRANSFER_KINDS | COMPUTE_KINDS)
    row = draw(st.sampled_from([row for row in program if row.op.kind in kinds or row.op.target is not None]))
    how = draw(st.sampled_from(["drop", "double", "swap"]))
    text = str(row.op)
    if how == "drop":
        return dropped(rank, text)
    if how == "double":
        return doubled(rank, text)
    same_kind = [str(other.op) for other in program if other.op.kind == row.op.kind and other.op != row.op]
    return swapped(rank, text, draw(st.sampled_from(same_kind)))


def shown(one):
    """(code, message) of the findings that are shown."""
    return {(cause.code, cause.message) for cause, _ in by_cause(problems(one))}


@settings(max_examples=60, deadline=None)
@given(faults(1), faults(4))
def test_faults_of_ranks_that_do_not_talk_to_each_other_are_both_shown(first, second):
    def both(rows):
        first(rows)
        second(rows)

    together = shown(mutated(SIX_STAGES, both))
    for change in (first, second):
        alone = shown(mutated(SIX_STAGES, change))
        assert {(code, text) for code, text in alone if code not in ("PP401", "PP605", "PP606")} <= together
        assert {code for code, _ in alone} <= {finding.code for finding in problems(mutated(SIX_STAGES, both))}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_code_of_a_fault_is_lost_next_to_another_fault_anywhere(data):
    """Also on the same rows: the second one is a finding of its own, or its code is in the list of consequences."""
    first, second = (data.draw(faults(data.draw(st.integers(1, 4)))) for _ in range(2))

    def both(rows):
        first(rows)
        try:
            second(rows)
        except StopIteration:  # the first one removed the row that this one changes
            return

    one = mutated(SIX_STAGES, both)
    found = problems(one)
    groups = by_cause(found)
    assert sorted(map(str, found)) == sorted(str(f) for cause, following in groups for f in (cause, *following))
    assert all(finding.cause is None or finding.cause in found for finding in found)
    brief = text_of(one, BRIEF)
    assert all(finding.code in brief for finding in found)


def test_a_missing_send_and_an_exchange_behind_it_on_one_channel_are_two():
    def both(rows):
        remove(rows[1], "1SEND_F0")
        swap(rows[1], "1SEND_F2", "1SEND_F3")

    groups = by_cause(problems(mutated(subject(**FOUR_STAGES), both)))
    assert [cause.code for cause, _ in groups] == ["PP301", "PP302"]
    assert [op.op for op in groups[0][0].witness.ops] == ["2RECV_F0", "1SEND_F0"]
    assert "1SEND_F3" in groups[1][0].message


def test_a_computation_on_another_rank_is_missing_on_its_own():
    def change(rows):
        rows[1].append(rows[2].pop(place(rows[2], "2F1")))

    ((cause, following),) = by_cause(problems(mutated(subject(**FOUR_STAGES), change)))
    assert (cause.code, [op.op for op in cause.witness.ops]) == ("PP124", ["2F1"])
    assert {"PP121"} <= {finding.code for finding in following}


def test_too_few_slots_are_one_finding_for_each_key_of_the_plan(tmp_path):
    plan = plan_dict(topology={"pp": 4}, buffers={"receive_slots": 1, "send_slots": 1})
    (tmp_path / "plan.json").write_text(json.dumps(plan, indent=1))
    groups = by_cause(problems(make_subject(load_plan(tmp_path / "plan.json"))))
    assert [(cause.code, len(following)) for cause, following in groups] == [("PP504", 1), ("PP504", 3)]
    assert ["RECV_F" in cause.message for cause, _ in groups] == [True, False]


def test_the_memory_of_a_step_that_never_ends_follows_from_what_holds_it_up():
    one = mutated(subject(**FOUR_STAGES, memory={"budget_gib": 1}), dropped(1, "1SEND_F2"))
    assert {f.cause.code for f in problems(one) if f.code == "PP702"} == {"PP301"}


def test_the_last_end_of_an_unbalanced_channel_follows_from_the_missing_one():
    """Also where the pair that it should have been in has a fault of its own."""

    def both(rows):
        remove(rows[1], "1SEND_F0")
        swap(rows[2], "2RECV_F1", "2RECV_F2")

    found = problems(mutated(subject(**FOUR_STAGES), both))
    causes = {finding.witness.ops[0].op: finding.cause.code for finding in found if finding.code == "PP402"}
    assert causes == {"WAIT(1SEND_F0)": "PP301", "WAIT(2RECV_F3)": "PP301", "WAIT(2RECV_F1)": "PP302"}


def test_two_pairs_that_mean_each_other_in_nothing_are_two():
    """Position 0 and position 2 of a channel each hold two ends whose counterparts do not exist."""
    one = program_subject(
        "rank 0: 0SEND_F7 0SEND_F1 0SEND_F8 WAIT(0SEND_F7) WAIT(0SEND_F1) WAIT(0SEND_F8)\n"
        "rank 1: 1RECV_F0 1RECV_F1 1RECV_F2 WAIT(1RECV_F0) WAIT(1RECV_F1) WAIT(1RECV_F2)"
    )
    assert [(cause.code, following) for cause, following in by_cause(problems(one))] == [("PP302", []), ("PP302", [])]


# --- output ---


def text_of(one, brevity):
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        render_report(check_subject(one), console, brevity)
    return captured.get()


def test_the_text_counts_what_follows_and_all_shows_it():
    one = mutated(subject(**FOUR_STAGES), dropped(1, "1SEND_F2"))
    brief, whole = text_of(one, BRIEF), text_of(one, WHOLE)
    assert "= and 3 that follow from it: PP302, PP402 (2); `--all` shows all" in brief
    assert brief.count("error[") == 1
    assert "refused: 1 error (and 3 that follow) in 131 operations" in brief
    assert whole.count("error[") == 4
    assert whole.count("follows from PP301: channel forward 1->2 has 3 sends and 4 receives") == 3
    assert "in flight at most" in whole
    assert "in flight at most" not in brief


def test_json_and_sarif_have_all_findings_with_their_cause(capsys):
    one = mutated(subject(**FOUR_STAGES), dropped(1, "1SEND_F2"))
    report = check_subject(one)
    cause, *following = report.findings
    assert "cause" not in finding_to_json(cause)
    assert {finding_to_json(finding)["cause"]["code"] for finding in following} == {"PP301"}
    assert finding_to_json(following[0])["cause"]["message"] == cause.message
    assert show_all([CheckResult((), report)], "json", None, strict=False, everything=False) == 1
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 4
    assert show_all([CheckResult(("plan",), report)], "sarif", None, strict=False, everything=False) == 1
    (log,) = json.loads(capsys.readouterr().out)["runs"]
    causes = [result["properties"].get("cause", {}).get("code") for result in log["results"]]
    assert causes == [None, "PP301", "PP301", "PP301"]


def test_causes_are_rewritten_with_the_findings():
    found = check_subject(mutated(subject(**FOUR_STAGES), dropped(1, "1SEND_F2"))).findings
    renamed = [dataclasses.replace(finding, message=finding.message.upper()) for finding in found]
    ((_, following),) = by_cause(relinked(found, renamed))
    assert len(following) == 3


# --- the table ---


def test_the_table_names_rules_and_has_no_circle():
    causes = {}
    for row in FOLLOWS:
        assert {row.code, *row.causes} <= {*CHECK_CODES}
        causes.setdefault(row.code, set()).update(set(row.causes) - {row.code})
    left = dict(causes)
    while left:
        ends = [code for code in left if not left[code] & left.keys()]
        assert ends, f"these follow from each other: {sorted(left)}"
        for code in ends:
            del left[code]


# --- computations in each other's places ---


THREE_STAGES = subject(topology={"pp": 3}, model={"num_layers": 3}, schedule={"num_micro_batches": 3})
TRANSFERS = {"F": ("RECV_F", "SEND_F"), "B": ("RECV_B", "SEND_B")}


def found_exchanges(changes):
    """(first, second, transfers that show it) of each exchange, by text."""
    one = mutated(THREE_STAGES, changes)
    ops = one.graph.ops
    return [(str(ops[a]), str(ops[b]), [str(ops[end]) for end in ends]) for a, b, ends in exchanges(one)]


@pytest.mark.parametrize("rank", range(3))
def test_computations_are_exchanged_exactly_if_a_transfer_is_on_the_wrong_side(rank):
    """The send of the earlier one and the receive of the later one show it; the last stage has some without either."""
    texts = [str(row.op) for row in THREE_STAGES.graph.rows()[rank]]
    computes = [text for text in texts if text[1] in TRANSFERS]
    for first, second in combinations(computes, 2):
        ends = f"{rank}{TRANSFERS[first[1]][1]}{first[2]}", f"{rank}{TRANSFERS[second[1]][0]}{second[2]}"
        shown = [end for end in ends if end in texts]
        assert found_exchanges(swapped(rank, first, second)) == ([(second, first, shown)] if shown else [])
    for compute in computes:
        for other in texts:
            if other not in computes:
                assert found_exchanges(swapped(rank, compute, other)) == []
