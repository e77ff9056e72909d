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


def test_there_is_one_for_each_kind_of_user():
    assert [path.stem for path in NOTEBOOKS] == [
        "fleet_user", "megatron_user", "pytorch_user", "schedule_researcher", "test_engineer",
    ]  # fmt: skip


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_short_and_loads_nothing_from_elsewhere(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = notebook["cells"]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert text_of(cells[0]).startswith("# ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert 4 <= len(code) <= 8
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert path.stat().st_size < 60_000
    assert not re.search(r"(href|src)\s*=\s*[\\\"']+https?:", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_somewhere(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    links = [
        link for cell in cells if cell["cell_type"] == "markdown" for link in re.findall(r"\]\((.*?)\)", text_of(cell))
    ]
    assert links
    assert [link for link in links if not (path.parent / link.partition("#")[0]).exists()] == []


@pytest.fixture
def cell(validation_script):
    """Executes the cells in one namespace; the outputs of the last one."""

    def execute(*sources):
        namespace = {}
        return [validation_script("make_notebooks").outputs_of(source, namespace, 1) for source in sources][-1]

    return execute


class Shown:
    def _repr_html_(self):
        return "<b>1</b>\n<b>2</b>"

    def __repr__(self):
        return "<shown>"


def test_a_cell_shows_what_it_prints_and_its_last_expression(cell):
    printed, result = cell("x = 2", "print('a')\nprint('b')\nx + 1")
    assert printed == {"name": "stdout", "output_type": "stream", "text": ["a\n", "b\n"]}
    assert result["data"] == {"text/plain": ["3"]}
    assert cell("x = 1") == cell("None") == cell("") == []


def test_a_result_is_shown_as_html(cell, validation_script):
    (result,) = cell("from tests.docs.test_notebooks import Shown\nShown()")
    assert result["data"] == {"text/html": ["<b>1</b>\n", "<b>2</b>"], "text/plain": ["<shown>"]}


def test_an_error_names_the_notebook_and_the_cell(validation_script, tmp_path):
    code = [{"cell_type": "code", "source": [text], "outputs": []} for text in ("x = 1", "x / 0")]
    (tmp_path / "broken.ipynb").write_text(json.dumps({"cells": code}))
    with pytest.raises(ZeroDivisionError) as raised:
        validation_script("make_notebooks").executed(tmp_path / "broken.ipynb")
    assert raised.value.__notes__ == ["broken.ipynb, code cell 2"]


def test_the_page_of_a_notebook_has_its_cells_and_outputs(validation_script):
    html = {"output_type": "execute_result", "data": {"text/html": ["<b>", "1</b>"], "text/plain": ["<one>"]}}
    plain = {"output_type": "execute_result", "data": {"text/plain": ["3"]}}
    printed = {"output_type": "stream", "text": ["a\n", "b\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {"cell_type": "code", "source": ["f()"], "outputs": [printed, html, plain]},
    ]
    page = validation_script("site_hooks").notebook_markdown({"cells": cells}, "own.ipynb")
    assert page.startswith('# Title\n\n<a href="own.ipynb" download>')
    assert "\n\nText.\n\n```python\nf()\n```\n\n```text\na\nb\n```\n\n" in page
    assert page.endswith('<div class="notebook-output"><b>1</b></div>\n\n```text\n3\n```\n')


def test_links_to_a_notebook_lead_to_its_page(validation_script):
    link = "[a](notebooks/fleet_user.ipynb)"
    assert validation_script("site_hooks").for_the_site(link, "fleet.md") == "[a](notebooks/fleet_user.md)"
