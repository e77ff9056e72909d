"""Measurements become plans by one rule for a set; rows that no plan describes are listed with the reason."""

import csv
import json

import pytest

from pipeproof.specs.load_plan import plan_from_dict
from validation.board.accuracy_board import MEASUREMENTS, SETS, Predictor, read_measurements
from validation.board.bridge_recipes import NO_RECIPE, recipe_of
from validation.board.measurement import MeasurementFileError, NoPlanError, Quantity, partition

MLPERF = "mlperf_llama405b_steps.csv"
BRIDGE = "megatron_bridge_perf.csv"


def rows_of(path):
    (file,), _ = read_measurements([path])
    return file.rows


def table(tmp_path, name, *changes):
    """A file with the first row of a packaged table for each change of its cells; under another name."""
    with (MEASUREMENTS / name).open(newline="") as file:
        header, first, *_ = csv.reader(file)
    path = tmp_path / "others.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, header)
        writer.writeheader()
        writer.writerows(dict(zip(header, first, strict=True)) | change for change in changes)
    return path


def test_every_row_has_a_plan_or_a_reason():
    files, unread = read_measurements([MEASUREMENTS])
    assert not unread
    assert {file.set for file in files} == set(SETS)
    rows = [row for file in files for row in file.rows]
    assert len(rows) > 700
    assert all((row.plan is None) == (row.reason != "") for row in rows)


def test_405b_is_cut_with_embedding_and_head_as_a_block_each():
    plan = rows_of(MEASUREMENTS / MLPERF)[0].plan
    stages = plan_from_dict(plan).spec.stages
    assert [len(stage) for stage in stages] == [2, *[2] * 62, 3]
    assert plan["topology"] == {"tp": 8, "pp": 8, "cp": 2, "dp": 64, "sequence_parallel": True}
    assert plan["schedule"]["num_micro_batches"] == 24


def test_partition_of_megatron():
    assert [len(stage) for stage in partition(8, 4)] == [3, 2, 2, 4]
    assert partition(6, 4)[0] == ["embed", "layer.0"]
    assert partition(6, 4)[-1] == ["layer.5", "norm", "head"]
    assert [len(stage) for stage in partition(61, 16, 1)] == [5, *[4] * 14, 4]
    assert partition(61, 16, 1)[-1] == ["layer.60", "mtp.0", "norm", "head"]
    assert partition(3, 1) == [["embed", "layer.0", "layer.1", "layer.2", "norm", "head"]]
    with pytest.raises(NoPlanError, match="2 blocks leave one of 8 stages empty"):
        partition(2, 8)


def test_a_batch_that_does_not_divide_and_a_device_without_data_sheet_are_reasons(tmp_path):
    changes = {"gbs": "1537"}, {"config": "config_TPU9_64x8x9.sh"}, {"bench": "gpt3"}
    good, batch, device, other = rows_of(table(tmp_path, MLPERF, {}, *changes))
    assert good.plan is not None
    assert batch.reason == "the batch over micro-batches: 1537 does not divide by 64"
    assert device.reason == "pipeproof has no data sheet of TPU9"
    assert other.reason == "the board has no plan of the benchmark gpt3"
    assert Predictor().predict(device).predicted is None


def test_experts_over_tensor_parallel_ranks_are_a_note(tmp_path):
    change = {"System": "DGX-H100", "model": "Qwen3_235B_a22B", "#-GPUs": "256", "TP": "2", "PP": "8", "VP": "4"}
    (row,) = rows_of(table(tmp_path, BRIDGE, change | {"GBS": "8192", "EP": "32", "Precision": "BF16"}))
    assert row.plan["topology"]["ep"] == 16
    assert row.notes == (
        "experts over 32 ranks, 2 of them tensor-parallel, are experts over 16 ranks, sharded over tp",
    )
    assert "matmul_dtype" not in row.plan["cost"]["analytic"]


GOLDEN = {"kind": "gpt", "case": "gpt3_mcore_te_tp2_pp2_resume_torch_dist", "machine": "dev_dgx_h100", "it": 0.2,
          "mem": 2.0**30}  # fmt: skip


def goldens(tmp_path, *rows):
    path = tmp_path / "others.json"
    path.write_text(json.dumps(rows))
    return path


def test_golden_case_has_the_plan_of_its_arguments(tmp_path):
    step, memory = rows_of(goldens(tmp_path, GOLDEN))
    assert (step.quantity, step.measured) == (Quantity.STEP, 0.2)
    assert (memory.quantity, memory.measured) == (Quantity.ALLOCATED, 1.0)
    spec = plan_from_dict(step.plan).spec
    assert (spec.topology.tp, spec.topology.pp, spec.topology.dp, spec.model.num_layers) == (2, 2, 2, 12)
    assert spec.schedule.num_micro_batches == 4
    assert spec.cost.analytic.device == "h100"


def test_the_pair_of_a_trace_and_of_its_summary_are_equal(tmp_path):
    events = [
        {"cat": "kernel", "tid": 7, "ts": 1000, "dur": 60}, {"cat": "kernel", "tid": 7, "ts": 1100, "dur": 100},
        {"cat": "kernel", "tid": 9, "ts": 900, "dur": 50}, {"cat": "cpu_op", "tid": 7, "ts": 0, "dur": 9},
    ]  # fmt: skip
    trace = {
        "traceEvents": events,
        "deviceProperties": [{"name": "NVIDIA H800"}],
        "distributedInfo": {"world_size": 64},
    }
    path = tmp_path / "train.json"
    path.write_text(json.dumps(trace))
    (row,) = rows_of(path)
    assert row.measured == 0.2
    assert row.plan == rows_of(MEASUREMENTS / "deepseek_dualpipe_pair.json")[0].plan
    path.write_text(json.dumps(trace | {"traceEvents": events[-1:]}))
    with pytest.raises(MeasurementFileError, match=r"train.json: no kernels"):
        rows_of(path)


def test_recipes_are_those_of_the_release_and_the_sizes_of_a_row():
    deepseek = "deepseekv3", "DGX-B200", "MXFP8"
    stages, chunks = recipe_of(*deepseek, "26.04", (1, 16, 1, 8, 1)), recipe_of(*deepseek, "26.04", (1, 8, 2, 32, 1))
    assert (stages.overlaps_exchange, stages.replayed, stages.recomputed) == (False, (), ("mla_up_proj",))
    assert (chunks.overlaps_exchange, chunks.replayed) == (True, ("attention", "router"))
    assert chunks == recipe_of(*deepseek, "26.04.01", (1, 8, 2, 32, 1))  # the nearest release with these sizes
    gpt = "gpt oss 120b", "DGX-GB200", "BF16"
    dispatchers = {
        release: recipe_of(*gpt, release, (1, 1, 1, 64, 4)).by_all_to_all
        for release in ("26.02.01", "26.04", "26.04.01")
    }
    assert dispatchers == {"26.02.01": True, "26.04": False, "26.04.01": True}
    whole = recipe_of("qwen3_30b_a3b", "DGX-GB300", "MXFP8", "26.06", (1, 1, 1, 8, 8))
    assert (whole.is_replayed_whole, whole.overlaps_exchange, whole.has_fused_experts) == (True, True, True)
    assert recipe_of("qwen3_30b_a3b", "DGX-A100", "BF16", "26.06", (1, 1, 1, 8, 8)) == NO_RECIPE


def test_own_shapes_have_the_plan_that_was_measured(tmp_path):
    rows = rows_of(MEASUREMENTS / "own_h200_shapes.json")
    assert len(rows) == len({row.model for row in rows}) == 12
    assert {row.group for row in rows} == {"own runs, 1 H200, dense", "own runs, 1 H200, experts"}
    first = rows[0]
    assert (first.measured, first.plan["model"]["num_kv_heads"]) == (pytest.approx(0.14465), 8)
    assert first.plan["schedule"]["num_micro_batches"] == 4
    path = tmp_path / "others.json"
    path.write_text(json.dumps({"shapes": [{"shape": {}}]}))
    with pytest.raises(MeasurementFileError, match=r"write the file with benchmarks/gpu/new_shapes\.py"):
        read_measurements([path])
