"""The published JSON form."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from pipeproof.sim.simulate import simulation_to_json

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "simulate.schema.json").read_text())


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"p": 1, "m": 1},
        {"kind": "gpipe", "tp": 2, "c": Fraction(1, 3)},
        {"tf": Fraction(1, 3), "tb": Fraction(5, 8), "c": 1, "p2p": "backend"},
        {"tf": [1, 2, 3, 4], "tb": [0, 1, 2, 3], "p2p": "rendezvous"},
    ],
)
def test_output_fits_the_schema_and_says_the_exact_values(run, options):
    simulation = run(**options)
    result = json.loads(json.dumps(simulation_to_json(simulation, "given")))
    Draft202012Validator(SCHEMA).validate(result)
    assert exact(result, "makespan") == simulation.makespan
    for given, figures in zip(result["ranks"], simulation.figures, strict=True):
        assert exact(given, "span") == figures.span_us
        assert exact(given, "busy") == figures.busy_us
        assert exact(given, "bubble_makespan") == simulation.makespan - figures.busy_us
        assert exact(given, "bubble_span") == figures.span_us - figures.busy_us
        assert exact(given, "bubble_makespan_ratio") * simulation.makespan == figures.bubble_makespan_us
        assert exact(given, "bubble_span_ratio") * figures.span_us == figures.bubble_span_us


def exact(given, name):
    if (text := given.get(f"{name}_exact")) is None:
        return Fraction(given[name])
    assert float(Fraction(text)) == given[name]
    return Fraction(text)


def test_numbers_by_representability(run):
    result = simulation_to_json(run(p=1, m=1, tf=Fraction(1, 3), tb=33), "given")
    assert result["makespan_exact"] == "100/3"
    assert result["makespan"] == 100 / 3
    whole = simulation_to_json(run(), "given")
    assert whole["makespan"] == 33
    assert isinstance(whole["makespan"], int)
    assert "makespan_exact" not in whole
    assert whole["ranks"][0]["bubble_span_ratio_exact"] == "3/11"
    quarter = simulation_to_json(run(p=1, m=1, tf=Fraction(1, 4), tb=1), "given")
    assert quarter["makespan"] == 1.25
    assert "makespan_exact" not in quarter


def test_the_names_of_the_issue(run):
    result = simulation_to_json(run(p=2, m=2, tp=2), "given")
    assert (result["unit"], result["p2p"]) == ("us", "async")
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1, 2, 3]
    assert result["ranks"][3]["coords"] == {"tp": 1, "cp": 0, "ep": 0, "dp": 0, "pp": 1}


@pytest.mark.parametrize(
    "damage",
    [
        {"unit": "ms"},
        {"makespan": -1},
        {"makespan_exact": "1/0"},
        {"ranks": []},
        {"surprise": 1},
    ],
)
def test_the_schema_refuses(run, damage):
    assert not Draft202012Validator(SCHEMA).is_valid({**simulation_to_json(run(), "given"), **damage})
