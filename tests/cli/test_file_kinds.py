"""A command that refuses a file names the kind of the file, and the command that reads it."""

import pytest

from pipeproof.cli.file_kinds import KINDS
from tests.cli.commands import EXAMPLES, invoke

IMPORTING = EXAMPLES / "importing"
SCHEDULES = EXAMPLES / "schedules"


@pytest.mark.parametrize(
    ("words", "file", "reader"),
    [
        (("schedule", "convert", "--as", "text"), EXAMPLES / "gpt_pp4.yaml", "check FILE"),
        (("job", "hang"), EXAMPLES / "gpt_pp4.yaml", "check FILE"),
        (("state", "show"), IMPORTING / "torchtitan.toml", "check FILE"),
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
