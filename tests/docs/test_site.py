"""What makes a site of the pages, without the site's own tools; ``make site`` runs it with them, strictly."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Loader(yaml.SafeLoader):
    """Takes the names of Python objects that only the site's tools know."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


@pytest.fixture
def hooks(validation_script):
    return validation_script("site_hooks")


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


@pytest.fixture
def generated(hooks, monkeypatch):
    names = ("codes/PP201", "schedules/zb_v", "results/zoo", "keys", "options")
    pages = {f"{name}.md": f"# {name}" for name in names}
    monkeypatch.setattr(hooks, "generated_pages", lambda: pages)
    return pages


def test_the_navigation_has_every_page_once(hooks, nav, generated):
    listed = list(leaves(hooks.expanded(nav, list(generated))))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | generated.keys()
    pages |= {hooks.place_of(path.relative_to(ROOT).as_posix()) for path in DOCS.glob("notebooks/*.ipynb")}
    assert set(listed) == pages | set(hooks.OF_THE_ROOT.values()), "give the page a place in `nav` of mkdocs.yml"
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("page", "text", "on_the_site"),
    [
        ("plan.md", "[PP201](codes.md#pp201)", "[PP201](codes/PP201.md)"),
        ("zh/tutorial.md", "[x](../codes.md#pp201)", "[x](../codes/PP201.md)"),
        ("index.md", "[x](docs/schedules.md#zb_v)", "[x](docs/schedules/zb_v.md)"),
        ("plan.md", "[x](schedules.md#convert), [y](codes.md)", "[x](schedules.md#convert), [y](codes.md)"),
        ("codes.md", '| <a id="pp201"></a>PP201 |', '| <a id="pp201"></a>[PP201](codes/PP201.md) |'),
        ("schedules.md", '| <a id="zb_v"></a>`zb_v` |', '| <a id="zb_v"></a>[`zb_v`](schedules/zb_v.md) |'),
    ],
)
@pytest.mark.usefixtures("generated")
def test_rows_of_lists_and_links_to_them_lead_to_the_generated_pages(page, text, on_the_site, hooks):
    assert hooks.with_pages(text, page) == on_the_site


@pytest.mark.parametrize(
    ("page", "there", "on_the_site"),
    [
        ("plan.md", "deadlock.md#events", "deadlock.md#events"),
        ("plan.md", "../pipeproof/cli/main.py", "source/pipeproof/cli/main.py.txt"),
        ("plan.md", "../validation/pages/make_rules.py", "source/validation/pages/make_rules.py.txt"),
        ("zh/tutorial.md", "../plan.md", "../plan.md"),
        ("codes/PP201.md", "../../examples/gpt_pp4.yaml", "../source/examples/gpt_pp4.yaml.txt"),
        ("codes/PP201.md", "../../CHANGELOG.md", "../changelog.md"),
        ("index.md", "docs/images/check.svg", "images/check.svg"),
        ("plan.md", "../validation/results/zoo.md", "results/zoo.md"),
        ("results/zoo.md", "../../docs/plan.md", "../plan.md"),
        ("results/zoo.md", "../../docs/images/run.svg", "../images/run.svg"),
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
    assert hooks.for_the_site(block, "plan.md") == block
    assert hooks.linked_paths(block + "[a](../README.md)", "plan.md") == {"README.md"}


def test_bars_in_code_are_escaped_in_tables_for_code_hosts_only(hooks):
    row = "| `a \\| b` | c \\| d | `e` |"
    assert hooks.for_the_site(row, "plan.md") == "| `a | b` | c \\| d | `e` |"
    assert hooks.for_the_site("`a \\| b`", "plan.md") == "`a \\| b`"


def test_public_names_are_those_that_the_packages_export(hooks):
    names = hooks.public_names()
    assert {
        "pipeproof.check",
        "pipeproof.testing.deliver",
        "pipeproof.interop.from_strategy",
        "pipeproof.interop.traces.check_log",
    } <= set(names)
    assert "pipeproof.__version__" not in names
