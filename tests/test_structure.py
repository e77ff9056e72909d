"""The structure that CONTRIBUTING.md describes, as far as import contracts do not keep it."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "validation"))
    return importlib.import_module("counts")


@pytest.mark.needs("grimp")
def test_no_modules_import_each_other(counts):
    graph = counts.import_graph(ROOT)
    assert ("pipeproof.verify.check_plan", "pipeproof.verify.registry") in graph.edges
    assert counts.circles(graph) == []


@pytest.mark.needs("grimp")
def test_circles_are_found(counts):
    graph = counts.nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])
    assert counts.circles(graph) == [["a", "b", "c"]]
