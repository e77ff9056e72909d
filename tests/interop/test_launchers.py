"""Plans from scripts of verl, which start trainings on Megatron-Core."""

from pathlib import Path

import pytest

from pipeproof.cli.file_kinds import kind_of
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop import Flags, check_imported, import_files
from pipeproof.interop.importers.names import depth_of, names_of
from tests.interop.importing import imported, refusal

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


def verl(path, *, model="Qwen2.5-32B", more="", **flags):
    return imported("verl", path, VERL.format(model=model, more=more), name="run.sh", **flags)


ACTOR = "actor_rollout_ref.actor.megatron."


def notes(made):
    return " / ".join(f"{setting.name}: {setting.why}" for setting in made.ignored)


def test_a_script_is_a_plan_with_places(tmp_path):
    made = verl(tmp_path)
    topology = made.plan["topology"]
    assert (topology["pp"], topology["tp"], topology["dp"]) == (4, 2, 2)
    assert made.plan["schedule"]["num_micro_batches"] == 32 * 4 // 2 // 2
    assert made.plan["model"]["num_layers"] == 64
    assert made.source.locate(("topology", "pp")).line == 9
    assert not check_imported(made).errors


@pytest.mark.parametrize(
    ("more", "suggestion"),
    [
        ("virtual_pipeline_model_paralel_size=2", "virtual_pipeline_model_parallel_size"),
        ("override_transformer_config.num_layers_in_first_pipeline_stages=2", "num_layers_in_first_pipeline_stage"),
    ],
)
def test_a_near_miss_is_refused_with_the_key(tmp_path, more, suggestion):
    finding = refusal(verl, tmp_path, more=f"    +{ACTOR}{more} \\\n")
    assert finding.code == "PP170"
    assert finding.help == f"did you mean `{suggestion}`?"
    assert finding.location.line > 1


def test_an_unknown_model_needs_its_number_of_blocks(tmp_path):
    finding = refusal(verl, tmp_path, model="own-model")
    assert "the number of blocks of" in finding.message
    assert "--set model.num_layers=N" in finding.help
    assert "--model-config FILE" in finding.help
    made = verl(tmp_path, model="own-model", settings={("model", "num_layers"): 24})
    assert made.plan["model"]["num_layers"] == 24
    config = tmp_path / "config.json"
    config.write_text('{"num_hidden_layers": 28}', encoding="utf-8")
    assert verl(tmp_path, model="own-model", model_config=config).plan["model"]["num_layers"] == 28


def test_unknown_keys_leave_the_verdict_open(tmp_path):
    report = check_imported(verl(tmp_path, more=f"    {ACTOR}new_switch=3 {ACTOR}moe_new_switch=4 \\\n"))
    assert report.verdict == "undecided"
    names = [message.split("`")[1].rpartition(".")[2] for message in report.undecided]
    assert names == ["new_switch", "moe_new_switch"]
    assert all("is in no list of the arguments of Megatron-LM (2.0 to" in message for message in report.undecided)


def test_blocks_that_do_not_divide(tmp_path):
    finding = refusal(verl, tmp_path, model="Qwen3-235B-A22B")
    assert finding.code == "PP171"
    assert "94 layers do not divide by --pipeline-model-parallel-size 4" in finding.message
    assert finding.location.line == 9


def test_dynamic_batches_leave_the_number_of_micro_batches_open(tmp_path):
    made = verl(tmp_path, more="    actor_rollout_ref.actor.use_dynamic_bsz=True \\\n")
    (assumption,) = [one for one in made.assumptions if one.key == ("schedule", "num_micro_batches")]
    assert "depends on the lengths of the data" in assumption.why


def test_other_models_of_a_training_are_noted(tmp_path):
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
    made = imported("verl", tmp_path, text, name="sft.sh")
    assert made.plan["topology"]["dp"] == 2
    assert made.plan["schedule"]["num_micro_batches"] == 64 // 2 // 4
    assert made.plan["model"]["seq_length"] == 2048
    with pytest.raises(PlanFileError, match="no command here starts a training of verl with Megatron-Core"):
        imported("verl", tmp_path, "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.fsdp=1\n", name="fsdp.sh")


@pytest.mark.parametrize(
    ("name", "depth"),
    [("Qwen/Qwen3-30B-A3B", 48), ("Qwen/Qwen3-30B-A3B-Thinking-2507", 48), ("/models/Qwen3-30B-A3B-Base/", 48),
     ("Qwen/Qwen3-30B", None), ("someone/Qwen3-30B-A3B-pruned", None), ("", None), ("meta-llama/Llama-2-7b-hf", 32)],
)  # fmt: skip
def test_depths_of_checkpoints(name, depth):
    assert depth_of(name) == depth
    assert all(depth_of(known) == int(number) for known, number in names_of("public_checkpoints").items())


@pytest.mark.parametrize(("name", "kind"), [("verl.sh", "verl"), ("erniekit.yaml", "ernie")])
def test_examples_are_recognised(name, kind):
    file = Path(__file__).parents[2] / "examples" / "importing" / name
    assert kind_of(file).importer == kind
    assert not check_imported(import_files(kind, [file], Flags())).errors
