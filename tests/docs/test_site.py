"""What makes a site of the pages, without the site's own tools; ``make site`` runs it with them, strictly."""

import importlib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Takes the names of Python objects that only the site's tools know."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@pytest.fixture(scope="module")
def hooks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS.parent / "validation" / "pages"))
        yield importlib.import_module("site_hooks")


@pytest.fixture(scope="module")
def nav():
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]


def leaves(items):
    for item in items:
        value = next(iter(item.values())) if isinstance(item, dict) else item
        if isinstance(value, list):
            yield from leaves(value)
        else:
            yield value


def test_the_navigation_has_every_page_once(hooks, nav):
    listed = list(leaves(hooks.expanded(nav, DOCS)))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if path.parent.name != "notes"}
    pages |= {hooks.place_of(path.relative_to(ROOT).as_posix()) for path in DOCS.glob("notebooks/*.ipynb")}
    assert set(listed) == pages | set(hooks.OF_THE_ROOT.values()), "give the page a place in `nav` of mkdocs.yml"
    assert len(listed) == len(set(listed))


def test_a_directory_in_the_navigation_is_its_pages_the_index_first(hooks, tmp_path):
    (tmp_path / "rules").mkdir()
    pages = {
        "B.md": "text",
        "A.md": "<!-- made -->\n\n# A: `x` fault",
        "README.md": "# Codes\n## 1",
        "C.md": "# `c`: x",
    }
    for name, text in {**pages, "picture.svg": "# no page"}.items():
        (tmp_path / "rules" / name).write_text(text)
    nav = [{"Home": "index.md"}, {"More": [{"Codes": "rules/"}]}]
    rules = [
        {"Codes": "rules/README.md"},
        {"A: x fault": "rules/A.md"},
        {"B": "rules/B.md"},
        {"c": "rules/C.md"},
    ]
    assert hooks.expanded(nav, tmp_path) == [{"Home": "index.md"}, {"More": [{"Codes": rules}]}]


@pytest.mark.parametrize(
    ("page", "there", "on_the_site"),
    [
        ("plan.md", "deadlock.md#events", "deadlock.md#events"),
        ("plan.md", "../pipeproof/cli/main.py", "source/pipeproof/cli/main.py.txt"),
        ("plan.md", "../validation/pages/make_rules.py", "source/validation/pages/make_rules.py.txt"),
        ("zh/tutorial.md", "../plan.md", "../plan.md"),
        ("rules/PP201.md", "../../examples/gpt_pp4.yaml", "../source/examples/gpt_pp4.yaml.txt"),
        ("rules/PP201.md", "../../CHANGELOG.md", "../changelog.md"),
        ("index.md", "docs/images/check.svg", "images/check.svg"),
        ("index.md", "docs/schedules/README.md", "schedules/README.md"),
        ("index.md", "pipeproof/specs/plan.py", "source/pipeproof/specs/plan.py.txt"),
        ("changelog.md", "docs/plan.md", "plan.md"),
        ("plan.md", "#here", "#here"),
        ("plan.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_lead_to_the_same_place_on_the_site(page, there, on_the_site, hooks):
    assert hooks.for_the_site(f"see [this]({there}), twice [this]({there})", page) == (
        f"see [this]({on_the_site}), twice [this]({on_the_site})"
    )


def test_the_first_page_links_to_the_page_for_a_browser_below_its_heading(hooks):
    shown = hooks.with_play("# pipeproof\n\nText.\n", "index.md").splitlines()
    assert (shown[0], shown[-1]) == ("# pipeproof", "Text.")
    assert f'href="{hooks.PLAY}"' in shown[2]
    assert hooks.with_play("# Other\n", "tutorial.md") == "# Other\n"


def test_code_is_left_as_it_is(hooks):
    block = "```python\nvalues[0](plan.md)\n| `a\\|b` |\n```\n"
    assert hooks.for_the_site(block, "rules/PP201.md") == block
    assert hooks.linked_paths(block + "[a](../README.md)", "plan.md") == {"README.md"}


def test_bars_in_code_are_escaped_in_tables_for_code_hosts_only(hooks):
    row = "| `a \\| b` | c \\| d | `e` |"
    assert hooks.for_the_site(row, "plan.md") == "| `a | b` | c \\| d | `e` |"
    assert hooks.for_the_site("`a \\| b`", "plan.md") == "`a \\| b`"


def test_public_names_are_those_that_the_packages_export(hooks):
    names = hooks.public_names()
    assert {
        "pipeproof.check",
        "pipeproof.testing.check_transport",
        "pipeproof.interop.from_strategy",
        "pipeproof.interop.traces.check_log",
    } <= set(names)
    assert "pipeproof.__version__" not in names
