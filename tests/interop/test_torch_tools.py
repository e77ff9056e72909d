"""Plans from torchtitan's TOML, DeepSpeed's JSON, the YAML of gpt-neox and PyTorch's CSV."""

import json
from pathlib import Path

import pytest

from pipeproof.diagnostics.finding import PipeproofError, Severity
from pipeproof.interop import Flags, check_imported, import_files
from tests.cli.commands import invoke
from tests.interop.importing import REAL, codes, imported, judged, only

CSV_FILES = Path(__file__).parents[1] / "schedule" / "files"
TITAN = """
[training]
local_batch_size = 8
seq_len = 128

[parallelism]
pipeline_parallel_degree = 2
"""


def titan(tmp_path, more="", **flags):
    return imported("torchtitan", tmp_path, TITAN + more, name="job.toml", **flags)


def refusal(make):
    with pytest.raises(PipeproofError) as caught:
        make()
    (finding,) = caught.value.findings
    return finding


def errors(made):
    return [finding.code for finding in check_imported(made).findings if finding.severity is Severity.ERROR]


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("1F1B", "1f1b", 1),
        ("gpipe", "gpipe", 1),
        ("Interleaved1F1B", "interleaved", 2),
        ("LoopedBFS", "looped_bfs", 2),
        ("InterleavedZeroBubble", "interleaved_zb", 2),
        ("ZBVZeroBubble", "zb_v", 2),
        ("DualPipeV", "dualpipe_v", 2),
    ],
)
def test_torchtitans_schedules(tmp_path, name, kind, chunks):
    made = titan(tmp_path, f'pipeline_parallel_schedule = "{name}"')
    assert made.plan["schedule"]["kind"] == kind
    assert made.plan["schedule"].get("num_chunks", 1) == chunks
    assert made.plan["schedule"]["num_micro_batches"] == 8
    assert len(made.plan["stages"]) == 2 * chunks
    assert errors(made) == []


def test_torchtitans_own_cut(tmp_path):
    """As generate_llm_fqn_per_model_part: embedding and head count for a layer, the first stages take one more."""
    settings = {("model", "num_layers"): 9}
    stages = titan(tmp_path, 'pipeline_parallel_schedule = "Interleaved1F1B"', settings=settings).plan["stages"]
    assert stages == [
        ["embed", "layer.0", "layer.1"], ["layer.2", "layer.3", "layer.4"], ["layer.5", "layer.6", "layer.7"],
        ["layer.8", "norm", "head"],
    ]  # fmt: skip
    weights = "pipeline_parallel_first_stage_less_layers = 3\npipeline_parallel_last_stage_less_layers = 0"
    stages = titan(tmp_path, weights, settings=settings).plan["stages"]
    assert [len(stage) for stage in stages] == [1 + 3, 6 + 2]


def test_torchtitans_named_modules(tmp_path):
    parts = 'module_fqns_per_model_part = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]'
    for settings in ({}, {("model", "num_layers"): 2}):
        made = titan(tmp_path, parts, settings=settings)
        assert made.plan["model"]["num_layers"] == 2
        assert made.plan["stages"] == [["embed", "layer.0"], ["layer.1", "norm", "head"]]
        assert errors(made) == []
    finding = refusal(lambda: titan(tmp_path, parts.replace('"norm"', '"vision"')))
    assert "`vision` is none of tok_embeddings" in finding.message
    assert finding.location.line == 8


def test_a_real_job_of_torchtitan():
    file = REAL / "torchtitan_deepseek_v3_671b.toml"
    flags = Flags({("topology", "pp"): 2, ("topology", "ep"): 2}, world_size=8)
    made = import_files("torchtitan", [file], flags)
    assert made.plan["topology"] == {"pp": 2, "ep": 2, "tp": 1, "dp": 2}
    assert made.plan["schedule"]["kind"] == "interleaved"
    assert made.source.locate(("schedule", "kind")).line == 21
    assert errors(made) == []


@pytest.mark.parametrize(
    ("more", "flags", "message", "code"),
    [
        ('pipeline_parallel_schedule = "1F2B"', {}, "`1F2B` is no schedule of PyTorch", "PP170"),
        ("pipeline_parallel_microbatch_size = 3", {}, "local_batch_size 8 does not divide by", "PP171"),
        (
            "pipeline_parallel_layers_per_stage = 1",
            {"settings": {("model", "num_layers"): 10**12}},
            "more than",
            "PP170",
        ),
        ("tensor_parallel_degree = 0", {}, "needs an integer of at least 1, found integer 0", "PP170"),
        ("tensor_parallel_degree = 4", {"world_size": 12}, "12 processes do not divide by", "PP171"),
        ("expert_parallel_degree = 4", {"world_size": 4}, "expert parallelism over 4 of 2 data-parallel", "PP170"),
        ("pipeline_parallel_last_stage_less_layers = 9", {}, "the head for 9", "PP171"),
        ("broken =", {}, "no valid TOML", "PP170"),
        ('[activation_checkpoint]\nmode = "op"', {}, "`mode` must be none, selective, full or memory_budget", "PP170"),
    ],
)
def test_what_torchtitan_would_refuse(tmp_path, more, flags, message, code):
    finding = refusal(lambda: titan(tmp_path, more, **flags))
    assert (finding.code, message in finding.message) == (code, True), finding.message


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "gpipe"])
@pytest.mark.parametrize(("num_micro_batches", "refused"), [(4, False), (3, True), (1, True)])
def test_schedules_of_one_stage_need_as_many_micro_batches_as_stages(tmp_path, schedule, num_micro_batches, refused):
    """``PipelineScheduleSingle`` raises a ValueError; interleaved schedules and those of a file do not."""
    more = f'pipeline_parallel_schedule = "{schedule}"'
    flags = {"settings": {("schedule", "num_micro_batches"): num_micro_batches, ("topology", "pp"): 4}}
    if not refused:
        assert errors(titan(tmp_path, more, **flags)) == []
        return
    finding = refusal(lambda: titan(tmp_path, more, **flags))
    assert finding.code == "PP171"
    assert f"{num_micro_batches} micro-batches on 4 stages" in finding.message


def test_micro_batches_on_fewer_chunks_than_stages(tmp_path):
    flags = {"settings": {("schedule", "num_micro_batches"): 4, ("topology", "pp"): 4}}
    assert errors(titan(tmp_path, 'pipeline_parallel_schedule = "Interleaved1F1B"', **flags)) == []


def test_torchtitan_sends_a_message_over_each_connection_first(tmp_path):
    assert "transport" not in titan(tmp_path, "").plan


def test_unknown_keys_of_torchtitan_are_named(tmp_path):
    made = titan(tmp_path, "pipeline_parallel_magic = 1\nfsdp_reshard_after_forward = 'never'")
    assert [setting.name for setting in made.ignored] == ["pipeline_parallel_magic"]


def test_torchtitans_csv(tmp_path):
    csv = CSV_FILES / "zero_bubble_2x2.csv"
    more = f'pipeline_parallel_schedule = "PipelineScheduleMulti"\npipeline_parallel_schedule_csv = "{csv}"'
    plan = titan(tmp_path, more).plan
    assert plan["schedule"] | {"kind": "file", "path": str(csv), "num_chunks": 2} == plan["schedule"]


DEEPSPEED = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "pipeline": {"stages": 2}}


def deepspeed(tmp_path, tp=1, **more):
    return judged("deepspeed", tmp_path, DEEPSPEED | more, settings={("topology", "tp"): tp})


def test_deepspeed_cuts_what_it_sends_over_tensor_parallel_ranks(tmp_path):
    """Right while all of them hold the same tensor, and wrong with sequence parallelism."""
    assert codes(deepspeed(tmp_path, tp=2)) == []
    settings = {("topology", "tp"): 2, ("topology", "sequence_parallel"): True}
    wrong = judged("deepspeed", tmp_path, DEEPSPEED, settings=settings)
    assert {finding.code for finding in wrong.findings} >= {"PP201"}
    fixes = [finding.help for finding in wrong.findings if finding.code == "PP201"]
    assert any('"pipe_partitioned": false' in text for text in fixes)
    assert any('"grad_partitioned": false' in text for text in fixes)
    whole = {"pipeline": {"stages": 2, "pipe_partitioned": False, "grad_partitioned": False}}
    assert "PP201" not in codes(judged("deepspeed", tmp_path, DEEPSPEED | whole, settings=settings))


def test_deepspeeds_batches(tmp_path):
    made = imported("deepspeed", tmp_path, {"train_batch_size": 32, "pipeline": {"stages": 2}}, world_size=4)
    assert made.plan["schedule"] == {"kind": "1f1b", "micro_batch_size": 16, "num_micro_batches": 1}
    both = DEEPSPEED | {"train_batch_size": 9}
    finding = refusal(lambda: imported("deepspeed", tmp_path, both))
    assert (finding.code, "train_batch_size 9 is not" in finding.message) == ("PP171", True)


@pytest.mark.parametrize(
    ("content", "message", "code"),
    [
        ({"train_batch_size": 4}, "does not have the number of pipeline stages", "PP170"),
        (DEEPSPEED | {"zero_optimization": {"stage": 2}}, "does not run with ZeRO stage 2", "PP171"),
        (DEEPSPEED | {"gradient_accumulation_steps": "4"}, 'found string "4"', "PP170"),
        (DEEPSPEED | {"pipeline": {"stages": 2, "pipe_partitioned": 1}}, "must be true or false", "PP170"),
        ("[1]", "a mapping of keys is expected", "PP170"),
        ("{", "", "PP170"),
        (
            DEEPSPEED | {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "bf16 and fp16 are both enabled",
            "PP171",
        ),
    ],
)
def test_what_deepspeed_would_refuse(tmp_path, content, message, code):
    finding = refusal(lambda: imported("deepspeed", tmp_path, content))
    assert (finding.code, message in finding.message) == (code, True), finding.message


@pytest.mark.parametrize("file", sorted(CSV_FILES.glob("*.csv")), ids=lambda file: file.stem)
def test_schedules_of_pytorch(file):
    made = import_files("schedule", [file], Flags())
    num_ranks = len(file.read_text().splitlines())
    assert made.plan["topology"] == {"pp": num_ranks}
    assert errors(made) == []


def test_a_csv_that_is_no_schedule(tmp_path):
    finding = refusal(lambda: imported("schedule", tmp_path, "0F0,0B0\nnonsense", name="s.csv"))
    assert finding.code.startswith("PP1")
    assert finding.location.line == 2


def test_batches_of_deepspeed_have_the_number_of_ranks(tmp_path):
    made = imported("deepspeed", tmp_path, DEEPSPEED | {"train_batch_size": 12})
    assert made.plan["topology"] == {"pp": 2, "dp": 3}


NEOX = {
    "pipe-parallel-size": 4, "model-parallel-size": 2, "num-layers": 22, "hidden-size": 512, "seq-length": 64,
    "num-attention-heads": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 16,
    "activation": "swiglu", "intermediate_size": 6000, "mlp_multiple_of": 256, "norm": "rmsnorm",
}  # fmt: skip


def test_gpt_neox_cuts_by_blocks_and_the_functions_beside_them(tmp_path):
    made = imported("gpt-neox", tmp_path, NEOX | {"num_nodes": 2, "num_gpus": 8})
    assert made.plan["topology"] == {"pp": 4, "tp": 2, "dp": 2}
    assert [sum(name.startswith("layer") for name in stage) for stage in made.plan["stages"]] == [5, 6, 6, 5]
    assert [made.plan["model"][key] for key in ("ffn_size", "mlp", "norm")] == [2048, "swiglu", "rms"]
    assert made.plan["schedule"]["num_micro_batches"] == 16
    assert codes(check_imported(made)) == []


def test_gpt_neox_with_sequence_parallelism_needs_whole_sends(tmp_path):
    errors = judged("gpt-neox", tmp_path, NEOX | {"sequence_parallel": True}).errors
    assert {finding.code for finding in errors} == {"PP201"}
    assert all("in `pipeline` of `deepspeed_extra_args`" in finding.help for finding in errors)
    whole = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
    job = NEOX | {"sequence_parallel": True, "deepspeed_extra_args": whole}
    assert codes(judged("gpt-neox", tmp_path, job)) == []


def test_files_of_gpt_neox_are_one_training(tmp_path):
    names = ("model.yml", "data.yml")
    first, second = (tmp_path / name for name in names)
    first.write_text(json.dumps(NEOX), encoding="utf-8")
    second.write_text('"precision": "bfloat16"\n"train-iters": 10\n', encoding="utf-8")
    assert import_files("gpt-neox", [first, second], Flags()).plan["run"]["dtype"] == "bfloat16"
    second.write_text('"pipe_parallel_size": 2\n', encoding="utf-8")
    finding = refusal(lambda: import_files("gpt-neox", [first, second], Flags()))
    assert (finding.code, finding.location.file) == ("PP171", str(second))


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"attention_config": [[["global", "rwkv"], 11]]}, "attention_config"),
        ({"moe_num_experts": 8}, "moe_num_experts"),
        ({"pipe_partition_method": "parameters"}, "pipe_partition_method"),
        ({"pipe-parallel-order": "reverse"}, "pipe_parallel_order"),
    ],
)
def test_keys_of_gpt_neox_that_leave_the_verdict_open(tmp_path, more, name):
    assert f"`{name}`" in judged("gpt-neox", tmp_path, NEOX | more).undecided[0]


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ({"pipe-parallel-size": 0}, "PP170", "without a pipeline"),
        ({"pipe-parallel-size": "4"}, "PP170", "needs an integer"),
        ({"hidden-size": None}, "PP170", "`hidden_size`, which a training of gpt-neox needs, is not here"),
        ({"train_impl": "dpo"}, "PP171", "`train_impl` dpo with a pipeline"),
        ({"zero_optimization": {"stage": 2}}, "PP171", "ZeRO stage 2"),
    ],
)
def test_what_gpt_neox_would_refuse(tmp_path, more, code, message):
    finding = refusal(lambda: imported("gpt-neox", tmp_path, NEOX | more))
    assert finding.code == code
    assert message in finding.message


@pytest.mark.parametrize("kind", ["torchtitan", "deepspeed", "schedule"])
def test_each_takes_one_file(kind):
    file = REAL / "torchtitan_deepseek_v3_671b.toml"
    assert "found 2" in refusal(lambda: import_files(kind, [file, file], Flags())).message


def test_a_partition_that_the_program_decides_is_a_note(tmp_path):
    report = deepspeed(tmp_path, pipeline={"stages": 2, "partition": "type:Block"})
    assert "depends on the program" in only(report, "PP173").message


EXAMPLES = Path(__file__).parents[2] / "examples" / "importing"


@pytest.mark.parametrize(
    "setting", ["topology.cp=x", "topology.tp=0", "schedule.micro_batch_size=0", "model.num_layers=x"]
)
@pytest.mark.parametrize(
    ("kind", "file"), [("megatron", "megatron.sh"), ("torchtitan", "torchtitan.toml"), ("deepspeed", "deepspeed.json")]
)
def test_settings_that_are_no_counts_are_refused(kind, file, setting):
    assert invoke("check", "--from", kind, EXAMPLES / file, "--set", setting).exit_code == 2


@pytest.mark.parametrize(
    ("kind", "file"), [("megatron", "megatron.sh"), ("torchtitan", "torchtitan.toml"), ("deepspeed", "deepspeed.json")]
)
def test_an_imported_plan_can_be_written_and_checked(kind, file, tmp_path):
    plan = tmp_path / "plan.yaml"
    assert invoke("import", "plan", "--from", kind, EXAMPLES / file, "-o", plan).exit_code == 0
    assert invoke("check", plan).exit_code == 0


@pytest.mark.parametrize(
    ("kind", "name", "text", "said", "fix"),
    [
        ("torchtitan", "job.toml", "[parallelism]\npipeline_parallel_degre = 4\n",
         "`parallelism.pipeline_parallel_degre` is no key of torchtitan", "`pipeline_parallel_degree`"),
        ("torchtitan", "job.toml", "[training]\nlocal_batchsize = 4\n", "`training.local_batchsize`",
         "`local_batch_size`"),
        ("torchtitan", "job.toml", "[paralelism]\n", "`paralelism` is no key", "did you mean `parallelism`?"),
        ("torchtitan", "job.toml", "[tool.black]\nline = 4\n", "no key here is one of torchtitan", "plan --help"),
        ("deepspeed", "ds.json", {"train_batch_size": 8, "pipeline": {"stages": 2, "grad_partitoned": False}},
         "`pipeline.grad_partitoned` is no key of DeepSpeed", "`grad_partitioned`"),
        ("deepspeed", "ds.json", {"gradient_accumulation_stps": 8}, "`gradient_accumulation_stps`", "_steps`?"),
        ("deepspeed", "ds.json", {"compilerOptions": {}}, "no key here is one of DeepSpeed", "plan --help"),
    ],
)  # fmt: skip
def test_a_misspelt_key_or_a_file_of_another_tool_is_refused(tmp_path, kind, name, text, said, fix):
    finding = refusal(lambda: imported(kind, tmp_path, text, name=name))
    assert finding.code == "PP170"
    assert said in finding.message
    assert fix in finding.help
    assert finding.location.file.endswith(name)


def test_several_unknown_keys_of_torchtitan_are_one_note(tmp_path):
    made = titan(tmp_path, "first_magic = 1\nsecond_magic = 2\n")
    assert [setting.name for setting in made.ignored] == ["first_magic, second_magic"]
