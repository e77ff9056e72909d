"""Recipes of trainers on torch.distributed.pipelining: Automodel's YAML."""

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop import Flags, check_imported, import_files
from tests.interop.importing import refusal

AUTOMODEL = """step_scheduler:
  global_batch_size: 64
  local_batch_size: {batch}
distributed:
  strategy: fsdp2
  tp_size: 2
  pp_size: {pp}
{more}  pipeline:
    pp_schedule: {schedule}
    pp_microbatch_size: 1
{pipeline}model:
  pretrained_model_name_or_path: {model}
"""


def automodel(path, *, pp=4, schedule="1f1b", model="Qwen/Qwen3-32B", batch=8, more="", pipeline="", **flags):
    file = path / "recipe.yaml"
    text = AUTOMODEL.format(pp=pp, schedule=schedule, model=model, batch=batch, more=more, pipeline=pipeline)
    file.write_text(text, encoding="utf-8")
    return import_files("automodel", [file], Flags(**flags))


def blocks(made):
    return [sum(name.startswith("layer.") for name in stage) for stage in made.plan["stages"]]


def test_a_recipe_of_automodel_is_a_plan_with_places(tmp_path):
    made = automodel(tmp_path, world_size=16)
    topology = made.plan["topology"]
    assert (topology["pp"], topology["tp"], topology["dp"]) == (4, 2, 2)
    assert made.plan["schedule"] == {
        "kind": "1f1b",
        "micro_batch_size": 1,
        "num_micro_batches": 8,
        "framework": "torch",
    }
    assert blocks(made) == [16, 16, 16, 16]
    assert made.source.locate(("topology", "pp")).line == 7
    assert not check_imported(made).errors


@pytest.mark.parametrize(
    ("model", "pipeline", "expected"),
    [
        ("Qwen/Qwen3-235B-A22B", "", [12, 12, 12, 12, 12, 12, 11, 11]),  # 94 blocks, two stages on each of 4 ranks
        ("Qwen/Qwen3-235B-A22B", "layers_per_stage: 8", [8] * 10 + [7] * 2),
        ("Qwen/Qwen3-32B", "layers_per_stage: 5, round_virtual_stages_to_pp_multiple: up", [4] * 16),
        ("Qwen/Qwen3-32B", "layers_per_stage: 5, round_virtual_stages_to_pp_multiple: down", [6] * 4 + [5] * 8),
    ],
)
def test_automodels_own_cut(tmp_path, model, pipeline, expected):
    more = "".join(f"    {key}\n" for key in pipeline.split(", ") if key)
    made = automodel(tmp_path, model=model, schedule="interleaved1f1b", pipeline=more)
    assert blocks(made) == expected
    assert made.plan["schedule"]["num_chunks"] == len(expected) // 4
    assert not check_imported(made).errors


@pytest.mark.parametrize(
    ("options", "message", "line"),
    [
        ({"batch": 3}, "local_batch_size 3 of pp_microbatch_size 1 is less than a micro-batch for each of 4 ranks", 3),
        ({"batch": 5}, "global_batch_size 64 does not divide by local_batch_size 5", 2),
        ({"pipeline": "    layers_per_stage: 5\n"}, "layers_per_stage 5 makes 13 stages", 11),
        ({"pipeline": "    layers_per_stage: 8\n"}, "8 stages on 4 ranks with `1f1b`", 11),
        ({"pipeline": "    layers_per_stage: 16\n", "schedule": "interleaved1f1b"}, "4 stages on 4 ranks with", 11),
        ({"pipeline": "    layers_per_stage: 4\n", "schedule": "ZBVZeroBubble"}, "4 stages on each rank", 9),
        ({"pipeline": "    layer_per_stage: 16\n"}, "`pipeline` has no key `layer_per_stage`", 11),
        ({"pipeline": "    new_key: 16\n"}, "`pipeline` has no key `new_key`", 11),
        ({"schedule": "1f2b"}, "`1f2b` is no schedule of PyTorch", 9),
        ({"more": "  ep_size: 3\n", "world_size": 8}, "2 ranks of a stage do not divide by ep_size 3", 8),
        ({"more": "  dp_size: 2\n", "world_size": 8}, "8 processes are not dp x tp x cp x pp = 16", 8),
        ({"more": "  dp_size: 4\n  dp_replicate_size: 4\n"}, "dp_replicate_size 4 is no proper divisor", 9),
        ({"world_size": 12}, "12 processes do not divide by tp x cp x pp = 8", 7),
    ],
)
def test_what_automodel_refuses(tmp_path, options, message, line):
    finding = refusal(automodel, tmp_path, **options)
    assert finding.code == "PP171"
    assert message in finding.message
    assert finding.location.line == line


@pytest.mark.parametrize("strategy", ["ddp", "megatron_fsdp"])
def test_automodels_other_strategies_have_no_pipeline(tmp_path, strategy):
    text = AUTOMODEL.format(pp=4, schedule="1f1b", model="m", batch=8, more="", pipeline="")
    (tmp_path / "a.yaml").write_text(text.replace("fsdp2", strategy), encoding="utf-8")
    with pytest.raises(PlanFileError, match=f"`strategy: {strategy}` with pp_size 4"):
        import_files("automodel", [tmp_path / "a.yaml"], Flags())


def test_what_cannot_be_judged_of_automodel(tmp_path):
    near = refusal(automodel, tmp_path, more="  pp_sizes: 2\n")
    assert (near.code, near.help) == ("PP170", "did you mean `pp_size`?")
    unknown = refusal(automodel, tmp_path, model="someone/own-model")
    assert "the number of blocks of `someone/own-model` is not in the file" in unknown.message
    assert blocks(automodel(tmp_path, model="someone/own", settings={("model", "num_layers"): 9})) == [3, 2, 2, 2]
    assert "Automodel places its stages in a loop" in refusal(automodel, tmp_path, schedule="DualPipeV").message
    shared = refusal(automodel, tmp_path, more="  ep_size: 2\n", world_size=8)
    assert "expert parallelism over 2 of 1 data-parallel ranks cannot be described" in shared.message
    (tmp_path / "other.yaml").write_text("a: 1\n", encoding="utf-8")
    with pytest.raises(PlanFileError, match="`distributed`, which has the degrees"):
        import_files("automodel", [tmp_path / "other.yaml"], Flags())


def test_a_pipeline_of_automodel_needs_its_section(tmp_path):
    text = "distributed: {pp_size: 2}\nmodel: {pretrained_model_name_or_path: Qwen/Qwen3-8B}\n"
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(PlanFileError, match=r"pp_size 2 without `distributed\.pipeline`"):
        import_files("automodel", [tmp_path / "a.yaml"], Flags())
    (tmp_path / "a.yaml").write_text(text.replace("pp_size: 2", "pp_size: 1"), encoding="utf-8")
    assert import_files("automodel", [tmp_path / "a.yaml"], Flags()).plan["topology"]["pp"] == 1


def test_named_modules_of_automodel(tmp_path):
    parts = (
        "    module_fqns_per_model_part: [[model.embed_tokens, model.layers.0, model.rotary_emb], [model.layers.1, "
        "model.norm, lm_head]]\n"
    )
    made = automodel(tmp_path, pp=2, pipeline=parts, settings={("model", "num_layers"): 2})
    assert made.plan["stages"] == [["embed", "layer.0"], ["layer.1", "norm", "head"]]
    finding = refusal(automodel, tmp_path, pp=2, pipeline=parts.replace("model.norm", "model.vision"))
    assert "`vision` is none of" in finding.message


def test_experts_and_shards_of_automodel(tmp_path):
    made = automodel(tmp_path, more="  ep_size: 4\n", world_size=64)
    assert (made.plan["topology"]["ep"], made.plan["topology"]["dp"]) == (4, 2)
    assert made.plan["memory"]["shard_optimizer"] == "dp"
    replicated = automodel(tmp_path, more="  dp_replicate_size: 2\n", world_size=32)
    assert "memory" not in replicated.plan
    teacher = automodel(tmp_path, pipeline="teacher_distributed: {pp_size: 2}\n")
    assert any("the teacher's pipeline is not checked" in one.why for one in teacher.ignored)
