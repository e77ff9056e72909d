"""Real runs that resume from the state of another plan, and report their reference."""

import pytest

from pipeproof.exec.rank.checkpointing import checkpoint_lines
from pipeproof.exec.rank.job_files import CheckpointOptions
from pipeproof.state.resume_check import data_done
from pipeproof.state.state_index import read_index
from tests.exec.processes import Run
from tests.exec.test_reference_from_state import SP, TIED, TORCH, ZB_V, merged
from tests.plans import plan_dict


@pytest.mark.parametrize(
    ("steps", "start"), [([2, 3], "resumed from the state after step 1"), ([0], "began with the state's weights")]
)
def test_a_run_reports_where_it_and_its_reference_began(tmp_path, steps, start):
    (line,) = checkpoint_lines(CheckpointOptions(resume=tmp_path, reference_from_state=True), steps)
    assert line.startswith(f"{start}; so did the reference")
    assert checkpoint_lines(CheckpointOptions(resume=tmp_path), steps) == [start]


def resumed_runs(tmp_path, before, *after, save=(), **both):
    """Two steps of a plan that saves, and two of each other plan that resumes from them; real processes."""
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
        assert "resumed from the state after step 1; so did the reference" in ended.output
        yield ended.report


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_a_run_resumes_from_a_paddle_checkpoint_of_another_topology_and_is_compared_with_a_reference_from_it(tmp_path):
    (report,) = resumed_runs(tmp_path, {"topology": {"pp": 1, **SP}}, ZB_V, **TIED, save=("--save-format", "flex"))
    assert (tmp_path / "states" / "step-00000002" / "0.metadata").exists()
    assert [step["bitwise"] for step in report["steps"]] == [True, True]


@pytest.mark.needs_torch
def test_so_does_a_run_on_torch(tmp_path):
    one_rank, tp2 = {"topology": {"pp": 1}}, {"topology": {"pp": 1, "tp": 2}}
    reports = resumed_runs(tmp_path, one_rank, {}, tp2, **TORCH)
    assert [report["judged_by"] for report in reports] == ["bits", "bound"]


@pytest.mark.slow
@pytest.mark.needs_torch
def test_a_run_resumes_with_other_micro_batches_with_a_note_and_saves_the_position_of_its_data(tmp_path):
    run = {"run": {"backend": "torch", "steps": 2, "optimizer": "adamw"}}
    small = merged(TORCH, run, {"topology": {"pp": 1}, "schedule": {"num_micro_batches": 4}})
    twice = merged(small, {"schedule": {"num_micro_batches": 8}, "run": {"steps": 4}})
    states, more = str(tmp_path / "states"), str(tmp_path / "more")
    first = Run(tmp_path / "first", plan_dict(**small), "--save", states).end()
    assert first.status == 0, first.output
    ended = Run(tmp_path / "again", plan_dict(**twice), "--resume", states, "--save", more).end()
    assert ended.status == 0, ended.output
    assert "note[PP925]" in ended.output
    assert "dp * ep * schedule.num_micro_batches was 4 and is 8" in ended.output
    assert [step["bitwise"] for step in ended.report["steps"]] == [True, True]
    index = read_index(tmp_path / "more" / "step-00000004")
    assert (index.data_before.steps, index.data_before.sequences) == (2, 2 * 4 * 2)  # two sequences each
    assert data_done(index).sequences == (2 * 4 + 2 * 8) * 2
