"""No verdict from unknown settings: unknown names, assumed values, other formats, and one rule of ranks."""

import json

import pytest

from pipeproof.interop import Flags, check_imported, import_files
from pipeproof.verify.certificate import Verdict
from tests.cli.commands import EXAMPLES, invoke
from tests.interop.importing import imported, refusal

SIZES = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 32 "
)
TORCHRUN = f"torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py {SIZES}--pipeline-model-parallel-size 4 "


def script(path, flags="", *, text=TORCHRUN, **options):
    return imported("megatron", path, f"{text}{flags}\n", name="train.sh", **options)


def open_names(made):
    report = check_imported(made)
    assert (report.verdict is Verdict.UNDECIDED) == bool(report.undecided)
    assert (report.certificate is None) == bool(report.undecided)
    return [message.split("`")[1] for message in report.undecided]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("", []),
        ("--lr 1e-4 --tokenizer-type NullTokenizer --moe-permute-fusion", []),
        ("--schedules-method dualpipev --moe-fb-overlap", ["--schedules-method", "--moe-fb-overlap"]),
        ("--noop-layers 6,7", ["--noop-layers"]),
        ("--num-layer-list 1,2,2,3", ["--num-layer-list"]),
        ("--use-fused-rmsnorm --swap-attention", []),  # MindSpeed's, without an effect on the pipeline
        ("--use-fused-rmsnorm --own-flag 3", ["--own-flag"]),
        ("--own-flag 3", ["--own-flag"]),
        ("--hybrid-override-pattern M-M*M-M*", ["--hybrid-override-pattern"]),
        ("--encoder-num-layers 4 --decoder-seq-length 64", ["--encoder-num-layers", "--decoder-seq-length"]),
        ("--encoder-tensor-model-parallel-size 2", ["--encoder-tensor-model-parallel-size"]),
        ("--language-model-type llama3_8b --freeze-ViT", ["--language-model-type", "--freeze-ViT"]),
        ("--vision-model-type clip --vision-pretraining", ["--vision-model-type", "--vision-pretraining"]),
        ("--spec local", []),
        ("--spec my.blocks spec", ["--spec"]),
        ("--virtual-pipeline-model-parallel-size 2", ["--virtual-pipeline-model-parallel-size"]),
    ],
)
def test_names_that_may_decide_leave_the_verdict_open(tmp_path, flags, names):
    assert open_names(script(tmp_path, flags)) == names


def test_the_list_that_lacks_a_name_is_that_of_the_fork(tmp_path):
    (finding,) = [one for one in script(tmp_path, "--use-fused-rmsnorm --own-flag 3").findings if one.code == "PP177"]
    assert "in no list of the arguments of Megatron-LM (2.0 to commit d98e8a6) or of MindSpeed" in finding.message
    assert finding.location.line == 1


def test_other_models_are_known_by_their_program(tmp_path):
    assert open_names(script(tmp_path, text=TORCHRUN.replace("_gpt", "_mamba"))) == ["pretrain_mamba.py"]


def test_nothing_is_refused_in_a_tools_name_where_a_name_is_open(tmp_path):
    uneven = TORCHRUN.replace("--num-layers 8", "--num-layers 10")
    assert refusal(script, tmp_path, text=uneven).code == "PP171"
    finding = refusal(script, tmp_path, "--num-layer-list 1,3,3,3", text=uneven)
    assert finding.code == "PP177"
    assert "`--num-layer-list`: an argument of MindSpeed" in finding.message
    assert "10 layers do not divide" in finding.message


def test_words_that_a_script_reads_while_it_runs_leave_the_verdict_open(tmp_path):
    text = f'LINE=$(python args.py)\nread -ra MODEL <<< "$LINE"\n{TORCHRUN}--bf16 ${{MODEL[@]}}'
    assert open_names(script(tmp_path, text=text)) == ["MODEL"]


def test_flags_before_a_program_in_an_unknown_directory_are_those_of_its_launcher(tmp_path):
    text = f'DIR=`pwd`\nsrun -l --container-image X sh -c "python ${{DIR}}/pretrain_gpt.py {SIZES}"\n'
    assert script(tmp_path, text=text).plan["model"]["num_layers"] == 8


def test_programs_that_train_nothing_are_refused(tmp_path):
    finding = refusal(script, tmp_path, text=TORCHRUN.replace("pretrain_gpt.py", "evaluation.py"))
    assert (finding.code, "`evaluation.py` trains nothing" in finding.message) == ("PP170", True)


def test_specifications_of_mindspeed_that_are_plain_blocks_decide_nothing(tmp_path):
    spec = "--noop-layers None --spec mindspeed_llm.tasks.models.spec.{}_spec layer_spec"
    assert open_names(script(tmp_path, spec.format("qwen3"))) == []
    assert open_names(script(tmp_path, spec.format("gemma2"))) == ["--spec"]


def test_an_open_verdict_is_no_success(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(f"{TORCHRUN}--own-flag 3", encoding="utf-8")
    result = invoke("check", "--from", "megatron", file)
    assert result.exit_code == 1
    assert "undecided: " in result.output
    assert "PP177" in result.output
    content = json.loads(invoke("check", "--from", "megatron", file, "--format", "json").output)
    assert (content["certified"], len(content["undecided"])) == (False, 1)
    result = invoke("check", "--from", "megatron", file, "--ignore", "PP177")
    assert (result.exit_code, "proved" in result.output) == (0, True)


def test_blocks_that_another_name_has_leave_the_verdict_open(tmp_path):
    text = TORCHRUN.replace("--num-layers 8 ", "--hybrid-layer-pattern M-M*M-M* ")
    finding = refusal(script, tmp_path, text=text)
    assert (finding.code, "`--hybrid-layer-pattern`" in finding.message) == ("PP177", True)


def test_an_unknown_number_of_blocks_is_not_assumed(tmp_path):
    text = TORCHRUN.replace("--num-layers 8 ", "") + "--decoder-last-pipeline-num-layers 5"
    sourced = f'source "${{SCRIPT_DIR}}/models/own.sh"\n{text} ${{MODEL_ARGS[@]}}'
    finding = refusal(script, tmp_path, text=sourced)
    assert finding.code == "PP170"
    assert "the number of blocks is not in the file" in finding.message
    assert "models/own.sh" in finding.message
    assert "--set model.num_layers=N" in finding.help
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "own.sh").write_text("MODEL_ARGS=(--num-layers 11)\n", encoding="utf-8")
    made = script(tmp_path, text=sourced)
    assert made.plan["model"]["num_layers"] == 11
    assert [sum("layer" in name for name in stage) for stage in made.plan["stages"]] == [2, 2, 2, 5]


def test_what_megatron_does_with_blocks_that_no_rank_has(tmp_path):
    ends = "--decoder-first-pipeline-num-layers 28 --decoder-last-pipeline-num-layers 36"
    text = TORCHRUN.replace("--num-layers 8", "--num-layers 80").replace("parallel-size 4", "parallel-size 2")
    finding = refusal(script, tmp_path, ends, text=text)
    assert finding.code == "PP171"
    assert "28 + 36 of 80 blocks" in finding.message
    assert "older versions drop 16 without a word" in finding.message


def test_without_a_number_of_processes_the_fewest_of_all_degrees_are_assumed(tmp_path):
    flags = (
        f"{SIZES}--pipeline-model-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --num-experts 64 "
        "--expert-model-parallel-size 64 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"
    )
    made = script(tmp_path, text=f"pretrain_gpt.py {flags}")
    assert made.plan == script(tmp_path, text=f"pretrain_gpt.py {flags}", world_size=128).plan
    (assumption,) = [one for one in made.assumptions if one.key == ("topology", "dp")]
    assert "128 are the fewest for these degrees" in assumption.why


SLIME = """MODEL_ARGS=(--num-layers 8 --hidden-size 256 --num-attention-heads 8 --num-query-groups 8)
ray job submit -- python3 train.py --actor-num-nodes 4 --actor-num-gpus-per-node 8 ${{MODEL_ARGS[@]}} \
  --rollout-batch-size 32 --n-samples-per-prompt 8 {more} --sglang-mem-fraction-static 0.7 \
  --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 --micro-batch-size 1
"""


def test_slime_trains_on_the_nodes_of_its_actor_and_the_samples_of_a_rollout(tmp_path):
    made = script(tmp_path, text=SLIME.format(more="--num-steps-per-rollout 2"))
    assert open_names(made) == []
    assert made.plan["topology"]["dp"] == 4
    assert made.plan["schedule"]["num_micro_batches"] == 32 * 8 // 2 // 4
    assert made.plan["transport"]["shape_exchange"] == "per_message"
    assert (
        script(tmp_path, text=SLIME.format(more="--global-batch-size 64")).plan["schedule"]["num_micro_batches"] == 16
    )
    dynamic = script(tmp_path, text=SLIME.format(more="--use-dynamic-batch-size --max-tokens-per-gpu 9000"))
    assert any("use-dynamic-batch-size" in one.why for one in dynamic.assumptions)


VERL = """python3 -m verl.trainer.main_ppo trainer.nnodes=2 trainer.n_gpus_per_node=8 \
  actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4 \
  actor_rollout_ref.actor.megatron.{key}=True
"""


def test_near_names_are_compared_with_the_list_of_the_tool(tmp_path):
    made = imported("verl", tmp_path, VERL.format(key="optimizer_offload"), name="run.sh")
    assert open_names(made) == []
    finding = refusal(imported, "verl", tmp_path, VERL.format(key="sequence_paralel"), name="run.sh")
    assert finding.help == "did you mean `sequence_parallel`?"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("megatron", "policy:\n  megatron_cfg: {enabled: true}\n", "a trainer that is not read"),
        ("paddleformers", "cutoff_len: 1024\npipeline_model_parallel_size: 4\n", "a trainer that is not read"),
        ("verl", "pipe_parallel_size: 4\n", "a trainer that is not read"),
        ("verl", "defaults: base.yaml\n", "the base files of `defaults` are not read"),
        ("megatron", "parallelism:\n  pp_engine: 1f1b\n", "a trainer that is not read"),
        ("megatron", "model: {pipeline_model_parallel_size: 2}\n", "no command here has flags of Megatron-LM"),
        ("verl", "a: 1\n", "by which verl is known, is not here"),
    ],
)  # fmt: skip
def test_a_file_of_another_trainer_is_refused(tmp_path, kind, text, message):
    finding = refusal(imported, kind, tmp_path, text)
    assert (finding.code, message in finding.message) == ("PP170", True), finding.message


def test_the_configuration_that_bridge_writes_is_read():
    made = import_files("megatron-bridge", [EXAMPLES / "importing" / "megatron_bridge.yaml"], Flags(world_size=16))
    assert made.plan["topology"] == {"pp": 4, "tp": 2, "sequence_parallel": True, "dp": 2}
    assert [made.plan["schedule"][key] for key in ("num_chunks", "num_micro_batches")] == [2, 32]
    assert not check_imported(made).errors


def test_a_model_of_bridge_with_an_encoder_leaves_the_verdict_open(tmp_path):
    text = (EXAMPLES / "importing" / "megatron_bridge.yaml").read_text(encoding="utf-8")
    text = text.replace("gpt_provider.GPTModelProvider", "qwen_vl.Qwen3VLModelProvider\n  vision_config: {depth: 24}")
    assert open_names(imported("megatron-bridge", tmp_path, text)) == ["model._target_", "model.vision_config"]


def test_recipes_of_verl_are_known_by_the_actor(tmp_path):
    actor = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.model.path=Qwen/Qwen3-8B"
    assert imported("verl", tmp_path, f"python3 -m recipe.dapo.main_dapo {actor}\n", name="run.sh").kind


def test_negative_frequencies_mean_experts_as_positive_ones(tmp_path):
    moe = "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-layer-freq"
    one, other = (script(tmp_path, f"{moe} {number}").plan for number in ("-1", "1"))
    assert one == other


INTERLEAVED = TORCHRUN + "--num-virtual-stages-per-pipeline-rank 2 "


def test_unbatched_transfers_are_another_plan_than_batched_ones(tmp_path):
    unbatched, batched = (check_imported(script(tmp_path, flags, text=INTERLEAVED))
                          for flags in ("", "--no-overlap-p2p-communication"))  # fmt: skip
    assert unbatched.digest != batched.digest
    (finding,) = [one for one in unbatched.findings if one.code == "PP413"]
    assert "at the first use of each of 4 pairs of pipeline ranks" in finding.message
    assert "--no-overlap-p2p-communication" in finding.help
    assert not [one for one in batched.findings if one.code == "PP413"]
    two = INTERLEAVED.replace("parallel-size 4", "parallel-size 2")
    assert not [one for one in check_imported(script(tmp_path, text=two)).findings if one.code == "PP413"]


def test_recomputed_mlps_go_with_overlapped_pairs(tmp_path):
    flags = (
        "--num-virtual-stages-per-pipeline-rank 2 --tensor-model-parallel-size 2 --sequence-parallel --bf16 "
        "--num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --recompute-modules mlp "
        "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm --recompute-granularity selective "
    )
    made = script(tmp_path, flags, text=TORCHRUN.replace("_size 4", "_size 2").replace("torchrun", "WORLD=1 torchrun"),
                  world_size=16)  # fmt: skip
    assert not check_imported(made).errors
    assert any("--recompute-modules mlp" in setting.name for setting in made.ignored)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "its encoder of images or sound"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "linear attention"),
        ("deepseek-ai/DeepSeek-V3.2", "sparse attention"),
        ("Qwen/Qwen3-8B", None),
    ],
)
def test_checkpoints_with_parts_that_a_plan_does_not_have(tmp_path, name, why):
    text = VERL.format(key="param_offload").replace("Qwen/Qwen3-30B-A3B", name)
    made = imported("verl", tmp_path, text, name="run.sh", settings={("model", "num_layers"): 48})
    assert open_names(made) == ([] if why is None else [name])
    assert why is None or why in check_imported(made).undecided[0]


def test_a_program_without_a_scale_says_what_was_not_checked(tmp_path):
    rows = "group dp: 0 1\n" + "".join(
        f"rank {r}: 0F0{{scale}} 0B0 0REDUCE_GRAD:dp{{group=0 reduction=sum}} 0STEP\n" for r in (0, 1)
    )
    file = tmp_path / "program.txt"
    file.write_text(rows.replace("{scale}", ""), encoding="utf-8")
    assert "not checked: no scale is stated and no loss is declared" in invoke("check", file).output
    file.write_text(rows.replace("{scale}", "{scale=1/dp}"), encoding="utf-8")
    assert "not checked" not in invoke("check", file).output


OLD = "0F0,0F1,0{B}0,0W0,0{B}1,0W1\n,1F0,1{B}0,1F1,1{B}1,1W0,1W1\n"


def test_a_schedule_of_an_older_pytorch_is_read_as_it_was_meant(tmp_path):
    old, new = (imported("schedule", tmp_path, OLD.format(B=name), name=f"{name}.csv") for name in "BI")
    assert check_imported(old).digest == check_imported(new).digest
    whole = "0F0,0F1,0{B}0,0{B}1\n,1F0,1{B}0,1F1,1{B}1\n"
    old, new = (imported("schedule", tmp_path, whole.format(B=name), name=f"{name}.csv") for name in ("BW", "B"))
    assert check_imported(old).digest == check_imported(new).digest


def test_processes_by_default_of_a_script_are_no_reason_to_refuse(tmp_path):
    text = TORCHRUN.replace("--nnodes 1", "--nnodes ${NODES:-1}")
    assert script(tmp_path, text=text).plan["topology"]["dp"] == 2
    large = text + "--tensor-model-parallel-size 4"
    assert script(tmp_path, text=large).plan["topology"]["dp"] == 1
    assert refusal(script, tmp_path, text=large.replace("${NODES:-1}", "1")).code == "PP171"
