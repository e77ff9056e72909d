"""The page of promises: its tests exist and assert, and its figures show that all attacks were handled."""

import ast
import importlib
import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "validation" / "results" / "hardening.md").read_text()
TRIED, PROMISES = PAGE.split("## Promises")
ROWS = [line.strip("|").split(" | ") for line in PROMISES.splitlines() if line.startswith("| ")][2:]
"""Promise and tests of each row."""
ENVIRONMENTS = ("disk", "signals", "users")
NODES = sorted({node for _, tests in ROWS for node in tests.strip().split("<br>")})


@cache
def functions(file):
    """Functions of a module by name."""
    return {node.name: node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def asserts(function, module):
    """Return True if a function has an assertion, or calls a function of its module that has one."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr == "raises"):
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in module:
            helper = module[node.func.id]
            if any(isinstance(part, ast.Assert) for part in ast.walk(helper)):
                return True
    return False


def test_every_sentence_of_the_page_is_a_promise_with_tests():
    assert len(ROWS) > 15
    for row in ROWS:
        assert len(row) == 2
        promise, tests = row
        assert promise.strip().endswith(".")
        assert all(re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`", node) for node in tests.strip().split("<br>")), promise
    prose = [line for line in PROMISES.splitlines() if line and not line.startswith(("|", "#"))]
    assert len(prose) == 1  # the table's introduction; promises are in the table


@pytest.mark.parametrize("node", NODES)
def test_the_test_of_a_promise_exists_and_asserts(node):
    file, name = node.strip("`").split("::")
    module = functions(file)
    assert name in module
    assert asserts(module[name], module)
    marks = {ast.unparse(mark) for mark in module[name].decorator_list}
    assert not any("skip" in mark or "xfail" in mark for mark in marks)


def test_all_that_was_tried_was_handled():
    results = json.loads((ROOT / "validation" / "results" / "hardening.json").read_text())
    assert all(row["problem"] is None for row in results["limits"])
    for tool in ("strangers", *ENVIRONMENTS):
        assert all(run["problem"] is None for run in results[tool]["runs"]), tool
    assert results["fuzz"]["not_handled"] == 0
    for where in ("", "_on_gpus"):
        kills, starts = results[f"kills{where}"], results[f"starts{where}"]
        assert (kills["equal"], kills["processes_left"]) == (kills["kills"], 0)
        assert starts["passed"] == starts["starts"]
    assert sum(results[f"kills{where}"]["kills"] for where in ("", "_on_gpus")) >= 100
    assert sum(results[f"starts{where}"]["starts"] for where in ("", "_on_gpus")) >= 200
    assert results["soak"]["status"] == 0


def test_the_environments_are_of_every_command(monkeypatch):
    for folder in ("hardening", "pages"):
        monkeypatch.syspath_prepend(str(ROOT / "validation" / folder))
    commands = {words for words, _ in importlib.import_module("make_options").commands()}
    results = json.loads((ROOT / "validation" / "results" / "hardening.json").read_text())
    attacked = {"of the tool": [command.words for command in importlib.import_module("environments").COMMANDS]}
    attacked |= {tool: [run["command"] for run in results[tool]["runs"]] for tool in ENVIRONMENTS}
    for tool, of_tool in attacked.items():
        missing = {words for words in commands if not any(f"{each} ".startswith(f"{words} ") for each in of_tool)}
        assert not missing, tool
