"""The README is one screen and a half: its purpose, five questions as commands, ten lines of Python, the rooms."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeproof.cli.main import main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_map_names_rooms_and_files_that_exist():
    rooms = re.findall(r"^\| `(\w+)` \| .* \| `(\S+)` \|$", TEXT, re.MULTILINE)
    assert len(rooms) == 8
    for room, first in rooms:
        assert first.startswith(f"{room}/")
        assert (ROOT / "pipeproof" / first).is_file()


_FEWER = ("--top", "1", "--workers", "1", "--fix", "tp=4", "--fix", "pp=4", "--fix", "mbs=1")
"""Fewer layouts: the answer is tested elsewhere."""
COMMANDS = [
    shlex.split(line, comments=True)[1:] for line in re.findall(r"^\$ (\.venv/bin/pipeproof .*)$", TEXT, re.MULTILINE)
]


@pytest.mark.parametrize("command", [each for each in COMMANDS if each[0] not in ("job", "run")], ids=" ".join)
def test_its_commands_answer(command, tmp_path, monkeypatch):
    """Those that start processes, or read a directory of the reader's, are tested elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    result = CliRunner().invoke(main, [*command, *_FEWER] if command[0] == "tune" else command)
    assert result.exit_code == (1 if command[0] == "check" else 0), result.output  # the strategy is undecided
