"""The page of states on other topologies: what it shows, that it can show a wrong pair, and a small part of it anew."""

import copy
import json
from itertools import product
from pathlib import Path

import pytest

EVIDENCE = Path(__file__).parents[2] / "validation" / "results"


@pytest.fixture
def made(validation_script):
    return validation_script("make_reshard")


@pytest.fixture
def measured():
    return json.loads((EVIDENCE / "reshard-matrix.json").read_text(encoding="utf-8"))


def test_every_pair_of_topologies_was_measured_and_is_right(made, measured):
    for model, topologies in ((model, made.topologies(model)) for model in made.MODELS):
        assert list(measured[model]["trained"]) == list(topologies)
        assert set(measured[model]["pairs"]) == {f"{one} {other}" for one, other in product(topologies, topologies)}
        assert all(map(made._is_right, measured[model]["pairs"].values()))
        assert all(one["passed"] for one in measured[model]["trained"].values())


def test_what_adds_in_the_same_order_has_the_same_losses(made, measured):
    for result in measured.values():
        trained = result["trained"]
        for one, other in product(trained, trained):
            if trained[one]["order"] == trained[other]["order"]:
                assert made._cell(result, one, other) == "="


@pytest.mark.parametrize(
    ("key", "value"),
    [("bitwise", False), ("equal_tensors", 1), ("equal_files", 0), ("merged_md5s", ["a", "b"])],
)
def test_a_wrong_pair_is_shown(made, measured, key, value):
    result = copy.deepcopy(measured["dense"])
    assert "wrong" not in made.matrix_part(result)
    result["pairs"]["pp2 tp2"][key] = value
    assert made._cell(result, "pp2", "tp2") == "**wrong**"
    assert made.matrix_part(result).count("**wrong**") == 1


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_a_small_part_is_measured_anew(made, monkeypatch, tmp_path):
    monkeypatch.setattr(made, "topologies", lambda model: ("pp2",))
    result = made._of_model("dense", tmp_path)
    assert set(result["pairs"]) == {"pp2 pp2"}
    assert made._is_right(result["pairs"]["pp2 pp2"])
    assert made._cell(result, "pp2", "pp2") == "="
