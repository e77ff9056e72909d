"""Pages and pictures that are made from the code are current, and the check for that can fail."""

import html
import re
import runpy
import sys
from pathlib import Path

import pytest

from pipeproof.specs.load_plan import load_plan
from pipeproof.verify.check_plan import check

ROOT = Path(__file__).parents[2]


@pytest.mark.slow(only=["make_published.py", "make_forms.py", "make_receives.py"])
@pytest.mark.parametrize(
    "script",
    [
        "make_rules.py",
        "make_schedules.py",
        "make_tables.py",
        "make_zoo.py",
        "make_costs.py",
        "make_measured.py",
        "make_prediction.py",
        "make_tune.py",
        "make_equality.py",
        "make_fleet.py",
        "make_reshard.py",
        "make_refused.py",
        "make_forms.py",
        "make_receives.py",
        "make_published.py",
        "make_seed_experiment.py",
        "make_alignment_log.py",
        "make_hardening.py",
        "make_families.py",
        "make_configurations.py",
        "make_hangs.py",
    ],
)
@pytest.mark.usefixtures("validation_script")  # they import each other
def test_generated_pages_are_current(script, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"validation/pages/{script}", run_name="__main__")
    assert not ended.value.code, capsys.readouterr().err


def test_a_stale_missing_or_stray_page_is_found_and_mended(validation_script, tmp_path, monkeypatch, capsys):
    pages = validation_script("pages")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page, stray = tmp_path / "rules" / "PP999.md", tmp_path / "old.md"

    def outcome(*arguments, strays=frozenset()):
        monkeypatch.setattr(sys, "argv", ["make", *arguments])
        return pages.main("docs/make.py", {page: "text\n"}, strays)

    assert outcome("--check") == 1
    assert "rules/PP999.md is stale; run `python docs/make.py`" in capsys.readouterr().err
    assert outcome() == 0
    assert outcome("--check") == 0
    page.write_text("other\n")
    assert outcome("--check") == 1
    stray.write_text("")
    assert outcome(strays=frozenset({stray})) == 0
    assert page.read_text() == "text\n"
    assert not stray.exists()
    assert outcome("--nonsense") == 2


def test_filling_a_page_wants_its_parts_and_leaves_those_of_others(validation_script, tmp_path):
    fill = validation_script("pages").fill
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- generated: one -->\nold\n<!-- end -->\nafter\n")
    assert fill(page, {"one": "new"}) == "before\n<!-- generated: one -->\n\nnew\n\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="two"):
        fill(page, {"one": "new", "two": "x"})
    assert fill(page, {}) == page.read_text()


def words(svg):
    """What a person reads in a picture."""
    return re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]*>", "\n", svg.partition("</style>")[2])))


@pytest.mark.parametrize("name", ["check", "simulate"])
def test_pictures_show_what_the_commands_print(validation_script, name):
    make_pictures = validation_script("make_pictures")
    output = make_pictures.output_of(name)
    fresh = make_pictures.picture(name, output)
    assert fresh == make_pictures.picture(name, output), "the picture differs between two makings"
    committed = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert words(committed) == words(fresh), "stale; run `python validation/pages/make_pictures.py`"


def test_the_picture_of_a_run_is_of_the_plan_as_it_is_now():
    """Its other numbers are the machine's; ``python validation/pages/make_pictures.py --run`` makes it anew."""
    digest = check(load_plan(ROOT / "examples" / "gpt_pp4.yaml")).digest
    picture = words((ROOT / "docs" / "images" / "run.svg").read_text(encoding="utf-8"))
    assert f"digest {digest[:12]}" in picture
    assert "bit for bit" in picture


@pytest.mark.parametrize("name", ["check", "simulate", "run"])
def test_pictures_load_nothing_from_elsewhere(name):
    picture = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert "@font-face" not in picture
    assert not re.search(r"(href|src|url)\s*[=(]\s*[\"']?https?:", picture)
