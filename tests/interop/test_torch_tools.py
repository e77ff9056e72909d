"""Plans from torchtitan's TOML and PyTorch's CSV."""

from pathlib import Path

import pytest

from pipeproof.interop import Flags, import_files
from tests.interop.importing import REAL, errors, imported, refusal

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
    finding = refusal(titan, tmp_path, parts.replace('"norm"', '"vision"'))
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
        ('pipeline_parallel_schedule = "1F2B"', {}, "`1F2B` is not a schedule of PyTorch", "PP170"),
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
    finding = refusal(titan, tmp_path, more, **flags)
    assert (finding.code, message in finding.message) == (code, True), finding.message


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "gpipe"])
@pytest.mark.parametrize(("num_micro_batches", "refused"), [(4, False), (3, True), (1, True)])
def test_schedules_of_one_stage_need_as_many_micro_batches_as_stages(tmp_path, schedule, num_micro_batches, refused):
    """``PipelineScheduleSingle`` raises a ValueError; interleaved schedules and schedules of a file do not."""
    more = f'pipeline_parallel_schedule = "{schedule}"'
    flags = {"settings": {("schedule", "num_micro_batches"): num_micro_batches, ("topology", "pp"): 4}}
    if not refused:
        assert errors(titan(tmp_path, more, **flags)) == []
        return
    finding = refusal(titan, tmp_path, more, **flags)
    assert finding.code == "PP171"
    assert f"{num_micro_batches} micro-batches on 4 stages" in finding.message


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ('[model]\nname = "llama4"', []),
        ('[model]\nname = "qwen3_vl"', ["model.name"]),
        ('[model]\nname = "vlm"\n[model.vision_encoder]\nnum_layers = 24', ["model.name", "model.vision_encoder"]),
    ],
)
def test_a_model_of_torchtitan_with_an_encoder_leaves_the_verdict_open(tmp_path, more, names):
    found = [one.message.split("`")[1] for one in titan(tmp_path, more).findings if one.code == "PP177"]
    assert found == names


def test_unknown_keys_of_torchtitan_are_named(tmp_path):
    made = titan(tmp_path, "pipeline_parallel_magic = 1\nfsdp_reshard_after_forward = 'never'")
    assert [setting.name for setting in made.ignored] == ["pipeline_parallel_magic"]


def test_torchtitans_csv(tmp_path):
    csv = CSV_FILES / "zero_bubble_2x2.csv"
    more = f'pipeline_parallel_schedule = "PipelineScheduleMulti"\npipeline_parallel_schedule_csv = "{csv}"'
    plan = titan(tmp_path, more).plan
    assert plan["schedule"] | {"kind": "file", "path": str(csv), "num_chunks": 2} == plan["schedule"]


@pytest.mark.parametrize("file", sorted(CSV_FILES.glob("*.csv")), ids=lambda file: file.stem)
def test_schedules_of_pytorch(file):
    made = import_files("schedule", [file], Flags())
    num_ranks = len(file.read_text().splitlines())
    assert made.plan["topology"] == {"pp": num_ranks}
    assert errors(made) == []


def test_a_csv_that_is_no_schedule(tmp_path):
    finding = refusal(imported, "schedule", tmp_path, "0F0,0B0\nnonsense", name="s.csv")
    assert finding.code.startswith("PP1")
    assert finding.location.line == 2


@pytest.mark.parametrize("kind", ["torchtitan", "schedule"])
def test_each_takes_one_file(kind):
    file = REAL / "torchtitan_deepseek_v3_671b.toml"
    assert "found 2" in refusal(import_files, kind, [file, file], Flags()).message


@pytest.mark.parametrize(
    ("kind", "name", "text", "said", "fix"),
    [
        ("torchtitan", "job.toml", "[parallelism]\npipeline_parallel_degre = 4\n",
         "`parallelism.pipeline_parallel_degre` is not a key of torchtitan", "`pipeline_parallel_degree`"),
        ("torchtitan", "job.toml", "[training]\nlocal_batchsize = 4\n", "`training.local_batchsize`",
         "`local_batch_size`"),
        ("torchtitan", "job.toml", "[paralelism]\n", "`paralelism` is not a key", "did you mean `parallelism`?"),
        ("torchtitan", "job.toml", "[tool.black]\nline = 4\n", "no key here is one of torchtitan", "plan --help"),
    ],
)  # fmt: skip
def test_a_misspelt_key_or_a_file_of_another_tool_is_refused(tmp_path, kind, name, text, said, fix):
    finding = refusal(imported, kind, tmp_path, text, name=name)
    assert finding.code == "PP170"
    assert said in finding.message
    assert fix in finding.help
    assert finding.location.file.endswith(name)
