"""Layouts of small models, measured on two ranks."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

import pipeproof as pp
from pipeproof.cli.main import main
from pipeproof.exec.train.tuned_layout import LayoutRow, expected_ms, next_to_run, ranked
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


def test_modules_of_a_sequential_are_recomputed_if_that_changes_nothing(tmp_path):
    run("tune_layouts.py", 2, "recompute_a_sequential", tmp_path)


def test_ranks_are_divided_into_pipelines_with_their_own_rows(tmp_path):
    run("tune_layouts.py", 4, "divide_the_ranks", tmp_path)


def test_layers_of_a_model_on_the_meta_device_have_memory_one_at_a_time(tmp_path):
    pytest.importorskip("transformers")
    run("tune_layouts.py", 2, "tune_without_memory", tmp_path)


@pytest.mark.parametrize("program", ["other_models", "bad_input", "train_in_one_line", "vary_the_rows"])
def test_ranks_agree(program, tmp_path):
    run("tune_layouts.py", 2, program, tmp_path)


def row(schedule, *, predicted, measured=None, gib=None, replay=False, noise=0.0):
    return LayoutRow(
        schedule, 1, (2, 2), (1, 1), "graph", False, replay, (0, 0), predicted, 1.0, measured, gib, noise,
    )  # fmt: skip


def test_rows_that_need_too_much_memory_are_last():
    fast, slow = (
        row("zb_h2", predicted=9.0, measured=9.0, gib=15.0),
        row("1f1b", predicted=10.0, measured=10.0, gib=13.0),
    )
    assert [each.schedule for each in ranked([fast, slow], 20.0)] == ["zb_h2", "1f1b"]
    first, last = ranked([fast, slow], 14.0)
    assert (first.schedule, last.schedule) == ("1f1b", "zb_h2")
    assert "needs more than 14.0 GiB" in last.reason
    assert [each.schedule for each in ranked([fast, slow], 12.0)] == ["zb_h2", "1f1b"]


def test_of_rows_within_the_noise_the_simplest_is_first():
    replayed, plain = (row("1f1b", predicted=9.0, measured=ms, replay=ms < 10) for ms in (9.99, 10.0))
    assert not ranked([replayed, plain])[0].replay
    assert ranked([replayed, replace(plain, measured_ms=11.0)])[0].replay


def test_rows_that_run_as_one_that_was_too_slow_are_expected_to_be_so():
    tried = [row("1f1b", predicted=10.0, measured=13.0, replay=True)]
    left = [row("zb_h2", predicted=9.0, replay=True), row("gpipe", predicted=11.0)]
    assert [round(expected_ms(each, tried), 3) for each in left] == [11.7, 11.0]
    assert next_to_run(left, tried).schedule == "gpipe"
    assert next_to_run(left, []).schedule == "zb_h2"
