"""The page of equalities: what its plans cover, that its results are theirs, that failures are shown and run again."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from pipeproof.comm.accumulation_order import Accumulation
from pipeproof.exec.launch.run_plan import RunOptions, require_runnable
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check

EVIDENCE = Path(__file__).parents[2] / "validation" / "results"
RESULTS = json.loads((EVIDENCE / "equality.json").read_text(encoding="utf-8"))


@pytest.fixture
def script(validation_script):
    return validation_script("make_equality")


@pytest.fixture
def plans(validation_script):
    return validation_script("equality_plans")


def test_every_kind_topology_and_feature_with_four_kinds_is_there(plans):
    assert {cell.kind for cell in plans.CELLS} == SCHEDULE_KINDS.keys()
    assert {cell.topology for cell in plans.CELLS} == plans.TOPOLOGIES.keys()
    assert len({cell.name for cell in plans.CELLS}) == len(plans.CELLS)
    seen = {(cell.feature, cell.kind) for cell in plans.CELLS}
    several = {
        "all together",
        "more together",
        "gradient reductions when ready",
        "experts, sharded optimizer, reductions when ready",
    }
    single = plans.FEATURES.keys() - several
    assert seen >= {(feature, kind) for feature in single for kind in ("1f1b", "interleaved", "zb_v", "dualpipe")}


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_every_plan_passes_check_and_can_be_run(plans):
    for cell in plans.CELLS:
        loaded = plan_from_dict(cell.plan)
        assert 2 <= loaded.spec.topology.num_ranks <= 4
        require_runnable(check(loaded), RunOptions())


def test_results_are_of_the_plans_as_they_are_now(plans):
    assert RESULTS.keys() == {cell.name for cell in plans.CELLS}
    for cell in plans.CELLS:
        assert RESULTS[cell.name]["plan"] == cell.plan, (
            f"run `python validation/pages/make_equality.py --measure {cell.name!r}`"
        )


@pytest.mark.parametrize("name", [name for name, result in RESULTS.items() if result["status"] == 0])
def test_what_passed_has_consistent_figures(name, script):
    result = RESULTS[name]
    assert result["passed"]
    assert result["verified"]
    assert result["log_matches_graph"]
    assert result["accumulation"] in set(Accumulation)
    assert [step["step"] for step in result["steps"]] == [0, 1]
    for step in result["steps"]:
        assert step["bitwise"]
        assert step["loss"] == step["reference_loss"]
        assert 0 < step["num_bitwise"] == step["num_gradients"]
    assert result["steps"][0]["farthest_uncut_rel_diff"] <= result["parallel_bound"]
    assert (script.reached(result) == script.UNPARTITIONED) == (result["parallel_bound"] == 0.0)


def test_runs_of_one_model_without_parallel_sums_have_each_others_bits(plans):
    """Held against each other here, and not against a reference: MD5s of all gradients."""
    of_model = defaultdict(dict)
    for cell in plans.CELLS:
        result = RESULTS[cell.name]
        if result["status"] == 0 and result["parallel_bound"] == 0.0:
            md5s = tuple(step["gradients_md5"] for step in result["steps"])
            of_model[cell.feature, result["plan"]["schedule"]["num_micro_batches"]][cell.name] = md5s
    assert len(of_model["GPT", 4]) == 3
    assert len(of_model["GPT", 8]) == 2
    assert all(len(set(md5s.values())) == 1 for md5s in of_model.values())
    for same, model, number in (
        *((same, "GPT", number) for same in ("empty layers", "token batches across boundaries") for number in (4, 8)),
        ("recomputation", "experts", 8),
    ):
        others = of_model.pop((same, number))
        assert set(others.values()) == set(of_model[model, number].values()), f"{same}: nothing is changed by it"
    all_md5s = [next(iter(md5s.values())) for md5s in of_model.values()]
    assert len(set(all_md5s)) == len(all_md5s), "other models have other gradients, clipped ones too"


BAD = {"pipeproof": 1}
"""No plan: a run of it fails at once."""


def test_a_failed_run_is_shown_and_run_again_and_does_not_stop_the_others(script, tmp_path, monkeypatch, capsys):
    good = next(result for result in RESULTS.values() if result["status"] == 0)
    file = tmp_path / "equality.json"
    plans = {"kept": good["plan"], "bad": BAD, "also bad": BAD}
    file.write_text(json.dumps({"kept": good, "no more": good}))
    script.measure(plans, file)
    results = json.loads(file.read_text())
    assert list(results) == ["kept", "bad", "also bad"]
    assert results["kept"] == good
    assert results["bad"]["status"] == 2
    assert script.reached(results["bad"]).startswith("**failed**, exit status 2: error[PP")
    assert "2 of 2: also bad: **failed**" in capsys.readouterr().err

    ran = []
    monkeypatch.setattr(script, "one_run", lambda plan: ran.append(plan) or good)
    script.measure(plans, file)
    assert ran == [BAD, BAD]
    script.measure({**plans, "kept": {**good["plan"], "suppress": []}}, file, names=["bad"])
    assert ran == [BAD] * 3
    script.measure({"kept": {**good["plan"], "suppress": []}}, file)
    assert ran[3:] == [{**good["plan"], "suppress": []}]


def test_what_is_not_equal_is_said(script):
    good = next(result for result in RESULTS.values() if result["parallel_bound"])
    first, *others = good["steps"]
    wrong = {
        **good,
        "status": 1,
        "steps": [{**first, "bitwise": False, "num_bitwise": first["num_bitwise"] - 3}, *others],
    }
    number = sum(step["num_gradients"] for step in good["steps"])
    assert script.reached(wrong) == f"**failed**: {number - 3} of {number} gradients are bitwise equal to the reference"
    assert script.reached({**good, "status": 1}) == "**failed**, exit status 1, bitwise equal to the reference"
    assert script.reached({"status": None, "message": "slow"}) == "**failed**: not done within 180 s"
    assert script.reached(good) == script.ORDERED


def test_a_run_without_an_end_is_stopped(script, monkeypatch):
    monkeypatch.setattr(script, "PATIENCE_S", 0.01)
    result = script.one_run(BAD)
    assert (result["status"], "steps" in result) == (None, False)
