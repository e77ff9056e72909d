"""Pages and pictures that are made from the code are current, and the check for that can fail."""

import html
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("script", "results"),
    [
        ("make_equality", "equality"),
        ("make_seed_experiment", "seed_experiment"),
        ("make_alignment_log", "alignment_log"),
    ],
)
def test_runs_that_a_page_shows_are_of_the_plans_as_they_are_now(validation_script, script, results):
    made = validation_script(script)
    runs = json.loads((ROOT / "validation" / "results" / f"{results}.json").read_text(encoding="utf-8"))
    measured = {name: run["plan"] for name, run in runs.get("runs", runs).items()}
    assert measured == (made.PLANS if script == "make_equality" else made.plans()), "run it with --measure"


def words(svg):
    """The words in a picture."""
    return re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]*>", "\n", svg.partition("</style>")[2])))


@pytest.mark.parametrize("name", ["check", "simulate"])
def test_pictures_show_what_the_commands_print(validation_script, name):
    make_pictures = validation_script("make_pictures")
    output = make_pictures.output_of(name)
    fresh = make_pictures.picture(name, output)
    assert fresh == make_pictures.picture(name, output), "the picture differs between two makings"
    committed = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert words(committed) == words(fresh), "stale; run `python validation/pages/make_pictures.py`"
