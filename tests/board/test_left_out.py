"""The page states the errors of measurements that are left out of a fit."""

import pytest

TOLERANCE = 0.003
"""Difference of two errors, as shares: processors differ in the last bits of a fit."""


@pytest.mark.slow
def test_the_page_has_the_errors_of_fits_without_each_group(validation_script):
    make_left_out = validation_script("make_left_out")
    lines = [line.strip("| ").split(" | ") for line in make_left_out.PAGE.read_text().splitlines() if line[:1] == "|"]
    computed = make_left_out.rows()
    assert [line[:2] for line in lines[2:]] == [[*row[:2]] for row in computed]
    for line, row in zip(lines[2:], computed, strict=True):
        stored = [float(cell.removesuffix(" %")) / 100 for cell in line[3:]]
        assert stored == pytest.approx(row[3:], abs=TOLERANCE)
        assert row[4] < 0.12
