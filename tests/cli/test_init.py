"""``pipeproof init``: the plan that it writes, and the options that it refuses."""

from pathlib import Path

import pytest

from pipeproof.specs.load_plan import load_plan
from tests.cli.commands import invoke

SMALL = ("--model", "small", "--gpus", "4", "--pp", "4", "--global-batch", "16")
LARGE = ("--model", "llama3-70b", "--gpus", "512", "--pp", "8", "--tp", "8", "--device", "h100", "--global-batch", "64")
EXPERTS = ("--model", "qwen3-30b-a3b", "--gpus", "64", "--pp", "4", "--ep", "8", "--tp", "2", "--global-batch", "64")


def written(tmp_path, *arguments):
    file = tmp_path / "new.yaml"
    result = invoke("init", *arguments, "-o", file)
    assert result.exit_code == 0, result.output
    return file


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (SMALL, {"topology.pp": 4, "schedule.num_micro_batches": 16, "run.backend": "paddle", "run.device": "cpu"}),
        ((*SMALL, "--schedule", "zb_v", "--framework", "torch"), {"schedule.num_chunks": 2, "run.backend": "torch"}),
        (("--model", "small", "--gpus", "8", "--pp", "2", "--tp", "2", "--global-batch", "8"), {"topology.dp": 2}),
        (("--model", "small", "--gpus", "1", "--pp", "1", "--global-batch", "2"), {"topology.pp": 1}),
        (LARGE, {"topology.dp": 8, "cost.analytic.device": "h100", "memory.shard_optimizer": "dp"}),
        ((*LARGE, "--schedule", "interleaved"), {"schedule.variant": "megatron", "schedule.num_chunks": 2}),
        ((*LARGE, "--set", "model.seq_length=8192"), {"model.seq_length": 8192}),
        ((*EXPERTS, "--device", "h200", "--framework", "torch"), {"topology.ep": 8, "model.moe.num_experts": 128}),
        (("--model", "llama3.1_405b", "--gpus", "16", "--pp", "16", "--device", "b200", "--global-batch", "16"),
         {"model.num_layers": 126}),
    ],
)  # fmt: skip
def test_the_plan_has_the_answers_and_passes_the_check(tmp_path, arguments, facts):
    file = written(tmp_path, *arguments)
    plan = load_plan(file).spec
    for key, value in facts.items():
        found = plan
        for name in key.split("."):
            found = getattr(found, name)
        assert found == value, key
    assert invoke("check", file).exit_code == 0


@pytest.mark.parametrize("arguments", [SMALL, LARGE], ids=["small", "large"])
def test_every_key_has_a_comment_that_fits(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    lines = written(Path(), *arguments).read_text().splitlines()
    assert max(map(len, lines)) <= 100
    keys = [index for index, line in enumerate(lines) if ": " in line.partition("#")[0]]
    assert len(keys) > 15
    assert [lines[i] for i in keys if "  # " not in lines[i] and not lines[i - 1].lstrip().startswith("# ")] == []
    assert lines[0].startswith(f"# {arguments[1]} on {arguments[3]} ")


def test_an_existing_file_is_kept_without_force(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("mine")
    refused = invoke("init", *SMALL, "-o", file)
    assert (refused.exit_code, file.read_text()) == (2, "mine")
    assert "--force" in refused.stderr
    assert invoke("init", *SMALL, "-o", file, "--force").exit_code == 0
    assert load_plan(file).spec.topology.pp == 4


def test_a_plan_that_fails_the_check_is_not_written(tmp_path):
    file = tmp_path / "new.yaml"
    refused = invoke("init", *LARGE, "--set", "memory.budget_gib=1", "-o", file)
    assert refused.exit_code == 1
    assert "was not written" in refused.stderr
    assert not file.exists()
