"""``pipeproof check --from`` and ``pipeproof import``."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from pipeproof.cli.main import main
from pipeproof.interop import Flags, import_files
from pipeproof.interop.importers.import_kinds import KINDS
from pipeproof.specs.load_plan import load_plan

JOB = """tensor_model_parallel_size: 2
pipeline_model_parallel_size: 2
sequence_parallel: true
gradient_accumulation_steps: 4
per_device_train_batch_size: 1
overlap_p2p_comm: false
"""
STRATEGY = "pipeline_configs { accumulate_steps: 4 }\nhybrid_configs { mp_degree: 2 pp_degree: 2 }\n"


@pytest.fixture
def job(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(JOB, encoding="utf-8")
    return file


@pytest.fixture
def strategy(tmp_path):
    file = tmp_path / "strategy.prototxt"
    file.write_text(STRATEGY, encoding="utf-8")
    return file


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_verdict_in_one_command(job):
    done = run("check", "--from", "paddleformers", job)
    assert done.exit_code == 0
    assert "warning[PP175]" in done.output
    assert f"{job}:3:20" in done.output.replace("\n", "")
    assert run("check", "--strict", "--from", "paddleformers", job).exit_code == 1


def test_what_importing_finds_can_be_left_out(job):
    done = run("check", "--strict", "--from", "paddleformers", job, "--ignore", "PP175,PP172")
    assert done.exit_code == 0
    assert "PP17" not in done.output
    assert run("check", "--ignore", "PP175", "examples/gpt_pp4.yaml").exit_code == 2  # plans have no such rule


def test_a_corrupting_strategy_fails(strategy):
    done = run("check", "--from", "fleet", strategy, "--set", "topology.sequence_parallel=true")
    assert done.exit_code == 1
    assert "all-gathers, and wrong" in done.output


def test_json_and_sarif_have_the_places(strategy, job):
    flags = ["--set", "topology.sequence_parallel=true", "--format"]
    findings = json.loads(run("check", "--from", "fleet", strategy, *flags, "json").output)["findings"]
    assert {f["location"]["file"] for f in findings if f["code"] == "PP201"} == {str(strategy)}
    sarif = json.loads(run("check", "--from", "paddleformers", job, "--format", "sarif").output)
    assert "PP175" in {result["ruleId"] for result in sarif["runs"][0]["results"]}


def test_import_writes_a_plan_that_says_where_it_comes_from(job, tmp_path):
    output = tmp_path / "plan.yaml"
    done = run("import", "plan", job, "-o", output, "--world-size", "8", "--set", "model.num_layers=6")
    assert done.exit_code == 0, done.output
    text = output.read_text(encoding="utf-8")
    assert f"tp: 2  # tensor_model_parallel_size, {job}:1" in text
    assert "num_layers: 6  # --set model.num_layers=6" in text
    assert "hidden_size: 256  # assumed: " in text
    flags = Flags({("model", "num_layers"): 6}, world_size=8)
    imported = import_files("paddleformers", [job], flags)
    assert yaml.safe_load(text) == imported.plan
    assert load_plan(output).spec.topology.dp == 2
    assert run("check", output).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "--from", "paddleformers", "JOB", "--set", "model.num_layers"], "is not KEY=VALUE"),
        (["check", "--from", "paddleformers", "JOB", "--set", "a=1", "--set", "a.b=1"], "a is set already"),
        (["check", "--from", "paddleformers", "JOB", "--set", "model.num_layer=4"], "did you mean `num_layers`"),
        (["check", "--from", "paddleformers", "JOB", "--world-size", "6"], "do not divide by 4"),
        (["check", "--from", "paddleformers", "absent.yaml"], "cannot read `absent.yaml`"),
        (["check", "--from", "paddleformers", "JOB", "--model-config", "absent.json"], "cannot read `absent.json`"),
        (["import", "plan", "--from", "fleet", "JOB"], "no field `tensor_model_parallel_size`"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(job, arguments, words):
    done = run(*[job if argument == "JOB" else argument for argument in arguments])
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_a_model_configuration_that_is_none(job, tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": "big"}', encoding="utf-8")
    done = run("check", "--from", "paddleformers", job, "--model-config", config)
    assert done.exit_code == 2
    assert f"{config}:1:17" in done.output.replace("\n", "")


def test_every_kind_has_an_importer():
    assert all(callable(kind.load()) and kind.description for kind in KINDS.values())


ROOT = Path(__file__).parents[2]


def test_what_the_page_shows_is_what_is_printed(monkeypatch):
    page = (ROOT / "docs" / "importing.md").read_text(encoding="utf-8")
    shown = re.findall(r"```text\n(.*?)```", page.partition("\n## Megatron")[0], re.DOTALL)
    commands = [line[2:] for line in re.findall(r"^\$ pipeproof check .*$", page, re.MULTILINE)]
    monkeypatch.chdir(ROOT)
    printed = [run(*shlex.split(line)[1:]).output for line in (commands[0], commands[-1])]
    paddle = [text for text in shown if "partial" in text]
    assert len(paddle) == 2
    assert paddle[0] in printed[0]
    assert any(paddle[1] in run(*shlex.split(line)[1:]).output for line in commands if "hidden_size" in line)
