"""The deadlock rules: mutants that each kills alone, correct programs close to them, and the findings."""

import io
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipeproof.comm import lower
from pipeproof.comm.backends import backend_table
from pipeproof.diagnostics.finding import CycleWitness, Severity
from pipeproof.diagnostics.text_output import render_text
from pipeproof.schedule.op_table import TensorSpec, build_graph
from pipeproof.verify.deadlock import RULES
from pipeproof.verify.deadlock.deadlock_verdict import conditions
from pipeproof.verify.subject import graph_subject
from tests.plans import subject
from tests.verify.programs import errors, group, mutated, place, program, rows

GLOO = backend_table("paddle", "cpu")


def with_backend(one, **changes):
    """The subject on a backend that differs from gloo in some rows of its table."""
    return replace(one, backend=replace(GLOO, **changes))


def found(one):
    """(code, severity) of the findings of this family, and of all errors."""
    of_family = [finding for rule in RULES for finding in rule.check(one)]
    return {(f.code, str(f.severity)) for f in [*of_family, *errors(one)]}


def only(one, code):
    (finding,) = [f for rule in RULES if rule.doc.code == code for f in rule.check(one)]
    return finding


CROSSING = (
    """
    0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1) 0RECV_B0{peer=1} WAIT(0RECV_B0) 0B0 WAIT(0SEND_F0)
    0RECV_B1{peer=1} WAIT(0RECV_B1) 0B1
    """,
    """
    1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{peer=0} WAIT(1SEND_B0) 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1 1B1
    1SEND_B1{peer=0} WAIT(1SEND_B1)
    """,
)


def crossing(first=("", ""), second=("", "")):
    """Two ranks whose steady 1F1B sends cross, with one piece of each program replaced."""
    return program(CROSSING[0].replace(*first), CROSSING[1].replace(*second))


def test_crossing_sends_that_are_waited_for_deadlock():
    assert found(crossing()) == {("PP401", "error")}
    finding = only(crossing(), "PP401")
    assert "ranks 0, 1 deadlock under paddle-gloo" in finding.message
    assert isinstance(finding.witness, CycleWitness)
    ops = [(op.rank, op.op) for op in finding.witness.ops]
    assert set(ops) >= {(0, "0SEND_F1"), (0, "0RECV_B0"), (1, "1SEND_B0"), (1, "1RECV_F1")}


def test_the_text_form_draws_the_cycle_on_the_programs():
    buffer = io.StringIO()
    render_text([only(crossing(), "PP401")], None, console=Console(file=buffer, width=200))
    lines = buffer.getvalue().splitlines()
    drawn = [(line, below) for line, below in pairwise(lines) if " = rank " in line and "^" in below]
    assert [line.split(":")[0] for line, _ in drawn] == ["  = rank 0", "  = rank 1"]
    for line, below in drawn:
        places = [i for i, mark in enumerate(below) if mark == "^"]
        assert places
        assert all(line[i - 1] == " " and line[i].isalnum() for i in places)  # below the first letter of an operation


RIGHT = {
    "parity order: the odd rank receives first": crossing(
        second=(
            "1SEND_B0{peer=0} WAIT(1SEND_B0) 1RECV_F1{peer=0} WAIT(1RECV_F1)",
            "1RECV_F1{peer=0} WAIT(1RECV_F1) 1SEND_B0{peer=0} WAIT(1SEND_B0)",
        )
    ),
    "irecv X; send Y; wait X against recv Y; send X": crossing(
        second=(
            "1SEND_B0{peer=0} WAIT(1SEND_B0) 1RECV_F1{peer=0} WAIT(1RECV_F1)",
            "1RECV_F1{peer=0} 1SEND_B0{peer=0} WAIT(1SEND_B0) WAIT(1RECV_F1)",
        )
    ),
    "one batch on both sides": crossing(
        (
            "0SEND_F1{peer=1} WAIT(0SEND_F1) 0RECV_B0{peer=1} WAIT(0RECV_B0)",
            "0SEND_F1{peer=1 batch=0} 0RECV_B0{peer=1 batch=0} WAIT(0SEND_F1) WAIT(0RECV_B0)",
        ),
        (
            "1SEND_B0{peer=0} WAIT(1SEND_B0) 1RECV_F1{peer=0} WAIT(1RECV_F1)",
            "1SEND_B0{peer=0 batch=0} 1RECV_F1{peer=0 batch=0} WAIT(1SEND_B0) WAIT(1RECV_F1)",
        ),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_exchanges_are_no_error(name):
    assert {code for code, severity in found(RIGHT[name]) if severity == "error"} == set()


def test_a_batch_on_both_sides_is_right_even_where_all_transfers_of_a_rank_share_a_queue():
    batched = RIGHT["one batch on both sides"]
    assert found(batched) == set()
    assert found(with_backend(batched, queue="rank")) == set()
    lone = crossing(
        (
            "0SEND_F1{peer=1} WAIT(0SEND_F1) 0RECV_B0{peer=1} WAIT(0RECV_B0)",
            "0SEND_F1{peer=1} 0RECV_B0{peer=1} WAIT(0SEND_F1) WAIT(0RECV_B0)",
        ),
        ("1SEND_B0{peer=0} WAIT(1SEND_B0) 1RECV_F1{peer=0}", "1SEND_B0{peer=0} 1RECV_F1{peer=0} WAIT(1SEND_B0)"),
    )
    assert found(lone) == {("PP411", "note")}
    assert found(with_backend(lone, queue="rank")) == {("PP401", "error")}
    assert found(with_backend(lone, queue="pair")) == {("PP401", "error")}
    assert found(with_backend(lone, queue="direction")) == {("PP411", "note")}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"send_completes": "rendezvous"}, {("PP401", "error")}),
        ({"send_completes": "slots"}, {("PP411", "note")}),  # safe with one slot, not without any
        ({"send_completes": "eager"}, {("PP411", "note")}),
        ({"send_completes": "eager", "queue": "pair"}, {("PP411", "note")}),
        ({"send_completes": "eager", "host_blocks_on_post": True}, {("PP411", "note")}),
    ],
)
def test_the_backend_decides_between_error_and_note(row, expected):
    assert found(with_backend(crossing(), **row)) == expected


def test_posts_that_hold_the_host_make_a_deadlock_of_what_waits_later():
    right = RIGHT["irecv X; send Y; wait X against recv Y; send X"]
    assert ("PP401", "error") not in found(right)
    early = crossing(
        ("0SEND_F1{peer=1} WAIT(0SEND_F1) 0RECV_B0{peer=1}", "0SEND_F1{peer=1} 0RECV_B0{peer=1} WAIT(0SEND_F1)"),
        ("1SEND_B0{peer=0} WAIT(1SEND_B0) 1RECV_F1{peer=0}", "1SEND_B0{peer=0} 1RECV_F1{peer=0} WAIT(1SEND_B0)"),
    )
    assert found(early) == {("PP411", "note")}
    assert ("PP401", "error") in found(with_backend(early, host_blocks_on_post=True))


# --- missing counterparts ---


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("0F0 0SEND_F0{peer=1}", "WAIT(1RECV_F0) 1RECV_F0{peer=0} 1F0"), "no 1RECV_F0 is under way there"),
        (("0F0", "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"), "rank 0 never issues its counterpart 0SEND_F0"),
        (("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)", "1F0"), "rank 1 never issues its counterpart 1RECV_F0"),
        (("0BARRIER:pp{group=0}", ""), "rank 1 issues only 0 collectives there and never joins it"),
    ],
)
def test_a_wait_for_what_never_comes_is_named(ranks, message):
    one = program(*ranks, groups=[group("pp", 0, 1)])
    assert message in only(one, "PP402").message


def test_a_send_that_is_buffered_needs_no_receive_to_end():
    one = program("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)", "1F0")
    assert ("PP402", "error") in found(one)
    assert ("PP402", "error") not in found(with_backend(one, send_completes="eager"))
    assert ("PP402", "error") not in found(with_backend(one, send_completes="slots"))
    two = program("0F0 0SEND_F0{peer=1} 0SEND_F1{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1)", "1F0")
    assert "0SEND_F1" in only(with_backend(two, send_completes="slots"), "PP402").message


@pytest.mark.parametrize(("num_receives", "expected"), [(0, {"0SEND_F1", "0SEND_F2"}), (1, {"0SEND_F2"}), (2, set())])
def test_with_a_slot_the_sends_that_end_are_one_more_than_the_receives(num_receives, expected):
    one = program(
        "0SEND_F0{peer=1} 0SEND_F1{peer=1} 0SEND_F2{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1) WAIT(0SEND_F2)",
        " ".join(f"1RECV_F{k}{{peer=0}}" for k in range(num_receives)),
    )
    never = next(rule for rule in RULES if rule.doc.code == "PP402")
    endless = [f.witness.ops[0].op for f in never.check(with_backend(one, send_completes="slots"))]
    assert set(endless) == {f"WAIT({op})" for op in expected}


# --- order of a device, and connections that open at first use ---

GROUPS = [group("tp", 0, 1), group("cp", 0, 1)]
OPPOSITE = (
    "0BARRIER:tp{group=0 queue=a} 0BARRIER:cp{group=1 queue=b}",
    "0BARRIER:cp{group=1 queue=b} 0BARRIER:tp{group=0 queue=a}",
)


def test_two_communicators_in_opposite_orders_hang_where_the_device_keeps_the_order_of_issue():
    one = program(*OPPOSITE, groups=GROUPS)
    assert found(one) == {("PP412", "warning"), ("PP413", "warning")}  # making the two groups is in both orders, too
    assert found(with_backend(one, queue="device")) == {("PP412", "error")}
    same = program(OPPOSITE[0], OPPOSITE[0], groups=GROUPS)
    assert found(same) == found(with_backend(same, queue="device")) == set()
    serial = program(*(text.replace("queue=a", "queue=b") for text in OPPOSITE), groups=GROUPS)
    assert ("PP401", "error") in found(serial)


def test_a_device_that_keeps_the_order_of_issue_may_hang_at_rendezvous_alone():
    """With a slot, the send ends and the collective is joined."""
    one = program(
        "0SEND_F0{peer=1} 0ALL_REDUCE0:tp{group=0 queue=side}",
        "0ALL_REDUCE0:tp{group=0 queue=side} 1RECV_F0{peer=0}",
        groups=[group("tp", 0, 1)],
    )
    assert [str(model) for model in conditions(one)] == ["one FIFO per device at rendezvous"]
    assert ("PP412", "warning") in found(one)


def test_a_collective_of_an_unknown_group_is_no_call_of_another_group():
    one = program(
        "0ALL_REDUCE0:tp{group=0 range=0..8} 0ALL_REDUCE0:tp",
        "0ALL_REDUCE0:tp{group=0 range=0..8}",
        groups=[group("tp", 0, 1)],
    )
    assert found(one) == set()


def test_an_edge_between_streams_serialises_them():
    """Rank 1 issues the later call only after a host wait for the other, as rank 0 orders them."""
    waits = "0BARRIER:tp{group=0 queue=a} WAIT(0BARRIER:tp){queue=host} 0BARRIER:cp{group=1 queue=b}"
    assert found(with_backend(program(waits, waits, groups=GROUPS), queue="device")) == set()


EARLY = (
    "0RECV_B0{peer=1} 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) WAIT(0RECV_B0) 0B0",
    "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{peer=0} WAIT(1SEND_B0)",
)


def early_receive(program_rows):
    """Post the first gradient's receive before the first forward: right once connections are open."""
    receive = program_rows[0].pop(place(program_rows[0], "0RECV_B0"))
    program_rows[0].insert(0, receive)


def test_a_receive_posted_early_deadlocks_where_connections_open_at_first_use():
    lazy = subject(schedule={"kind": "gpipe"}, transport={"connections": "lazy"})
    assert found(lazy) == set()
    assert found(mutated(lazy, early_receive)) == {("PP413", "error")}
    warm = mutated(subject(schedule={"kind": "gpipe"}), early_receive)
    assert {code for code, severity in found(warm) if severity == "error"} == set()
    alone = program(*EARLY)
    assert ("PP413", "warning") in found(alone)
    assert "first use" in only(alone, "PP413").message


# --- conditional ---


def test_1f1b_is_conditional_and_gpipe_robust():
    assert found(subject(schedule={"kind": "gpipe"})) == set()
    finding = only(subject(), "PP411")
    assert finding.severity is Severity.NOTE
    assert "3 of 18 channel models (one FIFO per device, rank or pair at rendezvous)" in finding.message
    assert "no change is needed for paddle-gloo" in finding.help
    assert "set `transport.recv_order` to send_order" in finding.help
    assert {op.rank for op in finding.witness.ops} == {0, 1}


@pytest.mark.parametrize(
    ("sections", "is_noted"),
    [
        ({}, True),
        ({"run": {"backend": "paddle"}}, False),
        ({"run": {"steps": 3}}, True),
        ({"transport": {"queue": "directed_edge"}}, False),
        ({"transport": {"recv_order": "send_order"}}, False),
    ],
)
def test_a_plan_that_names_its_runtime_is_for_that_one(sections, is_noted):
    assert found(subject(**sections)) == ({("PP411", "note")} if is_noted else set())


def test_the_note_comes_for_transfers_of_a_schedule_file_on_whichever_backend(tmp_path):
    """Pipeproof does not place them: whether a framework posts them as the file does is not known."""
    path = tmp_path / "schedule.txt"
    rank_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 WAIT(0RECV_B0) 0B0 0RECV_B1 WAIT(0RECV_B1) 0B1 "
    rank_1 = "1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 1RECV_F1 WAIT(1RECV_F1) 1F1 1B1 1SEND_B1 "
    ends = "WAIT(0SEND_F0) WAIT(0SEND_F1)", "WAIT(1SEND_B0) WAIT(1SEND_B1)"
    path.write_text(f"rank 0: {rank_0}{ends[0]}\nrank 1: {rank_1}{ends[1]}\n")
    schedule = {"kind": "file", "path": str(path), "num_micro_batches": 2, "micro_batch_size": 2}
    assert found(subject(schedule=schedule, run={"backend": "paddle"})) == {("PP411", "note")}


def test_a_plan_that_never_ends_on_its_own_backend_is_not_called_safe_there():
    def forget(rows):
        del rows[1][place(rows[1], "1RECV_F3")]

    assert "PP411" not in {code for code, _ in found(mutated(subject(), forget))}


def test_messages_larger_than_an_eager_buffer_are_conditional_under_it():
    """Under 4 MiB a send runs ahead; above it is a rendezvous."""

    def texts(numel):
        tensor = TensorSpec("big", (numel,), "float32", "invariant", "s")
        sized = [
            [replace(row, tensor=0, stop=numel) if row.peer >= 0 else row for row in rows(text)] for text in CROSSING
        ]
        one = graph_subject(build_graph(sized, [tensor], []), backend=replace(GLOO, send_completes="eager"))
        return only(one, "PP411").message

    assert "eager up to 4 MiB" in texts(2**20 + 1)
    assert "eager" not in texts(2**20)


# --- the fix ---


def wait_for_each_send_at_once(program_rows):
    for mine in program_rows:
        waits = [row for row in mine if str(row.op).startswith("WAIT(") and "SEND" in str(row.op)]
        for wait in waits:
            mine.remove(wait)
            mine.insert(place(mine, str(wait.op.target)) + 1, wait)


def test_blocking_sends_of_a_whole_schedule_are_fixed_wherever_they_are():
    two = mutated(subject(), wait_for_each_send_at_once)
    assert "each WAIT(1SEND_B) behind the nearest 1RECV_F" in only(two, "PP401").help
    four = mutated(subject(topology={"pp": 4}, schedule={"num_micro_batches": 8}), wait_for_each_send_at_once)
    assert "proved not to deadlock" in only(four, "PP401").help


def test_where_no_reordering_helps_none_is_reported():
    """Each rank computes its sent tensor from the received one: the data itself goes in a circle."""
    one = program(
        "0RECV_B0{peer=1 writes=g} WAIT(0RECV_B0) 0F0{reads=g writes=a} 0SEND_F0{peer=1 reads=a} WAIT(0SEND_F0)",
        "1RECV_F0{peer=0 writes=x} WAIT(1RECV_F0) 1B0{reads=x writes=g} 1SEND_B0{peer=0 reads=g} WAIT(1SEND_B0)",
    )
    assert "no small change" in only(one, "PP401").help


def test_a_large_graph_is_not_searched_for_a_fix_and_reports_it():
    text = " ".join(f"0F{k} 0SEND_F{k}{{peer=1}} WAIT(0SEND_F{k}) 0RECV_B{k}{{peer=1}} WAIT(0RECV_B{k}) 0B{k}"
                    for k in range(600))  # fmt: skip
    other = " ".join(f"1SEND_B{k}{{peer=0}} WAIT(1SEND_B{k}) 1RECV_F{k}{{peer=0}} WAIT(1RECV_F{k}) 1F{k} 1B{k}"
                     for k in range(600))  # fmt: skip
    assert "up to 5000 operations" in only(program(text, other), "PP401").help


# --- no false alarms ---


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    pp=st.integers(1, 4),
    tp=st.sampled_from([1, 2]),
    dp=st.integers(1, 2),
    rounds=st.integers(1, 3),
    forward=st.sampled_from(["full", "partial"]),
    connections=st.sampled_from(["warm", "lazy"]),
)
def test_generated_plans_have_no_error(kind, pp, tp, dp, rounds, forward, connections):
    one = subject(
        model={"num_layers": 2 * pp},
        topology={"pp": pp, "tp": tp, "dp": dp},
        schedule={"kind": kind, "num_micro_batches": rounds * pp, "num_chunks": 2 if kind == "interleaved" else 1},
        transport={"forward": forward, "connections": connections},
    )
    assert {code for code, severity in found(one) if severity == "error"} == set()


def test_a_rank_that_represents_many_is_checked_as_they_are(monkeypatch):
    """A plan that is lowered for one of its tensor-parallel ranks has the verdict of the whole, right or wrong."""
    sections = {"topology": {"pp": 2, "tp": 2, "dp": 2}, "transport": "partial"}
    whole = subject(**sections)
    monkeypatch.setattr(lower, "FOLD_ABOVE", 0)
    folded = subject(**sections)
    assert folded.graph.num_ranks < whole.graph.num_ranks
    assert found(folded) == found(whole) == {("PP411", "note")}

    broken = [found(mutated(one, wait_for_each_send_at_once)) for one in (folded, whole)]
    assert all(("PP401", "error") in codes for codes in broken)
