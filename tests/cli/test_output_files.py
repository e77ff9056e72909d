"""Outputs appear whole, or old files survive; on a full disk, too."""

import errno
import json
import os
import resource
import stat
from pathlib import Path

import pytest

from pipeproof.atomic_write import write_output
from pipeproof.cli import main as cli
from tests.cli.commands import EXAMPLES, invoke, python

PLAN = EXAMPLES / "gpt_pp4.yaml"
COMMANDS = {
    "out.html": ("simulate", PLAN),
    "out.json": ("simulate", PLAN),
    "out.svg": ("simulate", PLAN),
    "play.html": ("play",),
    "out.yaml": ("import", "plan", EXAMPLES / "importing" / "megatron.sh"),
    "text": ("schedule", "convert", "--as", "text", EXAMPLES / "schedules" / "zbv_pp2.csv"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_leaves_the_file_that_exists_and_names_it(name, tmp_path):
    """The limit of a file's size is a disk that is full after 200 bytes."""
    output = tmp_path / name
    output.write_text("old")
    command = ("-B", "-m", "pipeproof", *COMMANDS[name], "-o", output)
    result = python(*command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200)))
    assert result.returncode == 2, result.stderr
    assert str(output) in result.stderr
    assert os.strerror(errno.EFBIG) in result.stderr
    assert "Traceback" not in result.stderr
    assert output.read_text() == "old"
    assert [*tmp_path.iterdir()] == [output]


@pytest.mark.parametrize(
    "words",
    [
        "simulate plan.json -o ./plan.json",
        "simulate -o link.json plan.json",
        "rehearse plan.json -o plan.json",
        "run plan.json --report plan.json",
        "run plan.json --report new.json --profile ../{folder}/new.json",
        "schedule convert zbv.csv --as text -o zbv.csv",
        "import plan other.csv zbv.csv -o zbv.csv",
        "import profile log.json --plan plan.json -o log.json",
        "state align log.svg plan.json --plot log.svg",
        "state align plan.json,log.svg zbv.csv --plot log.svg",
    ],
)
def test_an_output_is_no_input_and_no_other_output(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").mkdir()
    for name in ("plan.json", "zbv.csv", "other.csv", "log.json", "log.svg"):
        (tmp_path / name).write_text("old")
    (tmp_path / "link.json").symlink_to("plan.json")
    result = invoke(*words.format(folder=tmp_path.name).split())
    assert result.exit_code == 2
    assert "are one file" in result.stderr
    assert "would be replaced" in " ".join(result.stderr.split())
    assert all(path.read_text() == "old" for path in tmp_path.iterdir() if path.is_file())


def test_a_removed_directory_is_named(tmp_path, monkeypatch):
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    result = invoke("simulate", PLAN, "-o", "x.html")
    assert result.exit_code == 2
    assert "the current directory has been removed" in result.stderr


def test_a_new_file_keeps_permissions_and_links(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_output(link, "new\n")
    assert link.is_symlink()
    assert target.read_bytes() == b"new\n"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_pipe_and_a_device_are_written_in_place(tmp_path):
    read, write = os.pipe()
    write_output(Path(f"/dev/fd/{write}"), "text")
    os.close(write)
    with os.fdopen(read) as stream:
        assert stream.read() == "text"


@pytest.mark.parametrize("form", ["text", "json", "sarif"])
def test_findings_about_a_file_whose_name_is_no_utf_8_are_printed(form, tmp_path):
    plan = tmp_path / os.fsdecode(b"plan-\xff.yaml")
    plan.write_bytes((EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml").read_bytes())
    result = python("-B", "-m", "pipeproof", "check", plan, "--format", form, text=False)
    printed = (result.stdout + result.stderr).decode("utf-8")
    assert result.returncode == 1
    assert "plan-" in printed
    assert "Traceback" not in printed
    if form != "text":
        json.loads(result.stdout)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RecursionError("maximum recursion depth exceeded"), "RecursionError: maximum recursion depth exceeded"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), "UnicodeEncodeError: "),
        (ValueError("a\nb" + 5000 * "c"), "ValueError: a b" + 290 * "c"),
        (MemoryError(), "out of memory"),
    ],
)
def test_an_error_that_no_command_foresees_is_three_lines(error, words, monkeypatch):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(cli.main.commands["simulate"], "callback", fail)
    result = invoke("simulate", PLAN)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) <= 3
    assert ("please report it" in result.stderr) != isinstance(error, MemoryError)
