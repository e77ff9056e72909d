"""The ratio of two losses: reported if it is rational, not if it is only near a rational number by chance."""

import pytest

from pipeproof.analysis.align.loss_pairs import LossAlignment, Tolerance
from pipeproof.analysis.align.training_logs import Observed


def factor(a, b):
    found = LossAlignment()
    found.put(*(Observed(0, "main", "loss", None, None, value, None) for value in (a, b)), Tolerance(), "float32")
    return found.main.first.factor


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("11.98305893", "5.99152946", "2"),
        ("1.0", "4.0", "1/4"),
        ("-3.0", "3.0", "-1"),
        ("0.9999997", "3.0", "1/3"),
        ("5.0", "4.0", "5/4"),
        ("17.0", "1.0", None),
        ("11.983059", "5.991500", None),
        ("1.0", "1.0000001", None),
        ("0.0", "1.0", None),
        ("1.0", "0.0", None),
        ("nan", "1.0", None),
        ("inf", "1.0", None),
    ],
)
def test_what_a_is_of_b(a, b, expected):
    found = factor(a, b)
    assert (found if found is None else str(found)) == expected
