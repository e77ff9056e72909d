"""Plans from the arguments that Megatron-LM prints at its start, and from the YAML of its functional tests."""

import pytest

from pipeproof.cli.file_kinds import kind_of
from pipeproof.diagnostics.source import PlanFileError
from tests.interop.importing import imported

COMMON = {
    "num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 128, "vocab_size": 1000,
    "micro_batch_size": 1, "global_batch_size": 16, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2,
    "normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "clip_grad": 0.5,
}  # fmt: skip
DEFAULTS = {
    "add_position_embedding": True, "bias_gelu_fusion": True, "num_experts": None, "moe_layer_freq": 1,
    "untie_embeddings_and_output_weights": False, "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None, "context_parallel_size": 1, "pipeline_model_parallel_layout": None,
    "attention_backend": "AttnBackend.auto", "params_dtype": "torch.bfloat16", "recompute_modules": ["core_attn"],
    "num_distributed_optimizer_instances": 1, "sequence_parallel": False, "expert_tensor_parallel_size": 2,
    "some_parallel_flag_of_a_later_version": 3, "data_args_path": "", "mtp_num_layers": None, "bf16": True,
    "fp16": False, "step_batch_size_schedule": None,
}  # fmt: skip
EXPERTS = (
    "--num-experts 4 --moe-layer-freq '([0]+[1]*7)' --moe-ffn-hidden-size 64 --ffn-hidden-size 512 "
    "--expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01 --sequence-parallel"
)


def block(arguments, prefix=""):
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(arguments.items())]
    rows = ["-" * 24 + " arguments " + "-" * 24, *lines, "-" * 20 + " end of arguments " + "-" * 21]
    return "".join(f"{prefix}{row}\n" for row in rows)


def megatron(path, text, name="train.log", **flags):
    return imported("megatron", path, text, name=name, **flags)


def script(arguments, more=""):
    flags = " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in arguments.items()
    )
    return f"torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --bf16 --context-parallel-size 1 {flags} {more}\n"


@pytest.mark.parametrize(
    ("resolved", "flags"),
    [
        ({"add_bias_linear": False, "overlap_p2p_comm": False}, "--disable-bias-linear"),
        (
            {"virtual_pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
            "--num-layers-per-virtual-pipeline-stage 2",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|tt|t|tttL"},
            "--pipeline-model-parallel-layout 'Ett|tt|t|tttL'",
        ),
        (
            {"num_experts": 4, "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1], "moe_router_topk": 2, "ffn_hidden_size": 512,
             "moe_ffn_hidden_size": 64, "expert_model_parallel_size": 2, "moe_aux_loss_coeff": [0.01],
             "sequence_parallel": True},
            EXPERTS,
        ),
        ({"sequence_parallel": True, "variable_seq_lengths": True}, "--sequence-parallel --variable-seq-lengths"),
        ({"attention_backend": "AttnBackend.unfused"}, "--attention-backend unfused"),
    ],
    ids=["plain", "chunks", "layout", "experts", "sequence", "attention"],
)  # fmt: skip
def test_the_resolved_arguments_are_the_plan_of_the_flags(tmp_path, resolved, flags):
    from_block = megatron(
        tmp_path, "start\n" + block({**DEFAULTS, **COMMON, **resolved, "world_size": 8}, "[default0]:")
    )
    from_script = megatron(tmp_path, script(COMMON, flags), "train.sh")
    assert from_block.plan == from_script.plan
    assert not any("parallel_flag" in setting.name for setting in from_block.ignored)


def test_places_are_those_of_the_last_block(tmp_path):
    first, second = {**COMMON, "num_layers": 4}, {**DEFAULTS, **COMMON, "world_size": 4}
    text = block(first) + "restarted\n" + block(second)
    made = megatron(tmp_path, text)
    number = made.source.locate(("model", "num_layers")).line
    assert number > len(first) + 3
    assert text.splitlines()[number - 1].split() == ["num_layers", "." * 38, "8"]
    kind = kind_of(tmp_path / "train.log")
    assert kind is not None
    assert "arguments of Megatron-LM" in kind.noun


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        (block(COMMON).rpartition("---- end")[0].rpartition("\n")[0], "has no end", 1),
        (block(COMMON).replace("  swiglu ..", "  swiglu two words ..", 1), "is not an argument with a value", 12),
        (block({"num_layers": 8}), "have no pipeline_model_parallel_size", 1),
    ],
)
def test_a_damaged_block_is_refused(tmp_path, text, message, line):
    with pytest.raises(PlanFileError, match=message) as caught:
        megatron(tmp_path, text)
    assert caught.value.findings[0].location.line == line


def test_the_yaml_of_a_functional_test(tmp_path):
    rows = {**{f"--{name.replace('_', '-')}": value for name, value in COMMON.items()}, "--bf16": True,
            "--disable-bias-linear": True, "--recompute-modules": '"[layernorm mlp]"', "--save": '""'}  # fmt: skip
    text = "ENV_VARS:\n  A: 1\nMODEL_ARGS:\n" + "".join(
        f"  {flag}: {str(value).lower() if value is True else value}\n" for flag, value in rows.items()
    )
    rows = "--context-parallel-size: 1"
    made = megatron(tmp_path, f"{text}  {rows}\n", "model_config.yaml", world_size=8)
    expected = megatron(tmp_path, script(COMMON, "--disable-bias-linear"), "train.sh")
    assert made.plan == expected.plan
    assert text.splitlines()[made.source.locate(("model", "num_layers")).line - 1] == "  --num-layers: 8"
    with pytest.raises(PlanFileError, match="must be a mapping of flags"):
        megatron(tmp_path, "MODEL_ARGS:\n  - --num-layers\n")
    twice = megatron(tmp_path, f"{text}  {rows}\n  --num-layers: 8\n", "model_config.yaml", world_size=8)
    assert twice.plan == made.plan
    with pytest.raises(PlanFileError, match="`--num-layers` is repeated"):
        megatron(tmp_path, f"{text}  --num-layers: 9\n", "model_config.yaml")
