"""Plans from the configuration that another tool has in its own process."""

from argparse import Namespace
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop import Flags, check_imported, from_arguments, import_files

MEGATRON = {
    "world_size": 16, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "num_layers": 16,
    "hidden_size": 256, "num_attention_heads": 8, "seq_length": 128, "micro_batch_size": 1, "global_batch_size": 32,
    "sequence_parallel": True, "bf16": True, "overlap_p2p_comm": True, "fp16": False, "num_experts": None,
}  # fmt: skip


@dataclass
class Model:
    """As providers of Megatron-Bridge: fields with defaults, and attributes that a recipe changes."""

    num_layers: int = 16
    hidden_size: int = 256
    num_attention_heads: int = 8
    tensor_model_parallel_size: int = 2
    pipeline_model_parallel_size: int = 4
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_layout: object = None
    sequence_parallel: bool = True
    moe_layer_freq: int = 1
    activation_func: object = len


@dataclass
class Container:
    model: Model = field(default_factory=Model)
    train: object = field(default_factory=lambda: SimpleNamespace(global_batch_size=32, micro_batch_size=1))
    ddp: object = field(default_factory=lambda: SimpleNamespace(use_distributed_optimizer=True, bucket_size=None))
    dataset: object = field(default_factory=lambda: SimpleNamespace(seq_length=128))
    comm_overlap: object = None
    mixed_precision: object = "bf16_mixed"


def test_the_namespace_of_megatron_and_a_dict_are_one_plan():
    made = from_arguments(MEGATRON)
    assert made.plan == from_arguments(Namespace(**MEGATRON)).plan
    assert made.plan["topology"] == {"tp": 2, "pp": 4, "sequence_parallel": True, "dp": 2}
    assert made.plan["schedule"]["num_micro_batches"] == 32 // 2
    assert made.plan["run"]["dtype"] == "bfloat16"
    assert not check_imported(made).errors


def test_what_megatron_refuses_is_refused():
    with pytest.raises(PlanFileError, match="14 layers do not divide") as caught:
        from_arguments({**MEGATRON, "num_layers": 14})
    assert caught.value.findings[0].code == "PP171"


def test_a_container_of_megatron_bridge():
    made = from_arguments(Container(), "megatron-bridge", Flags(world_size=16))
    assert made.plan["topology"] == {"tp": 2, "pp": 4, "sequence_parallel": True, "dp": 2}
    assert (made.plan["model"]["num_layers"], made.plan["model"]["seq_length"]) == (16, 128)
    assert made.plan["memory"]["shard_optimizer"] == "dp"
    assert made.plan["schedule"]["num_micro_batches"] == 16
    assert "moe" not in made.plan["model"]


def test_lists_of_layers_are_a_layout():
    rows = [["embedding", "decoder"], *[["decoder"] * 2] * 2, ["decoder", "loss"]]
    config = Container(Model(num_layers=6, pipeline_model_parallel_layout=rows))
    made = from_arguments(config, "megatron-bridge", Flags(world_size=8))
    assert [sum(name.startswith("layer.") for name in stage) for stage in made.plan["stages"]] == [1, 2, 2, 1]


def test_a_layout_that_is_no_plain_value_is_refused():
    config = Container(Model(pipeline_model_parallel_layout=object()))
    with pytest.raises(PlanFileError, match="no plain value"):
        from_arguments(config, "megatron-bridge", Flags(world_size=8))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [({}, "megatron", "have no pipeline_model_parallel_size"), ({}, "megatron-bridge", "has no `model`"),
     ({}, "torchtitan", "has no `parallelism`"), ({}, "fleet", "`fleet` has no arguments to read")],
)  # fmt: skip
def test_other_arguments_are_refused(arguments, kind, message):
    with pytest.raises(PlanFileError, match=message) as caught:
        from_arguments(arguments, kind)
    assert caught.value.findings[0].code == "PP170"


def test_a_configuration_of_torchtitan():
    config = SimpleNamespace(
        parallelism={"pipeline_parallel_degree": 4, "tensor_parallel_degree": 2, "num_pp_microbatches": 8},
        training={"num_tokens_per_microbatch_per_dp_rank": 2 * 4096, "max_context_length": 4096},
        model_spec=SimpleNamespace(name="llama3", model=SimpleNamespace(layers=[None] * 32)),
        activation_checkpoint={"mode": "full"},
    )
    made = from_arguments(config, "torchtitan", Flags(world_size=16))
    assert (made.plan["topology"]["pp"], made.plan["topology"]["dp"]) == (4, 2)
    assert made.plan["schedule"]["num_micro_batches"] == 8
    assert (made.plan["model"]["num_layers"], made.plan["memory"]["recompute"]) == (32, "full")
    assert [sum(name.startswith("layer.") for name in stage) for stage in made.plan["stages"]] == [8, 9, 8, 7]


@pytest.mark.needs_torch
def test_the_classes_of_torchtitan_are_read():
    configs = pytest.importorskip("torchtitan.config.configs")
    config = SimpleNamespace(
        parallelism=configs.ParallelismConfig(pipeline_parallel_degree=2), training=configs.TrainingConfig(),
        model_spec=None, activation_checkpoint=None,
    )  # fmt: skip
    topology = from_arguments(config, "torchtitan", Flags(world_size=4)).plan["topology"]
    assert (topology["pp"], topology["tp"], topology["dp"]) == (2, 1, 2)


def test_a_python_file_is_refused_with_the_way(tmp_path):
    file = tmp_path / "recipe.py"
    file.write_text("raise SystemExit('run')\n")
    for kind in ("megatron", "torchtitan"):
        with pytest.raises(PlanFileError, match=r"pipeproof\.interop\.from_arguments") as caught:
            import_files(kind, [file], Flags())
        assert caught.value.findings[0].code == "PP170"
