"""Configurations of ERNIEKit: its own keys, refusals at the start, and keys that it does not have."""

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop import check_imported
from tests.interop.importing import codes, imported, judged, only, refusal

pytestmark = pytest.mark.usefixtures("known_notes")

KIT = {
    "stage": "SFT",
    "model_name_or_path": "baidu/ERNIE-4.5-21B-A3B-Base-Paddle",
    "tensor_parallel_degree": 2,
    "pipeline_parallel_degree": 4,
    "sequence_parallel": True,
    "gradient_accumulation_steps": 8,
    "pipeline_parallel_config": "enable_delay_scale_loss disable_partial_send_recv",
}
PRETRAINING = """trainer_args:
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 24
    pipeline_parallel_degree: 12
    tensor_parallel_degree: 8
    pipeline_parallel_config: best_unbalanced_scheduler
model_args:
    sequence_parallel: true
    max_seq_length: 4096
"""


def of(path, **change):
    return imported("ernie", path, {key: value for key, value in (KIT | change).items() if value is not None})


def refused(path, **change):
    lines = "".join(f"{key}: {value}\n" for key, value in (KIT | change).items() if value is not None)
    return refusal(judged, "ernie", path, lines)


def test_a_configuration_is_a_plan_with_places(tmp_path):
    text = "".join(f"{key}: {value}\n" for key, value in KIT.items())
    made = imported("ernie", tmp_path, text, world_size=16)
    plan = made.plan
    assert plan["schedule"] == {"num_micro_batches": 8, "micro_batch_size": 1, "kind": "1f1b", "framework": "paddle"}
    assert {axis: plan["topology"][axis] for axis in ("pp", "tp", "dp")} == {"pp": 4, "tp": 2, "dp": 2}
    assert plan["model"]["num_layers"] == 28
    assert made.source.locate(("topology", "pp")).line == 4
    assert codes(check_imported(made)) == []


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("baidu/ERNIE-4.5-300B-A47B-Paddle", 54),
        ("baidu/ERNIE-4.5-VL-28B-A3B-Thinking", 28),
        ("./models/ERNIE-4.5-21B-A3B-PT", 28),
    ],
)
def test_blocks_of_public_checkpoints(tmp_path, name, blocks):
    assert of(tmp_path, model_name_or_path=name).plan["model"]["num_layers"] == blocks


def test_the_micro_batch_is_batch_size(tmp_path):
    report = judged("ernie", tmp_path, KIT | {"batch_size": 3, "per_device_train_batch_size": 2})
    assert report.subject.plan.spec.schedule.micro_batch_size == 3
    assert "`per_device_train_batch_size` 2 has no effect" in only(report, "PP174").message


def test_blocks_that_do_not_divide_are_cut_uniformly(tmp_path):
    """Embedding, 28 blocks, norm and head are 31 layers; each of 8 ranks has 3 or 4 of them."""
    wide = {"pipeline_parallel_degree": 8, "gradient_accumulation_steps": 16}
    made = of(tmp_path, **wide)
    assert made.plan["stages"] == "uniform"
    report = check_imported(made)
    assert not report.errors
    assert {len(stage) for stage in report.subject.plan.stages} == {3, 4}
    assert of(tmp_path, **wide, add_tail_layers=4).plan["stages"] == "layer:TransformerLayer|EmptyLayer"
    named = of(tmp_path, **wide, pp_seg_method="layer:Ernie4_5_DecoderLayer|EmptyLayer")
    assert named.plan["stages"] == "uniform"


@pytest.mark.parametrize(
    "change", [{"stage": "VL-SFT"}, {"model_name_or_path": "baidu/ERNIE-4.5-21B-A3B-PT"}], ids=["images", "torch"]
)
def test_other_models_need_blocks_that_divide(tmp_path, change):
    made = of(tmp_path, **change, pipeline_parallel_degree=8, gradient_accumulation_steps=16)
    with pytest.raises(PlanFileError, match="28 layers, which do not divide into 8 stages"):
        check_imported(made)


@pytest.mark.parametrize(
    ("change", "message", "line"),
    [
        ({"pipeline_parallel_config": "enable_delay_scale_loss"}, "without the token `disable_partial_send_recv`", 5),
        ({"pipeline_parallel_config": None}, "partial sends would corrupt the tensors between stages", 5),
        ({"stage": "DPO"}, "without the token `enable_clear_every_step_cache`", 7),
        ({"stage": "RL"}, "ERNIEKit refuses this: `stage` RL", 1),
        ({"compute_type": "bf8"}, "ERNIEKit refuses this: `compute_type` bf8", 8),
        ({"pp_need_data_degree": 3}, "`gradient_accumulation_steps` 8 does not divide by the 3 stages", 6),
        ({"pp_need_data_degree": 5}, "`pp_need_data_degree` 5 is not from 2 to `pipeline_parallel_degree` 4", 8),
        ({"pp_need_data": True, "gradient_accumulation_steps": 6}, "by the 4 stages that load data (`pp_need_da", 6),
    ],
)
def test_what_erniekit_refuses(tmp_path, change, message, line):
    finding = refused(tmp_path, **change)
    assert finding.code == "PP171"
    assert message in finding.message
    assert finding.location.line == line


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_parallel": False, "pipeline_parallel_config": None},
        {"pipeline_parallel_degree": 1, "pipeline_parallel_config": None},
        {"stage": "VL-SFT", "pipeline_parallel_config": None},
        {"stage": "DPO", "pipeline_parallel_config": "disable_partial_send_recv enable_clear_every_step_cache"},
        {"pp_need_data_degree": 4},
        {"pp_need_data_degree": 3, "pipeline_parallel_degree": 1},
    ],
    ids=str,
)
def test_what_erniekit_accepts(tmp_path, change):
    assert not check_imported(of(tmp_path, **change)).errors


def test_values_of_the_command_line_are_judged(tmp_path):
    job = {key: value for key, value in KIT.items() if key != "pipeline_parallel_config"}
    with pytest.raises(PlanFileError, match="disable_partial_send_recv"):
        imported("ernie", tmp_path, job)
    settings = {("topology", "sequence_parallel"): False}
    assert not check_imported(imported("ernie", tmp_path, job, settings=settings)).errors


def test_sequence_parallelism_over_one_rank_is_off(tmp_path):
    report = judged("ernie", tmp_path, KIT | {"tensor_parallel_degree": 1})
    assert "there is one tensor-parallel rank" in only(report, "PP174").message
    assert not report.subject.plan.spec.topology.sequence_parallel


def test_the_pretraining_script_has_the_rules_of_its_trainer(tmp_path):
    report = judged("ernie", tmp_path, PRETRAINING)
    assert report.subject.plan.spec.schedule.micro_batch_size == 2
    assert codes(report) == ["PP175"]  # the script turns partial sends off
