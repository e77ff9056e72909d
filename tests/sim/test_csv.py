"""The table of a timeline: every operation, exact where that can be written, and read back as it was."""

import csv
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.ops import parse_op
from pipeproof.sim.timeline import Span, Timeline
from pipeproof.views.trace_slices import decimal_text, write_csv


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_one_row_for_each_operation(make_plan, run, tmp_path):
    options = {"p": 3, "m": 4, "tf": Fraction(1, 3), "c": Fraction(1, 4), "tp": 2, "transport": "partial"}
    timeline, graph = run(**options).timeline, make_plan(**options).graph
    rounded = write_csv(timeline, tmp_path / "t.csv", graph)
    rows = rows_of(tmp_path / "t.csv")
    assert len(rows) == len(timeline.spans)
    for row, span in zip(rows, timeline.spans, strict=True):
        op = parse_op(span.op)
        assert (int(row["rank"]), row["queue"], row["op"]) == (span.rank, span.queue, span.op)
        assert (row["kind"], int(row["stage"])) == (op.kind.value, op.stage)
        for name, time in (("start_us", span.start), ("end_us", span.end)):
            assert abs(Fraction(row[name]) - time) <= Fraction(1, 2 * 10**9)
            assert row["exact"] == "no" or Fraction(row[name]) == time
        assert (row["exact"] == "no") == any(time.denominator % 3 == 0 for time in (span.start, span.end))
    assert rounded == sum(row["exact"] == "no" for row in rows) > 0
    sends = [row for row in rows if row["kind"] == "SEND_F"]
    assert {(row["rank"], row["peer"]) for row in sends} == {("0", "2"), ("1", "3"), ("2", "4"), ("3", "5")}
    assert {row["bytes"] for row in sends} == {str(8 * 1 * 16 * 4 // 2)}
    assert {(row["micro_batch"], row["split"]) for row in rows if row["op"] == "WAIT(1RECV_F2)"} == {("2", "")}
    assert {row["peer"] + row["bytes"] for row in rows if row["kind"] == "F"} == {""}


MEASURED = Timeline(
    tuple(
        Span(0, "compute", op_id, op, 10**15 + 7_000 * step + start, 10**15 + 7_000 * step + end, step)
        for step in range(2)
        for op_id, (op, start, end) in enumerate([("0F0.s1", 0, 1_001), ("0F0.s1/2.ALL_REDUCE:tp", 5, 6)])
    ),
    ({"pp": 0},),
    "measured",
    Fraction(1, 1000),
)


def test_a_measured_timeline_begins_at_zero_and_says_what_it_is(tmp_path):
    assert write_csv(MEASURED, tmp_path / "t.csv") == 0
    first, child, second, _ = rows_of(tmp_path / "t.csv")
    assert (first["start_us"], first["end_us"], second["start_us"]) == ("0", "1.001", "7")
    assert {row["clock"] for row in (first, child, second)} == {"measured"}
    assert [row["step"] for row in (first, child, second)] == ["0", "0", "1"]
    assert (child["kind"], child["micro_batch"], child["split"], child["bytes"]) == ("ALL_REDUCE", "0", "1", "")


@given(st.fractions(max_denominator=10**6))
@settings(max_examples=200, deadline=None)
def test_decimals_are_exact_where_they_end(value):
    text, exact = decimal_text(value)
    number = Decimal(text)
    assert "E" not in text.upper()
    if exact:
        assert Fraction(number) == value
        assert not ("." in text and text.endswith("0"))
    else:
        assert abs(Fraction(number) - value) <= Fraction(1, 2 * 10**9)
        assert any(value.denominator % prime == 0 for prime in range(3, value.denominator + 1) if prime % 5)


@pytest.mark.parametrize(
    ("value", "text"),
    [("0", "0"), ("-1/8", "-0.125"), ("200", "200"), ("1/3", "0.333333333"), ("-2/3", "-0.666666667")],
)
def test_decimals(value, text):
    assert decimal_text(Fraction(value))[0] == text
