"""The notebooks of ``docs/notebooks``: executed cell by cell, as Jupyter does, with the outputs that are stored."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def text_of(cell):
    return "".join(cell["source"])


@pytest.mark.slow(but=["test_engineer", "schedule_researcher"])
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_cells_give_the_outputs_that_are_stored(validation_script, path):
    assert validation_script("make_notebooks").executed(path) == path.read_text(encoding="utf-8"), (
        "stale; run `python validation/pages/make_notebooks.py`"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_somewhere(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    links = [
        link for cell in cells if cell["cell_type"] == "markdown" for link in re.findall(r"\]\((.*?)\)", text_of(cell))
    ]
    assert links
    assert [link for link in links if not (path.parent / link.partition("#")[0]).exists()] == []
