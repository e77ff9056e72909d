"""The hooks that make a site of the pages, without the site's own tools; ``make site`` runs them strictly."""

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


def test_public_names_are_those_that_the_packages_export(hooks):
    names = hooks.public_names()
    assert {
        "pipeproof.check",
        "pipeproof.testing.assert_plan_sound",
        "pipeproof.interop.from_strategy",
        "pipeproof.interop.traces.check_log",
    } <= set(names)
    assert "pipeproof.__version__" not in names
