"""The README is one screen and a half: what it is for, five questions as commands, ten lines of Python, the rooms."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeproof.cli.main import main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_first_paragraph_is_one_sentence_and_it_fits():
    (opening,) = re.findall(r"\A# pipeproof\n\n(.*?)\n\n", TEXT, re.DOTALL)
    assert len(re.findall(r"\.(?:\s|$)", opening)) == 1
    assert len(TEXT.splitlines()) <= 80


def test_its_python_is_ten_lines():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    ast.parse(code)
    assert len([line for line in code.splitlines() if line.strip()]) == 10


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


def test_all_five_questions_have_a_command():
    assert [command[0] for command in COMMANDS] == ["check", "tune", "job", "simulate", "run"]


def outline(text):
    """Levels of the headings with what stands below each: code blocks, targets of links, code in tables."""
    parts = re.split(r"^(#+) .*$", text, flags=re.MULTILINE)[1:]
    return [
        (level, re.findall(r"^```.*?^```$", body, re.DOTALL | re.MULTILINE), sorted(targets(body)))
        for level, body in zip(parts[::2], parts[1::2], strict=True)
    ]


def targets(text):
    return {link for link in re.findall(r"\]\((\S+?)\)", text) if "README" not in link}


def test_the_chinese_readme_has_the_commands_the_sections_and_the_links():
    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")
    assert outline(chinese) == outline(TEXT)
    assert "(README.zh.md)" in TEXT
    assert "(README.md)" in chinese
