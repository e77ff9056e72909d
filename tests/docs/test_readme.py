"""The README is one screen and a half: what it is for, five questions as commands, ten lines of Python, the rooms."""

import ast
import re
from pathlib import Path

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
