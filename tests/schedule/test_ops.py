import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.schedule.ops import (
    AXES,
    CHILD_KINDS,
    COMPUTE_KINDS,
    COPY_KINDS,
    GATHER_KINDS,
    PART_KINDS,
    SLICE_KINDS,
    TRANSFER_KINDS,
    Op,
    OpKind,
    child_of,
    free_of,
    parse_op,
    part_of,
    wait_for,
)

numbers = st.integers(0, 10**6)
maybe = st.none() | numbers
indexed = st.builds(
    lambda kind, stage, batch, split: Op(kind, stage, batch, split=split),
    st.sampled_from(sorted(COMPUTE_KINDS | COPY_KINDS | TRANSFER_KINDS | SLICE_KINDS | GATHER_KINDS)),
    numbers,
    numbers,
    maybe,
)
axes = st.sampled_from(AXES)
updates = st.sampled_from([OpKind.REDUCE_GRAD, OpKind.GATHER_WEIGHT])
reductions = st.builds(lambda kind, s, a: Op(kind, s, axis=a), updates, numbers, st.none() | axes)
collectives = st.builds(
    lambda kind, s, m, a: Op(kind, s, m, axis=a), st.sampled_from(sorted(CHILD_KINDS)), numbers, maybe, axes
)
computes = st.builds(
    lambda kind, stage, batch, split: Op(kind, stage, batch, split=split),
    st.sampled_from(sorted(COMPUTE_KINDS)),
    numbers,
    numbers,
    maybe,
)
parents = st.one_of(computes, reductions)
targets = st.one_of(
    indexed,
    reductions,
    collectives,
    st.builds(lambda kind, s: Op(kind, s), st.sampled_from([OpKind.STEP, OpKind.UNSHARD, OpKind.RESHARD]), numbers),
    st.builds(lambda s, m: Op(OpKind.SCALE_GRAD, s, m), numbers, maybe),
    st.builds(child_of, parents, numbers, st.sampled_from(sorted(CHILD_KINDS)), axes),
    st.builds(part_of, computes, numbers, st.sampled_from(sorted(PART_KINDS))),
)
ops = st.one_of(targets, st.builds(wait_for, targets), st.builds(free_of, targets))


@given(ops)
def test_text_form_round_trips(op):
    assert parse_op(str(op)) == op


@given(ops, st.sampled_from(["x", " ", "0", "\n", "F"]))
def test_only_the_whole_string_is_an_operation(op, extra):
    text = str(op)
    for changed in (text + extra, extra + text):
        try:
            parsed = parse_op(changed)
        except ValueError:
            continue
        assert str(parsed) == changed  # another operation, never a misread one
        assert parsed != op


@pytest.mark.parametrize(
    "text",
    [
        "", "2F", "F0", "2f0", "02F0", "2F00", "2F-1", "2F0x", "2F0 ", "2SENDF1", "2SEND1", "WAIT()",
        "WAIT(2SEND_F0", "WAIT(WAIT(2SEND_F0))", "FREE(WAIT(2SEND_F0))", "2STEP0", "2REDUCE_GRAD:", "2REDUCE_GRAD:xx",
        "2SEND_F0/0.ALL_REDUCE:tp", "2F0/ALL_REDUCE:tp", "2F0/0.GATHER:tp", "2BARRIER", "2META_F0", "²F0", "2F٣",
    ],
)  # fmt: skip
def test_malformed_text_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match=re.escape(repr(text)) + "|not an operation"):
        parse_op(text)


def test_pytorch_forms_are_ours():
    assert parse_op("3SEND_F1") == Op(OpKind.SEND_FORWARD, 3, 1)
    assert parse_op("2I0") == Op(OpKind.BACKWARD_INPUT, 2, 0)
