"""A command that refuses a file names what the file is, and the command that reads it."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeproof.cli.file_kinds import KINDS, kind_of
from tests.cli.commands import EXAMPLES, invoke

IMPORTING = EXAMPLES / "importing"
SCHEDULES = EXAMPLES / "schedules"

EXAMPLE_FILES = {
    EXAMPLES / "gpt_pp4.yaml": "a plan",
    SCHEDULES / "zbv_pp2.csv": "a schedule in PyTorch's CSV",
    IMPORTING / "strategy.prototxt": "a Fleet DistributedStrategy",
    IMPORTING / "megatron.sh": "a shell script",
    IMPORTING / "deepspeed.json": "a configuration of DeepSpeed",
    IMPORTING / "gpt_neox.yml": "a configuration of gpt-neox",
    IMPORTING / "megatron_bridge.yaml": "the configuration of a training of Megatron-Bridge",
    IMPORTING / "torchtitan.toml": "a job configuration of torchtitan",
    IMPORTING / "full_tp_pp.yaml": "training arguments of PaddleFormers or PaddleNLP",
}
WRITTEN = {
    "trace.json": (json.dumps({"traceEvents": []}), "a trace"),
    "dump.json": (json.dumps({"entries": [], "pg_config": {}}), "a Flight Recorder dump"),
    "report.json": (json.dumps({"log_matches_graph": True, "timeline": []}), "a report of a run"),
    "names.yaml": ("aoa_statements: []\n", "a file of AOA statements"),
    "config.json": (json.dumps({"model_type": "llama", "num_hidden_layers": 2}), "a configuration of a model"),
    "program.txt": ("rank 0: 0F0 0B0\n", "a program in our text form"),
    "fleet.txt": ("f0;b0;\n", "a schedule in the strings of Fleet"),
    "dump_0": ("\x80", None),
}


@pytest.mark.parametrize("file", EXAMPLE_FILES, ids=lambda file: file.name)
def test_the_kinds_of_examples(file):
    assert kind_of(file).noun == EXAMPLE_FILES[file]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_kinds_of_written_files(tmp_path, name):
    text, noun = WRITTEN[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    kind = kind_of(tmp_path / name)
    assert (kind and kind.noun) == noun


def test_the_kinds_of_binary_files_and_directories(tmp_path):
    (tmp_path / "a").write_bytes(b"\x80\x04rest")
    (tmp_path / "c.json.gz").write_bytes(b"\x1f\x8b")
    save_file({"w": np.zeros(2)}, tmp_path / "d.safetensors")
    nouns = [kind_of(tmp_path / name).noun for name in ("a", "c.json.gz", "d.safetensors")]
    assert nouns == [
        "a pickle, such as a Flight Recorder dump", "a compressed trace", "a checkpoint",
    ]  # fmt: skip
    for name, inside, noun in (
        ("record", "record.jsonl", "a record of a training"),
        ("logs", "rank_0.jsonl", "a directory of logs of a recorded program"),
        ("dumps", "nccl_trace_rank_0", "a directory of Flight Recorder dumps"),
        ("states", "model.safetensors", "a checkpoint"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).write_text("{}")
        assert kind_of(tmp_path / name).noun == noun
    assert kind_of(tmp_path / "none") is None
    (tmp_path / "empty").write_text("")
    assert kind_of(tmp_path / "empty") is None


@pytest.mark.parametrize(
    ("words", "file", "reader"),
    [
        (("schedule", "convert", "--as", "text"), EXAMPLES / "gpt_pp4.yaml", "check FILE"),
        (("job", "hang"), EXAMPLES / "gpt_pp4.yaml", "check FILE"),
        (("state", "show"), IMPORTING / "deepspeed.json", "check FILE"),
        (("state", "align", EXAMPLES / "gpt_pp4.yaml"), EXAMPLES / "gpt_pp4.yaml", "check FILE"),
        (("import", "plan", "--from", "megatron"), IMPORTING / "torchtitan.toml", "import plan FILE -o plan.yaml"),
        (("import", "profile", "--plan", EXAMPLES / "gpt_pp4.yaml"), EXAMPLES / "gpt_pp4.yaml", "check FILE"),
        (("check", "--from", "fleet"), IMPORTING / "full_tp_pp.yaml", "check FILE"),
        (("check", "--from", "fleet"), EXAMPLES / "gpt_pp4.yaml", "check FILE"),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else " ".join(map(str, value))[:40],
)
def test_a_refusal_names_the_command_that_reads_the_file(words, file, reader):
    refused = invoke(*words, file)
    assert refused.exit_code == 2
    note = next(line for line in refused.stderr.splitlines() if line.startswith(f"note: {file} looks like "))
    assert f"`pipeproof {reader.replace('FILE', str(file))}`" in note


@pytest.mark.parametrize(
    ("group", "file", "first"),
    [
        ((), EXAMPLES / "gpt_pp4.yaml", "check FILE"),
        ((), IMPORTING / "strategy.prototxt", "check FILE"),
        (("import",), IMPORTING / "strategy.prototxt", "import plan FILE -o plan.yaml"),
        (("schedule",), SCHEDULES / "zbv_pp2.csv", "schedule convert FILE --as text"),
    ],
)
def test_a_file_in_the_place_of_a_command_is_recognised(group, file, first):
    refused = invoke(*group, file)
    assert refused.exit_code == 2
    message = " ".join(refused.stderr.split())
    assert "a command is missing before the file" in message
    assert f": `pipeproof {first.replace('FILE', str(file))}`" in message


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("check",), "pipeproof: 1\nmodel: {}\n"),
        (("compare", EXAMPLES / "gpt_pp4.yaml"), "pipeproof: 1\n"),
        (("check",), "torchrun x.py --tensor-model-paralel-size 2\n"),
        (("check", "--from", "megatron"), "torchrun x.py --tensor-model-paralel-size 2\n"),
        (("import", "plan"), "torchrun x.py --tensor-model-paralel-size 2\n"),
        (("check",), "rank 0: nonsense\n"),
        (("check",), "something: else\n"),
    ],
)
def test_a_command_that_reads_this_kind_has_its_own_reason(tmp_path, words, text):
    (tmp_path / "given").write_text(text)
    refused = invoke(*words, tmp_path / "given")
    assert refused.exit_code == 2
    assert "looks like" not in refused.stderr


def test_the_named_commands_exist():
    for command in {command for kind in KINDS for command in kind.commands}:
        words = [word for word in command.split() if word.islower() or word.startswith("-")]
        assert invoke(*words[: 2 if words[0] in ("state", "schedule", "job", "import") else 1], "--help").exit_code == 0
