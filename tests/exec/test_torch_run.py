"""Real PyTorch processes over gloo: the log equals the graph, with equal bits or within the bound."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeproof.exec.store.rendezvous import reserved_ports
from tests.exec.processes import REPOSITORY, Run
from tests.features import GPT3, QWEN3
from tests.plans import plan_dict

pytestmark = pytest.mark.needs_torch

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "aux_loss": 0.1, "expert_bias_rate": 0.01}


def torch_plan(topology=(), schedule=(), model=(), run=(), **more):
    return plan_dict(
        topology={"pp": 2, **dict(topology)},
        schedule=dict(schedule),
        model=dict(model),
        run={"backend": "torch", "steps": 3, **dict(run)},
        **more,
    )


def test_pipeline_parallelism_alone_has_the_bits_of_the_unpartitioned_model(tmp_path):
    parts = {"model": {**GPT3, **QWEN3, "tied_embedding": False}, "run": {"dtype": "bfloat16"}}
    changes = {"schedule": {"kind": "zb_v", "num_chunks": 2}, **parts}
    ended = Run(tmp_path, torch_plan(**changes)).end()
    assert ended.status == 0, ended.output
    assert ended.report["judged_by"] == "bits"
    assert ended.report["log_matches_graph"]
    assert all(step["bitwise"] for step in ended.report["steps"])
    assert "matches: every loss and every gradient, bit for bit" in ended.output


def test_plans_that_add_in_another_order_are_within_the_bound_in_each_step(tmp_path):
    changes = {"topology": {"ep": 2}, "model": {"moe": MOE}, "schedule": {"kind": "dualpipe"}}
    ended = Run(tmp_path, torch_plan(**changes), "--verbose").end()
    assert ended.status == 0, ended.output
    report = ended.report
    assert (report["judged_by"], report["log_matches_graph"]) == ("bound", True)
    assert len(report["steps"]) == 3
    assert all(one["uncut_max_rel_diff"] <= report["parallel_bound"] for one in report["gradients"])
    assert all(one["replicas_agree"] for one in report["gradients"])
    assert "each step from the ranks' own weights" in ended.output


def test_a_rank_that_is_killed_is_named_and_nothing_is_left(tmp_path):
    ended = Run(tmp_path, torch_plan(), "--inject", "1:1F2:die").end()
    assert ended.status == 3
    assert "error[PP902]" in ended.output
    assert "rank 1 (pp 1) was killed by SIGKILL, at 1F2" in ended.output


def test_under_slurm_a_rehearsal_is_that_of_torchrun(tmp_path):
    """Two processes started by hand, with the variables of a launcher that knows no framework."""
    commands = {"torchrun": ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "pipeproof")}
    reports = {}
    with reserved_ports(1) as (port,):
        commands["slurm"] = (str(Path(__file__).with_name("start_by_hand.py")), str(port))
        for launcher, command in commands.items():
            ended = Run(tmp_path / launcher, torch_plan(), command=command, verb="rehearse").end()
            assert ended.status == 0, ended.output
            assert ended.output.count("every element arrived where the plan needs it") == 1
            reports[launcher] = {key: value for key, value in ended.report.items() if key != "seconds"}
    assert reports["torchrun"] == reports["slurm"]


def test_a_launcher_of_another_size_is_refused(tmp_path):
    environment = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(torch_plan()))
    done = subprocess.run(
        [sys.executable, "-m", "pipeproof", "rehearse", str(plan)],
        env={**os.environ, **environment, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "error[PP907]: the launcher started 4 processes, but the plan's topology has 2 ranks" in done.stdout
    assert "torchrun --nproc-per-node 2" in done.stdout


def test_gpus_that_are_not_there_are_named_before_anything_starts(tmp_path, monkeypatch):
    from pipeproof.exec.rank import gpu_assignment

    monkeypatch.setattr(gpu_assignment, "num_gpus", lambda backend: 0)
    from pipeproof.exec.launch.run_plan import BackendMissingError, RunOptions, require_runnable
    from pipeproof.verify.check_plan import check_subject
    from tests.plans import subject

    report = check_subject(subject(**torch_plan(run={"device": "gpu"})))
    with pytest.raises(BackendMissingError, match="PyTorch sees 0 GPUs here for 2 ranks"):
        require_runnable(report, RunOptions())
