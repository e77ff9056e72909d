"""The structure that CONTRIBUTING.md describes, as far as import contracts do not keep it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def counts(validation_script):
    return validation_script("counts")


@pytest.mark.needs("grimp")
def test_no_modules_import_each_other(counts):
    graph = counts.import_graph(ROOT)
    assert ("pipeproof.verify.check_plan", "pipeproof.verify.registry") in graph.edges
    assert counts.circles(graph) == []


@pytest.mark.needs("grimp")
def test_circles_are_found(counts):
    graph = counts.nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])
    assert counts.circles(graph) == [["a", "b", "c"]]


LINES, PARAMETERS = 60, 10
LONGER = {}
"""Functions that are still longer, with the lines that they may have. No function may be added."""
WIDER = {
    "analysis/tune/search_layouts.py:tune": 12,
    "api/tune_result.py:tune": 11,  # a public function
    "exec/monitor/ring.py:RingWriter.issue": 16,
    "exec/rank/adapter.py:RankAdapter.__init__": 11,
    "exec/train/paddle/pipeline.py:Pipeline.__init__": 12,  # the public constructor
    "exec/train/torch/pipeline.py:Pipeline.__init__": 26,  # the public constructor
    "exec/train/train_rank.py:TrainRank.__init__": 11,
}
"""Functions with more parameters, and how many they may have. Options of a command are its help, and do not count."""


def functions():
    """Place, lines without the docstring, and parameters without ``self`` of each function that is not a command."""
    for path in sorted((ROOT / "pipeproof").rglob("*.py")):
        waiting = [("", ast.parse(path.read_text(encoding="utf-8")))]
        while waiting:
            outer, node = waiting.pop()
            for inner in ast.iter_child_nodes(node):
                name = f"{outer}{inner.name}" if hasattr(inner, "name") and hasattr(inner, "body") else outer
                waiting.append((f"{name}." if name != outer else outer, inner))
                if isinstance(inner, ast.FunctionDef):
                    yield f"{path.relative_to(ROOT / 'pipeproof')}:{name}", *size(inner)


def size(function):
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is not None:
        lines -= function.body[0].end_lineno - function.body[0].lineno + 1
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    is_command = any("click" in text or ".command" in text for text in map(ast.unparse, function.decorator_list))
    return lines, 0 if is_command else len([name for name in names if name not in ("self", "cls")])


def test_no_function_is_long_or_takes_many_parameters():
    sizes = {place: numbers for place, *numbers in functions()}
    assert len(sizes) > 5_000
    assert {place: lines for place, (lines, _) in sizes.items() if lines > LONGER.get(place, LINES)} == {}
    assert {place: number for place, (_, number) in sizes.items() if number > WIDER.get(place, PARAMETERS)} == {}
    assert [place for place in LONGER if place not in sizes or sizes[place][0] <= LINES] == []
    assert [place for place in WIDER if place not in sizes or sizes[place][1] <= PARAMETERS] == []


MODULES_OF_CHECK = 130


def test_check_loads_few_modules():
    """An example with a generated schedule needs no reader of schedules, no importer and no simulator."""
    program = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules)); from pipeproof.cli.main import main; main()"
    )
    command = [sys.executable, "-c", program, "check", str(ROOT / "examples" / "gpt_pp4.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = [name for name in run.stdout.splitlines()[-1].split() if name.split(".")[0] == "pipeproof"]
    assert 20 < len(modules) <= MODULES_OF_CHECK, sorted(modules)
