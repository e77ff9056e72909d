"""Real runs that are killed and resume, that cannot resume, that are not finite, or run out of memory."""

import json
import os
import signal

import pytest
from click.testing import CliRunner

from pipeproof.cli.main import main
from tests.exec.processes import Run
from tests.plans import plan_dict

TIED = {"tied_embedding": True}


def shown(report):
    losses = {step["step"]: step["loss"] for step in report["steps"]}
    return losses, {(one["step"], one["name"]): one["md5"] for one in report["gradients"]}


def from_step(step, pair):
    losses, gradients = pair
    return (
        {at: loss for at, loss in losses.items() if at >= step},
        {key: md5 for key, md5 in gradients.items() if key[0] >= step},
    )


def test_two_runs_do_not_save_in_one_directory(tmp_path):
    states, plan = tmp_path / "states", plan_dict(run={"steps": 10**6})
    first = Run(tmp_path / "first", plan, "--save", str(states))
    first.await_output("step 0  ")
    second = Run(tmp_path / "second", plan, "--save", str(states)).end()
    assert second.status == 2, second.output
    assert f"error[PP920]: another run saves its states in {states}" in second.output
    assert "step 0 " not in second.output
    first.process.send_signal(signal.SIGTERM)
    assert first.end().status == 143
    assert not states.exists()


def killed_and_resumed(tmp_path, plan):
    """A run at once, and one of the same plan that is killed after step 1 and resumes: reports of both."""
    whole = Run(tmp_path / "whole", plan).end()
    assert whole.status == 0, whole.output
    states = tmp_path / "states"
    longer = {**plan, "run": {**plan["run"], "steps": 10**6}}
    killed = Run(tmp_path / "killed", longer, "--save", str(states), "--save-every", "2")
    killed.await_output("step 2 ")
    os.kill(killed.worker(1), signal.SIGKILL)
    ended = killed.end()
    assert ended.status == 3, ended.output
    left = sorted(path.name for path in states.iterdir())
    assert "step-00000002" in left
    assert not [name for name in left if not name.startswith("step-")]
    more = tmp_path / "more"
    resumed = Run(tmp_path / "resumed", plan, "--resume", str(states / "step-00000002"), "--save", str(more)).end()
    assert resumed.status == 0, resumed.output
    assert "resumed from the state after step 1" in resumed.output
    assert [path.name for path in more.iterdir()] == [f"step-{plan['run']['steps']:08d}"]
    assert resumed.report["log_matches_graph"]
    return whole.report, resumed.report


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_a_killed_run_resumes_with_the_bits_of_one_that_was_not_killed(tmp_path):
    plan = plan_dict(model=TIED, topology={"pp": 2}, run={"steps": 4})
    whole, resumed = killed_and_resumed(tmp_path, plan)
    assert shown(resumed) == from_step(2, shown(whole))
    assert all(step["bitwise"] for step in resumed["steps"])


@pytest.mark.needs_torch
def test_a_run_on_torch_goes_on_with_the_bits_of_one_that_did_not_end(tmp_path):
    plan = plan_dict(model=TIED, topology={"pp": 2}, run={"steps": 3, "backend": "torch"})
    whole = Run(tmp_path / "whole", plan, "--save", str(tmp_path / "states"), "--save-every", "2").end()
    resumed = Run(tmp_path / "resumed", plan, "--resume", str(tmp_path / "states" / "step-00000002")).end()
    assert (whole.status, resumed.status) == (0, 0), resumed.output
    assert shown(resumed.report) == from_step(2, shown(whole.report))
    assert resumed.report["judged_by"] == "bound"
    assert "matches: every loss, within the bound" in resumed.output


def refused(tmp_path, plan, *options):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    result = CliRunner().invoke(main, ["run", str(file), *map(str, options)])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.needs_paddle
def test_states_that_cannot_be_resumed_are_refused_before_any_process_starts(tmp_path):
    plan, states = plan_dict(run={"steps": 2}), tmp_path / "states"
    assert "error[PP920]: there is no state at" in refused(tmp_path, plan, "--resume", tmp_path / "none")
    taken = states / "step-00000002"
    taken.mkdir(parents=True)
    text = refused(tmp_path, plan, "--save", states)
    assert "error[PP920]: " in text
    assert "step-00000002" in text
    assert "already" in text
    (taken / "index.json").write_text("{}")
    text = refused(tmp_path, plan, "--resume", taken)
    assert "is not the index of a state: pipeproof_state: Field required" in text
    assert "--save-every needs --save DIR" in refused(tmp_path, plan, "--save-every", 2)
    assert [path.name for path in states.iterdir()] == ["step-00000002"]


@pytest.mark.needs_paddle
def test_training_that_is_not_finite_ends_with_status_1(tmp_path):
    ended = Run(tmp_path, plan_dict(run={"optimizer": "sgd", "learning_rate": 1e6, "steps": 1000})).end()
    assert ended.status == 1, ended.output
    assert "error[PP921]: step 1: " in ended.output
    assert "the reference has values that are not finite too" in ended.output
