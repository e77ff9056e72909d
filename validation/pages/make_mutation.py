"""Writes the generated part of ``docs/mutation.md``: scores and survivors.

``python validation/pages/make_mutation.py`` writes, ``--check`` exits 1 if it is stale. It
reads the results of ``make mutants`` in ``tests/mutation/results.json`` and the
explanations in ``tests/mutation/survivors.yaml``; it runs no mutant.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import yaml
from pages import DOCS, ROOT, fill, main, table

RESULTS = ROOT / "tests" / "mutation" / "results.json"
SURVIVORS = ROOT / "tests" / "mutation" / "survivors.yaml"


def scores_part() -> str:
    """Table with a row for each file and their sum."""
    explained = {(entry["file"], name) for entry in _explanations() for name in entry["names"]}
    rows = []
    total = [0, 0, 0]
    for file, result in _results().items():
        unread = [name for name in result["survivors"] if (file, name) not in explained]
        counts = result["num_mutants"], result["num_mutants"] - len(result["survivors"]), len(unread)
        total = [sum(pair) for pair in zip(total, counts, strict=True)]
        rows.append(_row(f"`{file}`", *counts))
    rows.append(_row("total", *total))
    return table(("file", "mutants", "killed", "score", "not explained"), rows)


def _row(name: str, num_mutants: int, num_killed: int, num_unread: int) -> tuple[str, ...]:
    return name, str(num_mutants), str(num_killed), f"{num_killed / num_mutants:.1%}", str(num_unread or "")


def survivors_part() -> str:
    """List of the survivors by file, with the reasons."""
    parts = []
    for entry in _explanations():
        listed = "".join(f"- ``{name}``\n" for name in entry["names"])
        parts.append(f"`{entry['file']}`: {' '.join(entry['why'].split())}\n\n{listed}")
    return "\n".join(parts)


def _explanations() -> list[dict[str, Any]]:
    explanations: list[dict[str, Any]] = yaml.safe_load(SURVIVORS.read_text(encoding="utf-8"))
    return explanations


def _results() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


if __name__ == "__main__":
    page = DOCS / "mutation.md"
    wanted = {page: fill(page, {"scores": scores_part(), "survivors": survivors_part()})}
    sys.exit(main("validation/pages/make_mutation.py", wanted))
