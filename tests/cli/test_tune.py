"""``pipeproof tune``: its output, its input, and its refusals."""

import json

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.cli.commands import REPOSITORY, invoke
from tests.tune.models import DENSE

SCHEMA = Draft202012Validator(json.loads((REPOSITORY / "docs" / "schemas" / "tune.schema.json").read_text()))
OPTIONS = ("--gpus", "8", "--device", "h100", "--global-batch", "16", "--workers", "1", "--top", "3")


@pytest.fixture
def plan(tmp_path):
    file = tmp_path / "plan.yaml"
    schedule = {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 2}
    data = {"pipeproof": 1, "model": DENSE, "topology": {"dp": 2}, "schedule": schedule}
    file.write_text(json.dumps({**data, "cost": {"analytic": "h100"}}))
    return file


def test_json_is_what_the_schema_says(plan):
    result = invoke("tune", plan, *OPTIONS, "--fix", "cp=1", "--format", "json")
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    SCHEMA.validate(content)
    assert len(content["rows"]) == 3
    assert content["framework"] == "megatron"
    assert content["memory_gib"] == 80


def test_text_has_the_rows_and_the_reasons(plan):
    result = invoke("tune", plan, *OPTIONS, "--fix", "cp=1", "--fix", "tp=1,2")
    assert result.exit_code == 0
    assert "MFU" in result.stdout
    assert "All rows:" in result.stdout
    assert "Why row 1:" in result.stdout
    assert "Row 3 against row 1:" in result.stdout
    assert "80 GiB, from h100's data sheet" in " ".join(result.stdout.split())


@pytest.mark.slow(but=["paddle-suffixes1"])
@pytest.mark.parametrize(
    ("framework", "suffixes"),
    [("megatron", {".sh", ".yaml"}), ("paddle", {".yaml"})],
)
def test_output_has_plans_that_pass_and_arguments_that_are_imported(plan, tmp_path, framework, suffixes):
    folder = tmp_path / framework
    options = (*OPTIONS, "--fix", "cp=1", "--fix", "tp=2", "--framework", framework, "-o", folder)
    result = invoke("tune", plan, *options)
    assert result.exit_code == 0, result.stderr
    files = {path.name for path in folder.iterdir()}
    assert {name[name.rindex(".") :] for name in files} == suffixes
    assert {f"{number:02d}.yaml" for number in (1, 2, 3)} < files
    written = folder / "01.yaml"
    assert invoke("check", written).exit_code == 0
    assert yaml.safe_load(written.read_text())["memory"]["budget_gib"] == 80
    again = invoke("tune", plan, *options)
    assert again.stdout == result.stdout


def test_a_script_of_megatron_is_tuned_for_megatron():
    script = REPOSITORY / "examples" / "importing" / "megatron.sh"
    result = invoke(
        "tune", script, "--gpus", "8", "--device", "h100", "--workers", "1", "--top", "2", "--format", "json"
    )
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["framework"] == "megatron"
    assert content["global_batch"] == 32


def test_a_config_of_hugging_face_gets_a_stated_sequence_length(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
                    "intermediate_size": 1408, "vocab_size": 32000})
    )  # fmt: skip
    result = invoke("tune", config, *OPTIONS, "--fix", "tp=1", "--format", "json")
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert content["seq_length"] == 4096
    assert any("4096 tokens" in text for text in content["assumptions"])
    given = invoke("tune", config, *OPTIONS, "--fix", "tp=1", "--set", "model.seq_length=1024", "--format", "json")
    assert json.loads(given.stdout)["seq_length"] == 1024


def test_nothing_that_fits_is_status_1(plan):
    result = invoke("tune", plan, *OPTIONS, "--memory-gib", "0.001")
    assert result.exit_code == 1
    assert "No layout fits. The one with the least memory needs " in result.stdout
    none = invoke("tune", plan, "--gpus", "31", "--device", "h100", "--global-batch", "32")
    assert none.exit_code == 1
    assert "No layout is possible on 31 devices. The nearest number with one is " in none.stdout
    assert "Not tried: " in none.stdout
