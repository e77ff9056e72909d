"""Uncertainty of a prediction, ties, the nearest change if nothing fits, and readable times."""

import re
from collections import defaultdict
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest

from pipeproof.analysis.tune.search_layouts import tune
from pipeproof.analysis.tune.tune_reasons import (
    DIFFERENCE_ERRORS,
    complexity,
    difference_error,
)
from pipeproof.cost.step_error import step_error, step_error_of
from pipeproof.specs.load_plan import plan_from_dict
from tests.tune.models import DENSE, EXPERTS, to_tune

ACCURACY = Path(__file__).parents[2] / "validation" / "results" / "accuracy.json"


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_the_interval_of_a_row_is_that_of_measured_steps_with_its_bound(model):
    result = tune(to_tune(model), gpus=4, device="h100", global_batch=16, top=12, workers=1)
    known = step_error_of(plan_from_dict(result.rows[0].plan).spec)
    assert result.expected_error == known.mean
    assert known.num_rows <= step_error("h100", has_experts=model is EXPERTS).num_rows
    for row in result.rows:
        assert row.step_within == step_error_of(plan_from_dict(row.plan).spec).within
    without = tune(to_tune(model), gpus=4, device="mi300x", global_batch=16, top=1, workers=1)
    assert without.expected_error is None
    assert without.rows[0].step_within is None


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_the_shortest_comes_first_and_ties_with_it_are_marked(model):
    """Only among rows with the mesh and micro-batch of the shortest one does a simpler schedule come before it."""
    rows = tune(to_tune(model), gpus=4, device="h100", global_batch=16, top=12, workers=1).rows
    fastest = min(rows, key=lambda row: row.step)
    errors = [difference_error(row.layout, fastest.layout) for row in rows]
    ties = [row.step <= fastest.step * (1 + Fraction(error)) for row, error in zip(rows, errors, strict=True)]
    assert [row.difference_error for row in rows] == [
        error if tie else None for error, tie in zip(errors, ties, strict=True)
    ]
    assert 1 < sum(ties) < len(rows)
    near = [row for row, error, tie in zip(rows, errors, ties, strict=True) if tie and error == min(errors)]
    assert list(rows[: len(near)]) == near
    assert [complexity(row.layout) for row in near] == sorted(complexity(row.layout) for row in near)
    rest = [row.step for row in rows[len(near) :]]
    assert rest == sorted(rest)


def test_the_error_of_a_ratio_is_that_of_measured_pairs():
    """Pairs of one model on as many devices with one batch, from the rows of the page of measurements."""
    page = ACCURACY.with_name("accuracy-measurements.md").read_text()

    def ratios(title):
        part = page.partition(f"### {title}")[2].partition("\n### ")[0]
        row = re.compile(r"^\| (.+?) \| ([\d.e+]+) \| ([\d.e+]+) \|", re.MULTILINE)
        return [(match[1], float(match[3]) / float(match[2])) for match in row.finditer(part)]

    groups, errors = defaultdict(list), defaultdict(list)
    for name, ratio in ratios("own runs, 2 H200, step"):
        groups[name.partition(", ")[2]].append(("schedule", ratio))
    for name, ratio in ratios("vTrain, several nodes"):
        sizes = re.fullmatch(r"(.+ blocks), (tp \d+) dp \d+ pp \d+, (batch \d+) of \d+", name)
        groups[sizes[1], sizes[3]].append((sizes[2], ratio))
    for group in groups.values():
        for (a, of_a), (b, of_b) in combinations(group, 2):
            errors["shards" if a != b else "schedule" if a == "schedule" else "replicas"].append(abs(of_a / of_b - 1))
    assert {key: round(sum(each) / len(each), 3) for key, each in errors.items()} == DIFFERENCE_ERRORS
    assert {key: len(each) for key, each in errors.items()} == {"schedule": 25, "replicas": 126, "shards": 193}


NOTHING = {
    "memory": {"gpus": 4, "memory_gib": 0.05},
    "devices": {"gpus": 11},
    "fixed": {"gpus": 8, "fix": {"tp": [3]}},
}


@pytest.mark.parametrize("case", NOTHING)
def test_where_nothing_fits_the_nearest_change_gives_rows(case):
    options = {"device": "h100", "global_batch": 32, "workers": 1, "top": 1} | NOTHING[case]
    result = tune(to_tune(), **options)
    assert not result.rows
    option, value = re.search(r"--(memory-gib|gpus|fix) (\w+)", result.nearest).groups()
    if option == "fix":
        changed = options | {"fix": {name: values for name, values in options["fix"].items() if name != value}}
    else:
        changed = options | {option.replace("-", "_"): int(value)}
    assert tune(to_tune(), **changed).rows
