"""The page of the seed experiment: its runs are of the examples as they are, and show what the page says."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "seed").glob("*.yaml"))
RESULTS = json.loads((ROOT / "validation" / "results" / "seed_experiment.json").read_text(encoding="utf-8"))


@pytest.fixture
def script(validation_script):
    return validation_script("make_seed_experiment")


def test_results_are_of_the_plans_as_they_are_now(script):
    found = {name: result["plan"] for name, result in RESULTS.items()}
    assert found == script.plans(), "run `python validation/pages/make_seed_experiment.py --measure`"


def test_the_two_examples_differ_in_one_key(script):
    plans = script.plans()
    for kind in ("partial", "full"):
        after, before = (plans[f"norm_{place}_{kind}"] for place in ("after", "before"))
        after["model"]["final_norm"] = before["model"]["final_norm"]
        assert after == before


def test_the_runs_show_it(script):
    pairs = script.pairs(RESULTS)
    for kind, pair in pairs.items():
        is_right = kind == "full"
        for run in (pair.after, pair.before):
            first = run["steps"][0]
            assert run["verified"] is is_right
            assert run["status"] == (0 if is_right else 1)
            assert (first["loss"] == first["reference_loss"]) == is_right
            assert {one["right"] for one in run["gradients"]} == {is_right}
    everything = {one["name"] for one in pairs["full"].after["gradients"]}
    assert pairs["full"].same == everything
    assert pairs["full"].same_loss
    assert pairs["partial"].same == {"head.weight"}
    assert pairs["partial"].upstream == everything - {"head.weight", "norm.weight"}
    assert pairs["partial"].same_loss
    assert pairs["partial_cut_tokens"].same == set()
    assert not pairs["partial_cut_tokens"].same_loss


def test_the_page_says_what_the_runs_show(script):
    parts = script.parts(RESULTS)
    assert "The first losses have equal bits" in parts["partial"]
    assert "0 of 22 are equal in both runs. Equal in both runs: `head.weight`" in parts["partial"]
    assert "24 of 24" in parts["full"]
    assert "**do not have** equal bits" in parts["partial_cut_tokens"]
