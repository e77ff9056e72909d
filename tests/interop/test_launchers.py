"""Plans from files of NeMo-RL, verl and ms-swift, which start trainings on Megatron-Core."""

from pathlib import Path

import pytest

from pipeproof.cli.file_kinds import kind_of
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop import Flags, check_imported, import_files
from pipeproof.interop.importers.names import depth_of, names_of
from tests.interop.importing import refusal

NEMO = """policy:
  model_name: {model}
  train_global_batch_size: 64
  train_micro_batch_size: 2
  max_total_sequence_length: 1024
  precision: bfloat16
  megatron_cfg:
    enabled: true
    activation_checkpointing: false
    tensor_model_parallel_size: 2
    sequence_parallel: true
    pipeline_model_parallel_size: {pp}
    expert_tensor_parallel_size: 1
    expert_model_parallel_size: 1
{more}
cluster:
  gpus_per_node: 8
  num_nodes: {nodes}
"""
VERL = """#!/bin/bash
PP=4
python3 -m verl.trainer.main_ppo \\
    actor_rollout_ref.model.path="${{HOME}}/models/{model}" \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP \\
{more}    trainer.n_gpus_per_node=8 trainer.nnodes=2
"""
SWIFT = """NPROC_PER_NODE=8 NNODES=2 \\
megatron {start} \\
    --model {model} \\
    --tensor_model_parallel_size 2 \\
    --pipeline_model_parallel_size 4 \\
{more}    --micro_batch_size 1 \\
    --global_batch_size 32 --max_length 512
"""


def imported(path, kind, text, name, **flags):
    file = path / name
    file.write_text(text, encoding="utf-8")
    return import_files(kind, [file], Flags(**flags))


def nemo(path, *, model="Qwen/Qwen3-32B", pp=4, nodes=2, more="", text=None, **flags):
    written = NEMO.format(model=model, pp=pp, nodes=nodes, more=more) if text is None else text
    return imported(path, "nemo-rl", written, "grpo.yaml", **flags)


def verl(path, *, model="Qwen2.5-32B", more="", **flags):
    return imported(path, "verl", VERL.format(model=model, more=more), "run.sh", **flags)


def swift(path, *, model="Qwen/Qwen3-8B", start="sft", more="", **flags):
    return imported(path, "ms-swift", SWIFT.format(model=model, start=start, more=more), "run.sh", **flags)


ACTOR = "actor_rollout_ref.actor.megatron."
READERS = {"nemo-rl": nemo, "verl": verl, "ms-swift": swift}


def notes(made):
    return " / ".join(f"{setting.name}: {setting.why}" for setting in made.ignored)


def blocks(made):
    return [sum(name.startswith("layer.") for name in stage) for stage in made.plan["stages"]]


@pytest.mark.parametrize(
    ("kind", "expected", "micro_batches", "line"),
    [
        ("nemo-rl", (4, 2, 2), 64 // 2 // 2, 12),
        ("verl", (4, 2, 2), 32 * 4 // 2 // 2, 9),
        ("ms-swift", (4, 2, 2), 32 // 2, 5),
    ],
)  # fmt: skip
def test_a_file_is_a_plan_with_places(tmp_path, kind, expected, micro_batches, line):
    made = READERS[kind](tmp_path)
    topology = made.plan["topology"]
    assert (topology["pp"], topology["tp"], topology["dp"]) == expected
    assert made.plan["schedule"]["num_micro_batches"] == micro_batches
    assert made.plan["model"]["num_layers"] == {"nemo-rl": 64, "verl": 64, "ms-swift": 36}[kind]
    assert made.source.locate(("topology", "pp")).line == line
    assert not check_imported(made).errors


@pytest.mark.parametrize(
    ("kind", "more", "suggestion"),
    [
        ("nemo-rl", "    pipeline_model_paralel_size: 2", "pipeline_model_parallel_size"),
        ("nemo-rl", "    num_layer_in_first_pipeline_stage: 2", "num_layers_in_first_pipeline_stage"),
        ("nemo-rl", "    model_overrides: {num_layer: 2}", "num_layers"),
        ("verl", "    actor_rollout_ref.actor.megatron.virtual_pipeline_model_paralel_size=2 \\\n",
         "virtual_pipeline_model_parallel_size"),
        ("verl", f"    +{ACTOR}override_transformer_config.num_layers_in_first_pipeline_stages=2 \\\n",
         "num_layers_in_first_pipeline_stage"),
        ("ms-swift", "    --decoder_first_pipeline_num_layer 3 \\\n", "decoder_first_pipeline_num_layers"),
        ("ms-swift", "    --context-parallel_siz 2 \\\n", "context_parallel_size"),
    ],
)  # fmt: skip
def test_a_near_miss_is_refused_with_the_key(tmp_path, kind, more, suggestion):
    finding = refusal(READERS[kind], tmp_path, more=more)
    assert finding.code == "PP170"
    assert finding.help == f"did you mean `{suggestion}`?"
    assert finding.location.line > 1


@pytest.mark.parametrize("kind", READERS)
def test_an_unknown_model_needs_its_number_of_blocks(tmp_path, kind):
    finding = refusal(READERS[kind], tmp_path, model="someone/own-model")
    assert "the number of blocks of" in finding.message
    assert "--set model.num_layers=N" in finding.help
    assert "--model-config FILE" in finding.help
    made = READERS[kind](tmp_path, model="someone/own-model", settings={("model", "num_layers"): 24})
    assert made.plan["model"]["num_layers"] == 24
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 28}', encoding="utf-8")
    assert READERS[kind](tmp_path, model="someone/own-model", model_config=config).plan["model"]["num_layers"] == 28


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("nemo-rl", "    new_switch: 3\n    moe_new_switch: 4"),
        ("verl", f"    {ACTOR}new_switch=3 {ACTOR}moe_new_switch=4 \\\n"),
        ("ms-swift", "    --new_switch 3 --moe_new_switch 4 \\\n"),
    ],
)  # fmt: skip
def test_unknown_keys_leave_the_verdict_open(tmp_path, kind, more):
    report = check_imported(READERS[kind](tmp_path, more=more))
    assert report.verdict == "undecided"
    assert [message.split("`")[1].rpartition(".")[2] for message in report.undecided] == [
        "new_switch",
        "moe_new_switch",
    ]
    assert all("is in no list of the arguments of Megatron-LM (2.0 to" in message for message in report.undecided)


def test_blocks_that_do_not_divide(tmp_path):
    finding = refusal(nemo, tmp_path, model="Qwen/Qwen3-235B-A22B", pp=4)
    assert finding.code == "PP171"
    assert "94 layers do not divide by --pipeline-model-parallel-size 4" in finding.message
    assert finding.location.line == 12
    ends = "    num_layers_in_first_pipeline_stage: 23\n    num_layers_in_last_pipeline_stage: 23"
    assert blocks(nemo(tmp_path, model="Qwen/Qwen3-235B-A22B", pp=4, more=ends)) == [23, 24, 24, 23]


def test_nodes_that_generate_do_not_train(tmp_path):
    generation = "  generation:\n    colocated: {{enabled: {}, resources: {{num_nodes: {}, gpus_per_node: 8}}}}"
    assert nemo(tmp_path, nodes=4, more=generation.format("true", 2)).plan["topology"]["dp"] == 4
    assert nemo(tmp_path, nodes=4, more=generation.format("false", 2)).plan["topology"]["dp"] == 2
    finding = refusal(nemo, tmp_path, nodes=2, more=generation.format("false", 2))
    assert "no process is left for training: 0 nodes" in finding.message
    assert (
        "12 processes do not divide"
        in refusal(
            nemo,
            tmp_path,
            nodes=1,
            pp=4,
            more="",
            text=NEMO.format(model="Qwen/Qwen3-32B", pp=4, nodes=1, more="").replace(
                "gpus_per_node: 8", "gpus_per_node: 12"
            ),
        ).message
    )
    one_node = "  generation:\n    colocated: {enabled: false, resources: {num_nodes: null, gpus_per_node: 4}}"
    assert nemo(tmp_path, nodes=1, pp=2, more=one_node).plan["topology"]["dp"] == 1


def test_teachers_and_reward_models_do_not_train(tmp_path):
    teachers = (
        "on_policy_distillation:\n  teacher_model_by_agent_name: {a: m/1, b: m/2, c: m/2}\n"
        "  non_colocated_teachers:\n    enabled: true\n    default_teacher_cfg: {num_nodes: 1}\n"
        "    teacher_overrides: {c: {num_nodes: 2}}"
    )
    assert nemo(tmp_path, nodes=7, more=teachers).plan["topology"]["dp"] == 4
    reward = "data: {env_name: reward_model}\nenv: {reward_model: {resources: {num_nodes: 3, gpus_per_node: 8}}}"
    assert nemo(tmp_path, nodes=7, more=reward).plan["topology"]["dp"] == 4


def test_bases_and_interpolations(tmp_path):
    base = "policy:\n  megatron_cfg:\n    context_parallel_size: ${mul:${cluster.num_nodes}, 2}\n"
    (tmp_path / "base.yaml").write_text(base, encoding="utf-8")
    text = "defaults: base.yaml\n" + NEMO.format(model="Qwen/Qwen3-32B", pp="${add:1,1}", nodes=2, more="")
    made = nemo(tmp_path, text=text)
    assert (made.plan["topology"]["pp"], made.plan["topology"]["cp"]) == (2, 4)
    assert made.source.locate(("topology", "cp")).file.endswith("base.yaml")
    replaced = text.replace("  megatron_cfg:\n", "  megatron_cfg:\n    _override_: true\n")
    assert nemo(tmp_path, text=replaced).plan["topology"].get("cp", 1) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: missing.yaml\n", "the base file missing.yaml is no file below"),
        ("defaults: grpo.yaml\n", "leads back to this file"),
        ("policy: {model_name: a}\n", "`policy.megatron_cfg`, by which NeMo-RL is known, is not here"),
        ("policy: {megatron_cfg: {enabled: false}}\n", "the policy trains without a pipeline"),
        (
            NEMO.format(model="Qwen/Qwen3-8B", pp="${oc.env:PP}", nodes=1, more=""),
            "`${oc.env:PP}`, which only a run determines",
        ),
        ("- a\n", "a mapping of keys is expected"),
    ],
)
def test_other_yaml_is_refused(tmp_path, text, message):
    assert message in refusal(nemo, tmp_path, text=text).message


def test_recomputation_follows_its_switch(tmp_path):
    assert "recompute" not in nemo(tmp_path, more="    recompute_granularity: full").plan.get("memory", {})
    switched = NEMO.format(model="Qwen/Qwen3-32B", pp=4, nodes=2, more="").replace(
        "activation_checkpointing: false", "activation_checkpointing: true"
    )
    assert nemo(tmp_path, text=switched).plan["memory"]["recompute"] == "full"
    modules = switched.replace(
        "activation_checkpointing: true",
        "activation_checkpointing: true\n    recompute_granularity: selective\n    recompute_modules: [layernorm, mlp]",
    )
    assert nemo(tmp_path, text=modules).plan["memory"]["recompute_modules"] == ["layernorm", "mlp"]


def test_packed_sequences_leave_the_number_of_micro_batches_open(tmp_path):
    made = nemo(tmp_path, more="  sequence_packing: {enabled: true}")
    (assumption,) = [one for one in made.assumptions if one.key == ("schedule", "num_micro_batches")]
    assert "depend on the data" in assumption.why
    made = verl(tmp_path, more="    actor_rollout_ref.actor.use_dynamic_bsz=True \\\n")
    assert any(one.key == ("schedule", "num_micro_batches") for one in made.assumptions)


def test_other_models_of_a_training_are_noted(tmp_path):
    other = "value:\n  megatron_cfg: {enabled: true, pipeline_model_parallel_size: 2}"
    assert "the pipeline of `value` (2 ranks) is not checked" in notes(nemo(tmp_path, more=other))
    other = "    critic.megatron.pipeline_model_parallel_size=2 \\\n"
    assert "the pipeline of `critic.megatron` is not checked" in notes(verl(tmp_path, more=other))


def test_chunks_and_shapes_of_verl(tmp_path):
    made = verl(tmp_path, more="    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2 \\\n")
    assert made.plan["schedule"]["num_chunks"] == 2
    assert made.plan["transport"] == {"connections": "per_pair", "shape_exchange": "per_message"}
    assert made.plan["topology"]["sequence_parallel"] is True
    assert "is taken for the public checkpoint of that name: 64 blocks" in notes(made)
    null = "    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null \\\n"
    assert "num_chunks" not in verl(tmp_path, more=null).plan["schedule"]
    unknown = "    actor_rollout_ref.actor.megatron.context_parallel_size=$CONTEXT \\\n"
    assert "`$CONTEXT`, which the script does not set" in refusal(verl, tmp_path, more=unknown).message


def test_supervised_fine_tuning_of_verl(tmp_path):
    text = (
        "torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=Qwen/Qwen3-8B \\\n"
        "  data.train_batch_size=64 data.micro_batch_size_per_gpu=4 data.max_length=2048 \\\n"
        "  engine.tensor_model_parallel_size=2 engine.pipeline_model_parallel_size=2\n"
    )
    made = imported(tmp_path, "verl", text, "sft.sh")
    assert made.plan["topology"]["dp"] == 2
    assert made.plan["schedule"]["num_micro_batches"] == 64 // 2 // 4
    assert made.plan["model"]["seq_length"] == 2048
    with pytest.raises(PlanFileError, match="no command here starts a training of verl with Megatron-Core"):
        imported(tmp_path, "verl", "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.fsdp=1\n", "fsdp.sh")


def test_uneven_ends_and_starts_of_ms_swift(tmp_path):
    made = swift(tmp_path, more="    --decoder_first_pipeline_num_layers 6 \\\n", start="rlhf")
    assert blocks(made) == [6, 10, 10, 10]
    assert made.plan["memory"]["recompute"] == "selective"
    none = swift(
        tmp_path, more="    --recompute_granularity none --padding_free false --use_distributed_optimizer false \\\n"
    )
    assert "recompute" not in none.plan["memory"]
    assert "shard_optimizer" not in none.plan["memory"]
    assert "shape_exchange" not in none.plan["transport"]
    assert made.plan["transport"]["shape_exchange"] == "per_message"
    assert made.plan["memory"]["shard_optimizer"] == "dp"
    message = refusal(swift, tmp_path, start="export").message
    assert "no command here starts a training of ms-swift" in message


def test_yaml_of_ms_swift(tmp_path):
    text = (
        "model: Qwen/Qwen3-8B\nmicro_batch_size: 2\nglobal_batch_size: 32\ntrain:\n  gpus: 8\n"
        "  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 2\nrollout:\n  gpus: 4\n"
    )
    made = imported(tmp_path, "ms-swift", text, "job.yaml")
    assert (made.plan["topology"]["dp"], made.plan["schedule"]["num_micro_batches"]) == (2, 8)
    assert made.source.locate(("topology", "pp")).line == 7
    with pytest.raises(PlanFileError, match="by which ms-swift is known, is not here"):
        imported(tmp_path, "ms-swift", "a: 1\n", "other.yaml")


@pytest.mark.parametrize(
    ("name", "depth"),
    [("Qwen/Qwen3-30B-A3B", 48), ("Qwen/Qwen3-30B-A3B-Thinking-2507", 48), ("/models/Qwen3-30B-A3B-Base/", 48),
     ("Qwen/Qwen3-30B", None), ("someone/Qwen3-30B-A3B-pruned", None), ("", None), ("meta-llama/Llama-2-7b-hf", 32)],
)  # fmt: skip
def test_depths_of_checkpoints(name, depth):
    assert depth_of(name) == depth
    assert all(depth_of(known) == int(number) for known, number in names_of("public_checkpoints").items())


@pytest.mark.parametrize(
    ("name", "kind", "flags"),
    [
        ("nemo_rl.yaml", "nemo-rl", {}), ("verl.sh", "verl", {}), ("ms_swift.sh", "ms-swift", {}),
        ("roll.yaml", "roll", {}), ("llama_factory.yaml", "llama-factory", {}), ("flagscale.yaml", "flagscale", {}),
        ("primus.yaml", "primus", {}), ("erniekit.yaml", "ernie", {}),
        ("automodel.yaml", "automodel", {"world_size": 64}),
    ],
)  # fmt: skip
def test_examples_are_recognised(name, kind, flags):
    file = Path(__file__).parents[2] / "examples" / "importing" / name
    assert kind_of(file).importer == kind
    assert not check_imported(import_files(kind, [file], Flags(**flags))).errors
