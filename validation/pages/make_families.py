"""Write ``results/families.md`` from ``results/families.json``, the figures of ``validation/families.py``.

``python validation/pages/make_families.py`` writes, ``--check`` exits 1 if the page is stale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pages import EVIDENCE, fill, main, table

RESULTS = json.loads((EVIDENCE / "families.json").read_text(encoding="utf-8"))

KINDS = {
    "right": "loss and all gradients have the bits",
    "bound": "all but gradients of weights that several stages share, which are added in another order",
    "refused": "by the cut",
    "WRONG": "other bits",
    "crash": "any other error",
    "not built": "the config class makes no tiny model from the common sizes, or it does not train by itself",
}
_SCHEDULES = ("1f1b", "interleaved", "zb_v")


def kind_of(row: dict[str, str]) -> str:
    """Return the worst result of a family under all schedules, without its text."""
    found = {row[schedule].split(":")[0] for schedule in _SCHEDULES}
    return next(kind for kind in ("WRONG", "crash", "refused", "not built", "bound", "right") if kind in found)


def names(kind: str) -> str:
    """Return the families with a result, as a list in a sentence."""
    return ", ".join(row["name"] for row in RESULTS["rows"] if kind_of(row) == kind) or "none"


def counts() -> str:
    """Return the numbers of families by result, before and now."""
    after = [kind_of(row) for row in RESULTS["rows"]]
    rows = [(kind, f"{RESULTS['before'].get(kind, 0)}", f"{after.count(kind)}", text) for kind, text in KINDS.items()]
    return table(("result", "families before", "families now", "meaning"), rows)


def others() -> str:
    """Return the text of each family that is not trained."""
    rows = []
    for row in RESULTS["rows"]:
        if kind_of(row) not in ("right", "bound"):
            by_text: dict[str, list[str]] = {}
            for schedule in _SCHEDULES:
                by_text.setdefault(row[schedule], []).append(schedule)
            rows += [(row["name"], ", ".join(by_text[text]), _shortened(text)) for text in by_text]
    return table(("family", "schedules", "result"), rows)


def _shortened(text: str) -> str:
    return text.split(" Known models:")[0].replace("<", "&lt;")


def pages() -> dict[Path, str]:
    """Return the page."""
    page = EVIDENCE / "families.md"
    versions = f"transformers {RESULTS['transformers']}, PyTorch {RESULTS['torch']}."
    lists = {kind: names(kind) + "." for kind in ("right", "bound")}
    return {page: fill(page, {"versions": versions, "counts": counts(), **lists, "others": others()})}


if __name__ == "__main__":
    sys.exit(main("validation/pages/make_families.py", pages()))
