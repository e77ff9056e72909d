"""Durations are the plan's times, exactly."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.ops import Op, OpKind, parse_op
from pipeproof.sim.op_durations import compute_us, durations_of
from pipeproof.specs.cost import CostSpec

fractions = st.builds(Fraction, st.integers(0, 10**9), st.integers(1, 10**6))


@given(tf=fractions.filter(bool), tb=fractions, c=fractions)
def test_ticks_are_the_times_scaled_by_one_integer(make_plan, tf, tb, c):
    plan = make_plan(p=2, m=1)
    cost = CostSpec(forward_us=tf, backward_us=tb, p2p_latency_us=c)
    graph, durations = plan.graph, durations_of(replace(plan, spec=plan.spec.model_copy(update={"cost": cost})))
    scale = durations.ticks_per_us
    assert durations.latency_ticks == c * scale
    for op, ticks in zip(graph.ops, durations.ticks, strict=True):
        assert ticks == {OpKind.FORWARD: tf, OpKind.BACKWARD: tb}.get(op.kind, 0) * scale


def test_a_list_is_by_stage():
    cost = CostSpec(forward_us=(Fraction(1), Fraction(2)), backward_us=(Fraction(3), Fraction(4)))
    assert [compute_us(parse_op(text), cost) for text in ("0F0", "1F5", "0B0", "1B1")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("cost", "parts"),
    [
        (CostSpec(backward_us=Fraction(3)), (Fraction(3, 2), Fraction(3, 2))),
        (CostSpec(backward_input_us=Fraction(1), backward_weight_us=Fraction(5)), (1, 5)),
        (CostSpec(backward_input_us=(Fraction(7), Fraction(1)), backward_weight_us=Fraction(5)), (1, 5)),
    ],
)
def test_parts_of_a_backward_are_those_given_or_its_halves(cost, parts):
    kinds = (OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)
    assert tuple(compute_us(Op(kind, 1, 0), cost) for kind in kinds) == parts
    assert compute_us(Op(OpKind.BACKWARD, 1, 0), cost) == sum(parts)
