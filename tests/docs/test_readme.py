"""The README is one screen: two sentences, a picture, installation, five commands, ten lines of Python, where next."""

import ast
import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_its_parts_and_their_lengths():
    opening = TEXT.partition("## ")[0]
    assert len(re.findall(r"[^.]\.(?:\s|$)", opening)) == 2
    assert re.findall(r"^## (.*)", TEXT, re.MULTILINE) == [
        "Install and try",
        "Train your own modules",
        "Where to go next",
    ]
    assert len(re.findall(r"!\[", TEXT)) == 1
    assert len(re.findall(r"^\$ \S*pipeproof ", TEXT, re.MULTILINE)) == 5
    assert len(TEXT.splitlines()) <= 60


def test_its_python_is_ten_lines():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    ast.parse(code)
    assert len([line for line in code.splitlines() if line.strip()]) == 10
