"""Measurements become plans by one rule for a set; what no plan describes is listed with the reason."""

import csv
import json

import pytest

from pipeproof.interop.tune_models import MODELS
from pipeproof.specs.load_plan import plan_from_dict
from validation.board.accuracy_board import MEASUREMENTS, SETS, Predictor, read_measurements
from validation.board.bridge_recipes import NO_RECIPE, recipe_of
from validation.board.measurement import MeasurementFileError, NoPlanError, Quantity, known_device, partition

MLPERF = "mlperf_llama405b_steps.csv"
VTRAIN = "vtrain_ground_truth_single.csv"
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


def test_vtrain_row(tmp_path):
    path = table(tmp_path, VTRAIN, {}, {"# GPUs": "16", "data parallelism": "8"}, {"data parallelism": "2"})
    one, several, wrong = rows_of(path)
    assert (one.group, several.group) == ("vTrain, one node", "vTrain, several nodes")
    assert one.plan["memory"] == {"recompute": "full"}
    assert one.measured == pytest.approx(0.372160408)
    assert "network" not in one.plan["cost"]
    assert ("transport" in one.plan) == (one.plan["topology"]["tp"] > 1)
    analytic = one.plan["cost"]["analytic"]
    assert (analytic["fused_residual"], analytic["fused_softmax"]) == (True, True)
    assert wrong.reason == "tp x dp x pp is 4"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"Precision": "INT8"}, "products in INT8 have no key in a plan"),
        ({"FSDP": "64"}, "sharded weights (FSDP) have no key in a plan"),
        ({"section": "LoRA Performance"}, "frozen weights with adapters (LoRA) have no key in a plan"),
        ({"model": "Nemotron_3_Nano"}, "blocks with a state space (Mamba) have no key in a plan"),
        ({"model": "Unheard_Of"}, "the sizes of Unheard_Of are not known to the board"),
        ({"GBS": "4097"}, "the batch over micro-batches: 4097 does not divide by 128"),
    ],
)
def test_bridge_rows_without_a_plan(tmp_path, change, reason):
    (row,) = rows_of(table(tmp_path, BRIDGE, {"System": "DGX-H100", "PP": "2"} | change))
    assert row.reason == reason


def test_experts_over_tensor_parallel_ranks_are_a_note(tmp_path):
    change = {"System": "DGX-H100", "model": "Qwen3_235B_a22B", "#-GPUs": "256", "TP": "2", "PP": "8", "VP": "4"}
    (row,) = rows_of(table(tmp_path, BRIDGE, change | {"GBS": "8192", "EP": "32", "Precision": "BF16"}))
    assert row.plan["topology"]["ep"] == 16
    assert row.notes == (
        "experts over 32 ranks, 2 of them tensor-parallel, are experts over 16 ranks, sharded over tp",
    )
    assert "matmul_dtype" not in row.plan["cost"]["analytic"]


def test_thousands_separators_footnotes_and_missing_degrees_are_read(tmp_path):
    change = {"System": "DGX-H100", "model": "LLAMA3_8B", "#-GPUs": "8", "TP": "n/a", "PP": "1", "VP": "n/a"}
    tokens = {"Tokens / sec / GPU": "13,456[^note]", "GBS": "128", "EP": "", "Precision": "BF16"}
    (row,) = rows_of(table(tmp_path, BRIDGE, change | tokens))
    assert row.measured == 13456
    assert row.plan["topology"]["dp"] == 8


def test_sizes_of_public_models():
    billions = {"llama3_8b": 8.03, "llama3_70b": 70.55, "llama3.1_405b": 405.85}
    for name, expected in billions.items():
        keys = MODELS[name].keys
        hidden, heads = keys["hidden_size"], keys["num_heads"]
        kv = keys["num_kv_heads"] * hidden // heads
        block = 2 * hidden * (hidden + kv) + 3 * hidden * keys["ffn_size"] + 2 * hidden
        total = keys["num_layers"] * block + 2 * keys["vocab_size"] * hidden + hidden
        assert total / 1e9 == pytest.approx(expected, abs=0.005)


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


def test_memory_of_a_golden_case_is_that_of_megatron_and_its_libraries(tmp_path):
    """By hand for a case with attention that keeps probabilities, on H100 and on A100."""
    case = "gpt3_mcore_te_tp1_pp4_vp1_calculate_per_token_loss"
    (h100, _), (a100, _) = (
        rows_of(goldens(tmp_path, GOLDEN | {"case": case, "machine": machine})) for machine in ("dev_h100", "dev_a100")
    )
    expected = {"attention": "unfused", "cross_entropy": "in_place"}
    assert {key: h100.plan["memory"][key] for key in expected} == expected
    assert h100.plan["cost"]["analytic"]["attention"] == "unfused"
    assert h100.plan["memory"]["overhead_gib"] == (2 * 32 + 32) / 1024
    assert a100.plan["memory"]["overhead_gib"] == (2 * 32 + 4) / 1024  # by the environment of the case
    bert = rows_of(goldens(tmp_path, GOLDEN | {"kind": "bert", "case": "bert_mcore_tp2_pp2_local_spec"}))[0]
    assert bert.plan["memory"]["overhead_gib"] == 2 * 32 / 1024
    assert bert.plan["model"]["vocab_size"] == 30720
    assert bert.notes[0].startswith("Bert's attention in both directions")


def test_experts_with_gelu_have_two_thirds_of_their_inner_size(tmp_path):
    case = "gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic_dp_last"
    step, _ = rows_of(goldens(tmp_path, GOLDEN | {"kind": "moe", "case": case}))
    assert step.plan["model"]["moe"]["ffn_size"] == 4 * 512 * 2 // 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"case": "gpt_dynamic_inference_tp2"}, "inference is no training step"),
        ({"case": "new_case"}, "the arguments of this case are not known"),
        ({"kind": "mixtral", "case": "mixtral_8x22b_tp2pp8ep8vpp1_release"}, "the number of ranks of this case"),
        ({"machine": "dev_dgx_gb900"}, "pipeproof has no data sheet"),
        ({"it": None}, "the row has no measured value"),
        ({"it": 0}, "the row has no measured value"),
    ],
)
def test_golden_cases_without_a_plan(tmp_path, change, reason):
    step, _ = rows_of(goldens(tmp_path, GOLDEN | change))
    assert step.reason.startswith(reason)


def test_names_of_machines():
    names = ["dev_dgx_h100_2nd", "lts_dgxa100_dracooci-ord", "dev_dgxh100_dgxc", "DGX-B200", "NVIDIA_H800"]
    assert [known_device(name) for name in names] == ["h100", "a100", "h100", "b200", "h800"]


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


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (MLPERF, {"median_s": "fast"}, "others.csv:2: `median_s` is `fast`; write a number greater than 0"),
        (VTRAIN, {"# layers": "2.5"}, "others.csv:2: `# layers` is `2.5`; write an integer"),
        (BRIDGE, {"Tokens / sec / GPU": "-3"}, "others.csv:2: `Tokens / sec / GPU` is `-3`"),
    ],
)
def test_a_row_that_cannot_be_read_is_left_out_with_its_line(tmp_path, name, change, message):
    (file,), unread = read_measurements([table(tmp_path, name, change, {})])
    assert len(file.rows) == 1
    assert [message in line for line in unread] == [True]


def test_a_row_with_other_cells_than_the_header_is_left_out(tmp_path):
    path = table(tmp_path, VTRAIN, {})
    path.write_text(path.read_text() + "1,2,3\n")
    (file,), (line,) = read_measurements([path])
    assert len(file.rows) == 1
    assert "others.csv:3: 3 cells, and the header has 11" in line


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOLDEN | {"it": "soon"}, "row 1: 'soon' is no positive number; write one, or null"),
        (GOLDEN | {"mem": -1}, "row 1: -1 is no positive number"),
        ({k: v for k, v in GOLDEN.items() if k != "mem"}, "row 1 has no `mem`; add it"),
    ],
)
def test_a_golden_row_that_cannot_be_read_is_left_out(tmp_path, row, message):
    (file,), (line,) = read_measurements([goldens(tmp_path, GOLDEN, row)])
    assert len(file.rows) == 2
    assert message in line


def test_one_file_that_cannot_be_read_does_not_end_the_directory(tmp_path):
    table(tmp_path, VTRAIN, {})
    (tmp_path / "cut.json").write_text('{"sizes": ')
    (file,), (line,) = read_measurements([tmp_path])
    assert (len(file.rows), "cut.json: no JSON" in line) == (1, True)
    (tmp_path / "others.csv").unlink()
    with pytest.raises(MeasurementFileError, match=r"cut\.json: no JSON"):
        read_measurements([tmp_path])


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


def test_vtrain_has_two_gpus_on_a_network_card():
    plans = [row.plan for row in rows_of(MEASUREMENTS / "vtrain_ground_truth_multi.csv")]
    assert all(plan["cost"]["network"] == {"ranks_per_nic": 2} for plan in plans)
    assert {plan.get("transport") for plan in plans if plan["topology"]["tp"] > 1} == {"partial"}
