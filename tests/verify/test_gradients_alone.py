"""Gradient rules on programs without facts, and the arithmetic of coefficients."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.op_table import Group, build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.verify.declared_facts import Facts
from pipeproof.verify.gradients.coefficient import ONE, ZERO, Coefficient, parse_scale
from pipeproof.verify.gradients.gradient_rules import RULES
from pipeproof.verify.subject import program_subject
from tests.verify.gradient_models import moe, tied, two_way
from tests.verify.gradient_mutants import own
from tests.verify.programs import program

TP_SUM = "0F0 0B0 0REDUCE_GRAD:tp{group=0} 0STEP"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank 0: 0F0 0B0\nrank 1: 1F0 1B0", set()),
        ("rank 0: 0F0 0B0 0REDUCE_GRAD\nrank 1: 1F0 1B0", {"PP601"}),
        ("rank 0: 0F0 0B0 0REDUCE_GRAD\nrank 1: 1F0 1B0 1REDUCE_GRAD", set()),
        ("rank 0: 0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD\nrank 1: 1F0 1B0 1REDUCE_GRAD", {"PP602"}),
        ("rank 0: 0F0 0F1 0B0 0REDUCE_GRAD 0B1\nrank 1: 1F0 1F1 1B0 1B1 1REDUCE_GRAD", {"PP604"}),
        ("rank 0: 0F0 0B0 0REDUCE_GRAD:pp 0STEP\nrank 1: 1F0 1B0 1STEP", set()),
        (f"group tp: 0 1\nrank 0: {TP_SUM}\nrank 1: {TP_SUM}", set()),
        ("rank 0: 0F0 0B0 0REDUCE_GRAD:dp{writes=grad[a]} 0REDUCE_GRAD:dp{writes=grad[b]} 0STEP", set()),
        ("rank 0: 0F0 1F1 0F1 1F0 0B0 1B1\nrank 1: 0F1 1F0 1B0 0B1", set()),
        ("rank 0: 0F0 0STEP", set()),
    ],
)  # fmt: skip
def test_a_program_without_facts_is_checked_by_what_it_does_elsewhere(text, expected):
    assert own(program_subject(text)) == expected


SIZES = {"a": Fraction(7), "b": Fraction(11, 3)}
FRACTIONS = st.fractions(-9, 9, max_denominator=9)
TERMS = st.lists(st.tuples(FRACTIONS, st.integers(-2, 2), st.integers(-2, 2)), max_size=3)


def power(name, exponent):
    one = Coefficient.named(name)
    result = ONE
    for _ in range(abs(exponent)):
        result *= one if exponent > 0 else one.inverse
    return result


def made(terms):
    """The sum of terms as a coefficient, and its value at ``SIZES``."""
    total, value = ZERO, Fraction(0)
    for factor, first, second in terms:
        total += Coefficient.of(factor) * power("a", first) * power("b", second)
        value += factor * SIZES["a"] ** first * SIZES["b"] ** second
    return total, value


def at_sizes(coefficient):
    for name, size in SIZES.items():
        coefficient = coefficient.where(name, Coefficient.of(size))
    return coefficient.number


@given(TERMS, TERMS)
def test_sums_and_products_are_those_of_their_values(first, second):
    (a, x), (b, y) = made(first), made(second)
    assert at_sizes(a) == x
    assert at_sizes(a + b) == x + y
    assert at_sizes(a * b) == x * y
    assert a * b == b * a
    assert a + b == b + a
    if len(a.terms) == 1:
        assert a * a.inverse == ONE


def test_scales_are_read_strictly():
    assert parse_scale("1/dp") == {"": ((1, 1), ("dp", -1))}
    assert parse_scale("0.5*dp, aux:1/tp") == {"": ((Fraction(1, 2), 1), ("dp", 1)), "aux": ((1, 1), ("tp", -1))}
    for text in ("", "1/", "dp dp", "1,2", "1/0", "-1", "aux:", "1e3"):
        with pytest.raises(ValueError, match=r"scale|size|zero|twice"):
            parse_scale(text)


STRANGE = (
    "7B0", "0B9", "3STEP", "0SCALE_GRAD5", "1REDUCE_GRAD", "0REDUCE_GRAD:pp", "0REDUCE_GRAD:dp/0.ALL_REDUCE:dp",
    "0REDUCE_GRAD:dp/77.REDUCE_SCATTER:dp", "0ALL_REDUCE:dp", "5REDUCE_GRAD:dp/1.ALL_GATHER:dp", "0W0", "0F5", "0STEP",
    "1I0", "1SEND_B0", "0RECV_B0",
)  # fmt: skip
ROWS = st.builds(
    lambda text, **values: Row(parse_op(text), **values),
    st.sampled_from(STRANGE),
    peer=st.integers(0, 1),
    group=st.integers(-1, 3),
    reduction=st.sampled_from(["", "sum", "max", "avg", "overwrite"]),
    scale=st.sampled_from(["", "1/2", "x", "aux:3", "1/micro_batch_tokens", "0", "1/step_tokens"]),
    queue=st.sampled_from(["", "side", "host"]),
    batch=st.sampled_from([NONE, 3]),
    writes=st.sampled_from([(), ("grad[dense]",), ("grad[nobody's]",)]),
)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([moe, tied, two_way]),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 20), ROWS), min_size=1, max_size=6),
    st.booleans(),
)
def test_any_rows_can_be_checked_and_reported(base, inserted, without_facts):
    one = base()
    rows = one.graph.rows()
    for rank, place, row in inserted:
        rows[rank % len(rows)].insert(place, row)
    one = one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))
    if without_facts:
        one = dataclasses.replace(one, facts=Facts())
    for rule in (rule for rule in RULES if not rule.needs_plan):
        for finding in rule.check(one):
            assert finding.code == rule.doc.code
            assert finding.message
            assert finding.help


SUM = "0REDUCE_GRAD:dp{group=0}"


def four_ranks(factor):
    """Two stages on two ranks each. The ranks of stage 0 average and scale, each in its own way; the ranks of stage 1
    sum."""
    lines = [
        "group dp: 0 1",
        "group dp: 2 3",
        f"rank 0: 0F0 0B0 0REDUCE_GRAD:dp{{group=0 reduction=avg}} 0SCALE_GRAD{{scale={factor}}} 0STEP",
        f"rank 1: 0F0 0B0 0REDUCE_GRAD:dp{{group=0 reduction=avg scale={factor}}} 0STEP",
        "rank 2: 1F0 1B0 1REDUCE_GRAD:dp{group=1} 1STEP",
        "rank 3: 1F0 1B0 1REDUCE_GRAD:dp{group=1} 1STEP",
    ]
    return program_subject("\n".join(lines))


@pytest.mark.parametrize(("factor", "expected"), [("2", set()), ("dp", set()), ("4", {"PP606"}), ("1", {"PP606"})])
def test_a_sum_is_over_the_ranks_of_a_group_and_not_over_those_of_other_stages(factor, expected):
    assert own(four_ranks(factor)) == expected


@pytest.mark.parametrize(("sums", "expected"), [((SUM,), set()), ((), set()), ((SUM, SUM), {"PP602"})])
def test_a_rank_may_represent_all_of_its_group(sums, expected):
    """Without any reduction over dp, no reduction is expected."""
    text = " ".join(["0F0 0B0", *sums, "0STEP"])
    assert own(program(text, groups=[Group("dp", (0,), 4)])) == expected


def test_a_group_of_one_rank_is_no_sum_over_others():
    lines = ["group dp: 0", "group dp: 1"]
    lines += [f"rank {rank}: 0F0 0B0 0REDUCE_GRAD:dp{{group={rank}}} 0STEP" for rank in range(2)]
    assert own(program_subject("\n".join(lines))) == {"PP603"}
