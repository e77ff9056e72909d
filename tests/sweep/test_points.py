"""Sweeps of a plan: their points, and errors in their values."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.analysis.sweep.sweep_points import laid_over, sweep_of_plan
from pipeproof.diagnostics.source import PlanFileError
from tests.plans import plan_dict
from tests.sweep.files import sweep_of


def settings(sweep):
    return [dict(point.settings) for point in sweep.points]


def test_points_are_all_combinations_and_the_first_key_changes_slowest(tmp_path):
    sweep = sweep_of(tmp_path, {"schedule.kind": ["1f1b", "gpipe"], "cost.forward_us": [10, 20]})
    assert settings(sweep) == [
        {"schedule.kind": "1f1b", "cost.forward_us": 10},
        {"schedule.kind": "1f1b", "cost.forward_us": 20},
        {"schedule.kind": "gpipe", "cost.forward_us": 10},
        {"schedule.kind": "gpipe", "cost.forward_us": 20},
    ]
    assert sweep.keys == ("schedule.kind", "cost.forward_us")
    assert sweep.points[1].plan["cost"] == {"forward_us": 20}


def test_the_same_plan_twice_is_one_point(tmp_path):
    sweep = sweep_of(tmp_path, {"topology": [{"tp": 1}, {"tp": 2}, {"tp": 1, "pp": 2}]})
    assert settings(sweep) == [{"topology": {"tp": 1}}, {"topology": {"tp": 2}}]


KEYS = st.sampled_from(["cost.forward_us", "topology.tp", "schedule.kind"])


@given(st.dictionaries(KEYS, st.lists(st.integers(), min_size=1, max_size=4, unique=True), min_size=1, max_size=3))
def test_as_many_points_as_the_lists_say(values):
    assert len(sweep_of_plan({}, "plan.yaml", values).points) == prod(map(len, values.values()))


def test_what_is_set_is_laid_over_the_plan():
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    laid = laid_over(base, {"a.c": {"f": 3}, "e": [4], "a.b": None, "g.h": 5, "e2": None})
    assert laid == {"a": {"c": {"d": 2, "f": 3}}, "e": [4], "g": {"h": 5}}
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    both = laid_over({"transport": "partial"}, {"transport.forward": "full"})
    assert both["transport"] == {"forward": "full", "backward": "partial"}
    computed = laid_over({"cost": {"analytic": "h200"}}, {"cost.analytic.matmul_efficiency": 0.5})
    assert computed["cost"] == {"analytic": {"device": "h200", "matmul_efficiency": 0.5}}


@pytest.mark.parametrize(
    ("values", "code", "words", "help"),
    [
        ({"topology.pp": []}, "PP105", "an empty list", None),
        ({"topologie.pp": [2]}, "PP102", "no key `topologie`", "`topology`"),
        ({"schedule.knd": ["gpipe"]}, "PP102", "no key `knd`", "`kind`"),
        ({"num_chunks": [2]}, "PP102", "no key `num_chunks`", "`schedule.num_chunks`"),
        ({"cost.forward_us": [float("inf")]}, "PP106", "finite", None),
        ({"topology.pp": range(1000), "topology.tp": range(101)}, "PP106", "101000 points", "fewer values"),
    ],
)
def test_what_is_wrong_is_said_once(values, code, words, help):
    with pytest.raises(PlanFileError) as refusal:
        sweep_of_plan(plan_dict(), "plan.yaml", values)
    (finding,) = refusal.value.findings
    assert finding.code == code
    assert words in finding.message
    assert help is None or help in finding.help
