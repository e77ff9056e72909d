"""The page of the 100 aligned steps: its runs are of the examples as they are, all is equal, every fault is located."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("known_notes")

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "validation" / "results" / "alignment_log.json").read_text(encoding="utf-8"))
EXAMPLES = sorted((ROOT / "examples" / "alignment").glob("*.yaml"))
STEPS = 100
FAULTS = ("scale", "norms", "rope", "auxiliary", "modules", "experts", "tied")


@pytest.fixture
def script(validation_script):
    return validation_script("make_alignment_log")


def test_the_examples_differ_in_their_schedules_only(script):
    plans = list(script.plans().values())
    assert [plan.pop("schedule")["kind"] for plan in plans] == list(script.NAMES)
    assert plans[0] == plans[1] == plans[2]
    assert (plans[0]["topology"]["ep"], plans[0]["run"]["steps"]) == (4, STEPS)


def test_the_unpartitioned_example_differs_in_where_it_runs_only(script):
    many, one = script.plans(script.DEEPSEEK).values()
    assert {*script.NAMES, *script.DEEPSEEK} == {path.stem for path in EXAMPLES}
    assert (many["topology"].pop("ep"), many["schedule"]["num_micro_batches"], many["run"]["steps"]) == (4, 2, STEPS)
    many["schedule"]["num_micro_batches"] *= 4
    assert many == one


def test_results_are_of_the_plans_as_they_are_now(script):
    for option, names, results in (
        ("measure", script.NAMES, RESULTS),
        ("deepseek", script.DEEPSEEK, RESULTS["deepseek_v4"]),
    ):
        found = {name: run["plan"] for name, run in results["runs"].items()}
        assert found == script.plans(names), f"run `python validation/pages/make_alignment_log.py --{option}`"


def test_every_loss_of_deepseek_v4_is_that_of_the_unpartitioned_model(script):
    results = RESULTS["deepseek_v4"]
    assert {run["status"] for run in results["runs"].values()} == {0}
    records, logs, unordered = (results["alignments"][" ".join(pair)] for pair in script.DEEPSEEK_PAIRS)
    assert records["printed"].splitlines()[:2] == [
        f"main_matches={STEPS}/{STEPS}, mtp_matches={STEPS}/{STEPS}, router_matches={STEPS}/{STEPS}",
        f"tensor_matches={STEPS * 395}/{STEPS * 395}",
    ]
    assert logs["printed"].splitlines() == ["main_matches=200/200, mtp_matches=200/200", "equal: bit for bit"]
    assert unordered["printed"].splitlines()[1].startswith(f"tensor_matches={STEPS * 395}/{STEPS * 395}, of which ")
    assert unordered["printed"].splitlines()[-1] == "equal within rounding"
    assert (records["status"], logs["status"], unordered["status"], len(results["log"])) == (0, 0, 0, STEPS)
    assert len({line.split()[1] for line in results["log"]}) == STEPS
    assert "2 of 2 records have these lines" in script.log_part(results)


def test_every_loss_every_tensor_and_every_gradient_is_equal(script):
    assert {run["status"] for run in RESULTS["runs"].values()} == {0}
    assert list(RESULTS["alignments"]) == [" ".join(pair) for pair in script.PAIRS]
    for found in RESULTS["alignments"].values():
        assert found["status"] == 0
        counts, tensors, *_, verdict = found["printed"].splitlines()
        assert counts == f"main_matches={STEPS}/{STEPS}, mtp_matches={STEPS}/{STEPS}, router_matches={STEPS}/{STEPS}"
        equal, compared = tensors.removeprefix("tensor_matches=").split("/")
        assert equal == compared
        assert int(compared) == STEPS * 288
        assert verdict == "equal: bit for bit"


def test_one_log_is_that_of_all_records(script):
    assert len(RESULTS["log"]) == STEPS
    assert len({line.split()[1] for line in RESULTS["log"]}) == STEPS
    assert len(RESULTS["logs"]) == 6
    assert len({*RESULTS["logs"].values()}) == 1
    assert "6 of 6 records have these lines" in script.log_part(RESULTS)


def test_every_fault_is_located_under_every_schedule(script):
    assert list(RESULTS["faults"]) == [f"{schedule}/{fault}" for schedule in script.NAMES for fault in FAULTS]
    assert {found["status"] for found in RESULTS["faults"].values()} == {1}
    rows = script.faults_part(RESULTS).splitlines()[2:]
    assert len(rows) == len(FAULTS)  # the same is said under all schedules
    places = ("head, forward output", "gradient of norm.weight", *["layer.2, backward output"] * 2,
              "mtp.0, backward input", "layer.2, forward output", "gradient of embed.weight")  # fmt: skip
    families = ("scale", "missing reduction", *["computation"] * 2, "scale", "computation", "scale")
    for row, place, family in zip(rows, places, families, strict=True):
        assert f"| step 0, {place}" in row
        assert f"| {family} |" in row


def test_what_differs_is_said(script):
    wrong = {**RESULTS, "runs": {**RESULTS["runs"], "zb_v": {**RESULTS["runs"]["zb_v"], "status": 1}}}
    assert "**does not match**" in script.runs_part(wrong)
    assert "5 of 6 records" in script.log_part({**RESULTS, "logs": {**RESULTS["logs"], "zb_v/run": "other"}})
