"""Real runs that go on from the state of another plan, and say what they were held against."""

import pytest

from pipeproof.exec.kept import KeptState, kept_lines
from tests.exec.processes import Run
from tests.exec.test_reference_from_state import SP, TIED, TORCH, ZB_V, merged
from tests.plans import plan_dict


@pytest.mark.parametrize(
    ("steps", "where"), [([2, 3], "went on from the state after step 1"), ([0], "began with the weights of the state")]
)
def test_a_run_says_where_it_and_its_reference_began(tmp_path, steps, where):
    too = "the reference, too: no training of this plan from step 0 on leads to its bits"
    assert kept_lines(KeptState(resume=tmp_path, reference_from_state=True), steps) == [f"{where}; {too}"]
    assert kept_lines(KeptState(resume=tmp_path), steps) == [where]


def runs_that_go_on(tmp_path, before, *after, save=(), **both):
    """Two steps of a plan that saves, and two of each other one that goes on from them; real processes."""
    both = merged({"run": {"steps": 2, "optimizer": "adamw"}}, both)
    first = Run(tmp_path / "first", plan_dict(**merged(both, before)), "--save", str(tmp_path / "states"), *save).end()
    assert first.status == 0, first.output
    assert first.report["reference_from"] == "beginning"
    for number, changes in enumerate(after):
        plan = plan_dict(**merged(both, changes, {"run": {"steps": 4}}))
        ended = Run(tmp_path / f"again{number}", plan, "--resume", str(tmp_path / "states")).end()
        assert ended.status == 0, ended.output
        assert ended.report["reference_from"] == "state"
        assert [step["step"] for step in ended.report["steps"]] == [2, 3]
        assert "went on from the state after step 1; the reference, too:" in ended.output
        yield ended.report


@pytest.mark.needs_paddle
def test_a_run_goes_on_with_what_paddle_saved_on_another_topology_and_is_held_against_a_reference_from_it(tmp_path):
    (report,) = runs_that_go_on(tmp_path, {"topology": {"pp": 1, **SP}}, ZB_V, **TIED, save=("--save-format", "flex"))
    assert (tmp_path / "states" / "step-00000002" / "0.metadata").exists()
    assert [step["bitwise"] for step in report["steps"]] == [True, True]


@pytest.mark.needs_torch
def test_so_does_a_run_on_torch(tmp_path):
    one_rank, tp2 = {"topology": {"pp": 1}}, {"topology": {"pp": 1, "tp": 2}}
    reports = runs_that_go_on(tmp_path, one_rank, {}, tp2, **TORCH)
    assert [report["judged_by"] for report in reports] == ["bits", "bound"]
