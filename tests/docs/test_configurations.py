"""Verdicts on public configurations: what is counted as which, and what the page states of the kept verdicts."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.cli.commands import EXAMPLES

EVIDENCE = Path(__file__).parents[2] / "validation" / "results"
RESULTS = json.loads((EVIDENCE / "configurations.json").read_text(encoding="utf-8"))
RECIPE = (EXAMPLES / "importing" / "automodel.yaml").read_text(encoding="utf-8")


@pytest.fixture
def tool(validation_script):
    return validation_script("make_configurations")


def test_configurations_are_counted_by_their_verdict(tool, tmp_path, capsys):
    source = next(one for one in tool.SOURCES if one.kind == "automodel")
    folder = tmp_path / source.repository / source.folder / "recipes"
    folder.mkdir(parents=True)
    texts = {
        "good": RECIPE,
        "refused": RECIPE.replace("strategy: fsdp2", "strategy: ddp"),
        "unknown": RECIPE.replace("meta-llama/Llama-3.1-70B", "someone/own-model"),
        "other": "trainer: {gpus: 8}\n",
        "single": "distributed: {pp_size: 1}\n",
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    rows = tool.verdicts_on(source, tmp_path)
    assert {row["name"]: row["outcome"] for row in rows} == {
        "recipes/good.yaml": "proved",
        "recipes/refused.yaml": "refused",
        "recipes/unknown.yaml": "blocks unknown",
    }
    assert [row.get("code") for row in rows] == [None, "PP171", "PP170"]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


def test_every_repository_has_verdicts(tool):
    assert set(RESULTS) == {source.repository for source in tool.SOURCES}
    for repository, rows in RESULTS.items():
        assert rows, repository
        assert len({row["name"] for row in rows}) == len(rows)
        assert {row["outcome"] for row in rows} <= set(tool.OUTCOMES)


def test_all_functional_tests_of_megatron_have_a_verdict():
    assert Counter(row["outcome"] for row in RESULTS["NVIDIA/Megatron-LM"]) == {"proved": 136, "undecided": 3}
