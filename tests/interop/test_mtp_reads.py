"""Inputs of imported modules of multi-token prediction, and the position of the last norm, for each tool."""

import pytest

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.layer import layer_order
from pipeproof.stages.describe.model_family import stage_layers
from tests.interop.importing import imported
from tests.interop.megatron.test_argument_block import COMMON, DEFAULTS, block
from tests.interop.test_doors import TORCHRUN
from tests.interop.test_launchers import ACTOR, verl

AFTER, BEFORE = ["norm", "mtp.0", "head"], ["mtp.0", "norm", "head"]
FORMERS = {"num_hidden_layers": 4, "num_nextn_predict_layers": 1}


def end(made):
    """Inputs of modules, and the layers after the blocks."""
    model = plan_from_dict(made.plan).spec.gpt
    assert model.mtp.num_modules == 1
    return model.mtp.reads, [name for name in layer_order(model) if not name.startswith(("embed", "layer"))]


def test_megatrons_modules_read_after_the_norm(tmp_path):
    script = imported("megatron", tmp_path, f"{TORCHRUN}--mtp-num-layers 1\n", name="train.sh")
    log = block({**DEFAULTS, **COMMON, "mtp_num_layers": 1, "world_size": 8})
    for made in (script, imported("megatron", tmp_path, log, name="train.log")):
        assert end(made) == ("after_norm", AFTER)
    assert not any(one.key == ("model", "mtp", "reads") for one in script.assumptions)


def test_so_do_those_of_verl(tmp_path):
    added = f"    +{ACTOR}override_transformer_config.mtp_num_layers=1 \\\n"
    assert end(verl(tmp_path, more=added)) == ("after_norm", AFTER)


def test_those_of_mindspeed_are_assumed_to_read_before_it(tmp_path):
    made = imported("megatron", tmp_path, f"{TORCHRUN}--use-fused-rmsnorm --mtp-num-layers 1\n", name="train.sh")
    assert end(made) == ("before_norm", BEFORE)
    (assumption,) = (one for one in made.assumptions if one.key[-1] == "reads")
    assert "with MindSpeed alone they read after the norm" in assumption.why


@pytest.mark.parametrize(
    ("flags", "settings", "stages"),
    [
        ("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3", {},
         ["layer.0", "layer.2", "layer.4", "layer.7 norm mtp.0 head"]),
        ("--pipeline-model-parallel-layout 'Et*4|t*3|tm|L'", {}, ["layer.3", "layer.6", "norm mtp.0", "head"]),
        ("--pipeline-model-parallel-layout 'Et*4|t*4|m|L'", {}, ["layer.3", "norm", "mtp.0", "head"]),
        ("--pipeline-model-parallel-layout 'Et*4|t*4|m|L'", {("model", "mtp", "reads"): "before_norm"},
         ["layer.3", "layer.7", "mtp.0", "norm head"]),
        ("--account-for-loss-in-pipeline-split --num-layers 3", {}, ["layer.0", "layer.1", "norm", "mtp.0 head"]),
    ],
)  # fmt: skip
def test_the_norm_is_with_the_last_block(tmp_path, flags, settings, stages):
    text = f"{TORCHRUN}--mtp-num-layers 1 {flags}\n"
    plan = imported("megatron", tmp_path, text, name="train.sh", settings=settings).plan
    layers = [list(names) for names in stage_layers(plan_from_dict(plan).spec)]
    assert layers == plan["stages"]
    assert all(" ".join(names).endswith(expected) for names, expected in zip(layers, stages, strict=True))


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({}, ("after_norm", AFTER)),
        ({"num_empty_layers_add_in_tail": 1}, ("after_norm", ["norm", "mtp.0", "empty.0", "head"])),
        ({"stage": "SFT"}, ("after_norm", AFTER)),
        ({"stage": "dsv3_pretrain"}, ("before_norm", BEFORE)),
        ({"gpt_model_use_experimental_version": True}, ("before_norm", BEFORE)),
        ({"num_nextn_predict_layers": None, "multi_token_pred_depth": 1}, ("before_norm", BEFORE)),
        ({"pipeline_parallel_config": "enable_delay_scale_loss"}, ("before_norm", BEFORE)),
    ],
)
def test_a_model_of_paddlefleet_has_the_norm_before_modules_and_earlier_ones_behind(tmp_path, job, expected):
    assert end(imported("paddleformers", tmp_path, {**FORMERS, **job})) == expected
