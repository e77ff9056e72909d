"""Layouts of small models, measured on two ranks."""

import pytest
from click.testing import CliRunner

import pipeproof as pp
from pipeproof.cli.main import main
from tests.train.launch import run

pytestmark = pytest.mark.needs_torch


def test_a_sequential_is_tuned_kept_and_trained_and_is_as_before(tmp_path):
    run("tune_layouts.py", 2, "tune_a_sequential", tmp_path)
    plan = str(tmp_path / "plan.yaml")
    checked = CliRunner().invoke(main, ["check", plan])
    assert checked.exit_code == 0, checked.output
    tuned = CliRunner().invoke(main, ["tune", plan, "--gpus", "3", "--top", "2"])
    assert tuned.exit_code == 0, tuned.output
    assert "3 ranks" in tuned.output
    refused = CliRunner().invoke(main, ["tune", plan, "--gpus", "3", "--device", "h100"])
    assert refused.exit_code == 2
    assert "leave out `device`: the plan has the times of its layers" in refused.output
    assert pp.tune(plan, gpus=3, top=2).to_records()[0]["kind"]


def test_blocks_are_recomputed_in_little_memory_and_less_is_an_error(tmp_path):
    pytest.importorskip("transformers")
    run("tune_layouts.py", 2, "recompute_a_llama", tmp_path)


@pytest.mark.parametrize("program", ["other_models", "bad_input", "train_in_one_line"])
def test_ranks_agree(program, tmp_path):
    run("tune_layouts.py", 2, program, tmp_path)
