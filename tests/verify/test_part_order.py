"""Computations that alternate: right plans pass, and each mutant is found by one rule."""

import pytest

from pipeproof.verify.subject import make_subject
from tests.comm.test_overlap_pairs import MOE, V, plan
from tests.verify.programs import codes, errors, mutated, place, program, remove, swap


def of_plan(**sections):
    return make_subject(plan(**sections))


def move(rows, text, *, before):
    row = rows.pop(place(rows, text))
    rows.insert(place(rows, before), row)


@pytest.mark.parametrize(
    "moe",
    [MOE, {**MOE, "dispatcher": "all_gather"}, {**MOE, "num_shared_experts": 1}, {**MOE, "dense_layers": 1}],
    ids=["all-to-all", "all-gather", "shared", "dense"],
)
@pytest.mark.parametrize(
    "topology", [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"dp": 2}], ids=["ep", "tp", "cp", "dp"]
)
@pytest.mark.parametrize(
    "schedule",
    [
        V,
        {**V, "overlap": {"order": ["F", "B"]}, "reduce_gradients": "when_ready"},
        {"kind": "dualpipe", "overlap": "pairs"},
    ],
    ids=["pairs", "order", "dualpipe"],
)
def test_plans_that_alternate_are_proved(moe, topology, schedule):
    assert errors(of_plan(moe=moe, topology=topology, schedule=schedule)) == []


def segments_in_another_order(ranks):
    """The first turn of F comes before the first one of B on rank 0, and not on the other ranks of its group."""
    rows = ranks[0]
    last = "0F3/1.ALL_TO_ALL:ep"
    for text in ("0F3/0.PART", "0F3/0.ALL_TO_ALL:ep", "0F3/1.PART", last):
        move(rows, text, before="3B1/0.PART")


def dispatch_at_once(ranks):
    """The dispatch of F is issued with its part on rank 0: the queue ``ep`` has the same order, as its members."""
    move(ranks[0], "0F3/1.ALL_TO_ALL:ep", before="3B1/1.PART")


def dispatch_behind_the_exchange(ranks):
    """The dispatch of F comes behind the next exchange of B on rank 0."""
    move(ranks[0], "0F3/1.ALL_TO_ALL:ep", before="3B1/1.WEIGHTS")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (segments_in_another_order, "PP306"),
        (dispatch_behind_the_exchange, "PP306"),
        (lambda ranks: move(ranks[0], "0F3/1.ALL_TO_ALL:ep", before="0F3/1.PART"), "PP145"),
        (lambda ranks: swap(ranks[0], "0F3/1.PART", "0F3/0.ALL_TO_ALL:ep"), "PP145"),
        (lambda ranks: swap(ranks[0], "3B1/1.PART", "3B1/1.WEIGHTS"), "PP145"),
        (lambda ranks: move(ranks[0], "3B1/2.WEIGHTS", before="3B1/2.PART"), "PP145"),
        (lambda ranks: move(ranks[0], "0SEND_F3", before="0F3/3.PART"), "PP145"),
        (lambda ranks: remove(ranks[0], "3B1/2.WEIGHTS"), "PP145"),
        (lambda ranks: remove(ranks[0], "0F3/3.PART"), "PP145"),
        (lambda ranks: swap(ranks[0], "0F3/0.PART", "0F3/1.PART"), "PP145"),
    ],
    ids=[
        "turns",
        "late dispatch",
        "dispatch before its part",
        "part",
        "weights",
        "last weights",
        "send",
        "no weights",
        "no part",
        "numbers",
    ],
)
def test_a_mutant_is_found_by_one_rule(change, code):
    right = of_plan()
    assert codes(right) == set()
    assert codes(mutated(right, change)) == {code}


def test_a_dispatch_at_once_on_one_member_is_right():
    assert codes(mutated(of_plan(), dispatch_at_once)) == set()


def test_another_order_of_turns_on_all_members_is_right():
    def all_ranks(ranks):
        for rank in (0, 1):
            segments_in_another_order({0: ranks[rank]})

    assert codes(mutated(of_plan(), all_ranks)) == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0F0 0F0/0.PART", set()),
        ("0F0/0.PART 0F0", {"PP145"}),
        ("0F0 0F0/0.PART 0F0/0.WEIGHTS", {"PP145"}),
        ("0F0 0B0 0B0/0.PART 0B0/0.WEIGHTS", set()),
        ("0F0 0B0 0B0/0.PART", {"PP145"}),
        ("0F0 0I0 0I0/0.PART 0W0", set()),
        ("0F0 0F0/1.PART", {"PP145"}),
        ("0F0 0F0/0.PART 0F0/0.ALL_GATHER:ep", {"PP145"}),
        ("0F0 0F0/0.PART 0F0/0.ALL_GATHER:ep 0F0/1.PART", set()),
        ("0F0 0F0/0.PART 0F0/0.ALL_GATHER:ep 0F0/1.ALL_GATHER:ep 0F0/1.PART", set()),
        ("0F0 0F0/0.PART 0F0/0.ALL_GATHER:ep 0F0/1.REDUCE_SCATTER:ep 0F0/1.PART", {"PP145"}),
        ("0F0 0F0/0.PART 0F0/0.ALL_TO_ALL:ep 0F0/1.ALL_TO_ALL:ep 0F0/1.PART", {"PP145"}),
        ("0F0 0F0/0.PART 0F0/0.ALL_GATHER:tp 0F0/1.ALL_GATHER:ep 0F0/1.PART", {"PP145"}),
        ("0F0 0F0/0.PART 0F0/0.ALL_GATHER:ep 0F0/1.ALL_GATHER:tp 0F0/1.PART", {"PP145"}),
        ("0F0 0F0/0.PART 0F0/0.ALL_GATHER:tp 0F0/1.ALL_GATHER:tp 0F0/1.PART", {"PP145"}),
        ("0F0 0F0/0.PART 0F0/0.ALL_GATHER:ep 0F0/1.PART 0F0/1.ALL_GATHER:ep 0F0/2.PART", {"PP145"}),
        (
            "0F0 0F0/0.PART 0F0/0.ALL_GATHER:ep 0F0/1.PART 0F1 0F1/0.PART 0F1/0.ALL_GATHER:ep 0F1/1.PART",
            set(),
        ),
    ],
)
def test_small_programs(text, found):
    assert {code for code in codes(program(text)) if code == "PP145"} == found
