"""The page of promises: each has a test that exists, and its figures show that all that was tried was handled."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_promise_names_a_test():
    rows = re.findall(r"^\| (.+\.?) \| `(tests/[^`]+)` \|$", (ROOT / "docs" / "promises.md").read_text(), re.MULTILINE)
    assert len(rows) > 10
    for promise, test in rows:
        assert "def test_" in (ROOT / test).read_text(), promise


def test_all_that_was_tried_was_handled():
    results = json.loads((ROOT / "docs" / "hardening.json").read_text())
    assert all(row["problem"] is None for row in results["limits"])
    assert results["fuzz"]["not_handled"] == 0
    assert results["kills"]["equal"] == results["kills"]["kills"]
    assert results["kills"]["processes_left"] == 0
    assert results["starts"]["passed"] == results["starts"]["starts"]
    assert results["soak"]["status"] == 0
