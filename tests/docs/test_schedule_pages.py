"""The pages of schedules are current, their figures true, their plans pass and their commands run."""

import json
import re
import shlex
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
import yaml
from click.testing import CliRunner

from pipeproof.cli.main import main
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.schedule.programs import UnfitSizesError
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.verify.check_plan import check
from tests.cli.commands import invoke
from tests.plans import plan_dict

ROOT = Path(__file__).parents[2]
KINDS = list(SCHEDULE_KINDS)


@pytest.fixture(scope="module")
def docs(validation_script):
    """The scripts that make the pages."""
    names = ("make_schedules", "schedule_page", "closed_forms", "known_forms", "shown_schedule", "sizes_and_times")
    return SimpleNamespace(**{name: validation_script(name) for name in names})


@pytest.fixture(scope="module")
def made(docs):
    """The pages and the pictures of all kinds, by kind."""
    return SimpleNamespace(**dict(zip(("pages", "pictures"), docs.make_schedules.schedule_pages(), strict=True)))


def test_the_text_of_a_page_is_the_docstring_of_the_generator(docs):
    note = docs.schedule_page.note(SCHEDULE_KINDS["dualpipe_v"])
    assert "equal stages without latency" in note
    assert ":\n\n    2pF + max(pF, (p - 1) I)" in note
    assert "``" not in note


def test_the_list_compares_schedules_of_the_same_work(docs):
    """Each rank computes 8 micro-batches of 3 time units, whatever its stages, copies and pieces."""
    for kind in SCHEDULE_KINDS.values():
        shown = docs.shown_schedule.Shown(kind)
        assert {figures.busy_us for figures in shown.figures} == {24}


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_of_a_page_passes_check(kind, made, tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", made.pages[kind], re.DOTALL)
    plan = tmp_path / "plan.yaml"
    plan.write_text(text)
    report = check(load_plan(plan))
    assert report.errors == ()
    conditional = "**Conditional**" in made.pages[kind]
    assert bool({finding.code for finding in report.findings} & {"PP411", "PP412"}) == conditional


def test_the_schedules_of_ones_own_that_are_shown_pass_check():
    """On the page of schedules from files; a block lays its keys over a small plan."""
    text = (ROOT / "docs" / "schedules-from-files.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "programs:" in block]
    assert len(blocks) == 3
    for block in blocks:
        plan = plan_from_dict(plan_dict(**yaml.safe_load(block)))
        assert check(plan).errors == ()


def commands(text):
    """The command lines of a page, in blocks and in code quotes."""
    lines = [line for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`(pipeproof schedule show \w+ -p [^`]*)`", text)
    return sorted({line.removeprefix("$ ") for line in lines})


@pytest.mark.parametrize("kind", KINDS)
def test_the_commands_of_a_page_run(kind, made, tmp_path, monkeypatch):
    page = made.pages[kind]
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "plan.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    there = commands(page)
    assert len(there) > 3
    for line in there:
        name, *arguments = shlex.split(line)
        assert name == "pipeproof"
        quick = ["--no-check"] if arguments[:2] == ["schedule", "show"] else []
        done = invoke(*arguments, *quick)
        assert done.exit_code == 0, f"{line}: {done.output}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_beside_a_form_shows_its_case(kind, docs):
    for form in docs.known_forms.closed_forms(kind):
        for case in filter(None, (form.inside, form.outside)):
            _, *arguments = case.command("--format", "json", "--no-check")
            shown = json.loads(CliRunner().invoke(main, arguments).stdout)
            timed = case.timed()
            assert Fraction(str(shown.get("makespan_exact", shown["makespan"]))) == timed.makespan
            assert [rank["peak_activations"] for rank in shown["ranks"]] == [timed.peak(r) for r in range(case.p)]


def grid(docs, kind):
    """Sizes and times for which there is a schedule."""
    about = SCHEDULE_KINDS[kind]
    chunks = {about.min_chunks, min(about.max_chunks or 3, 3)}
    splits = (1, 3) if about.splits_sequences else (1,)
    overlapped = (None, 4, Fraction(3, 2)) if kind.startswith("dualpipe") else (None,)
    limits = (None, 2) if kind == "optimal" else (None,)
    num_ranks, num_micro_batches = ((1, 2, 3, 4), (1, 2, 5, 8, 9)) if kind != "optimal" else ((1, 3), (2, 4))
    sizes = [(p, m, v, k) for p in num_ranks for m in num_micro_batches for v in chunks for k in splits]
    for p, m, v, k in sizes:
        case = docs.sizes_and_times.Case(kind, p, m, v, k)
        for times in ({}, {"i": 2, "c": 1}, {"f": 3, "w": 2}, {"f": 2, "i": 3, "w": Fraction(9, 2)}):
            for d in overlapped:
                yield from (replace(case, **times, d=d, memory_limit=limit) for limit in limits)
        if kind != "seq1f1b":
            uneven = tuple(1 + (3 * stage) % 4 for stage in range(p * v))
            yield replace(case, f=uneven, i=uneven[::-1], memory_limit=limits[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_closed_forms_hold_wherever_their_condition_does(kind, docs):
    forms = docs.known_forms.closed_forms(kind)
    num_held = dict.fromkeys(forms, 0)
    for case in grid(docs, kind):
        try:
            timed = case.timed()
        except UnfitSizesError:
            continue
        for form in forms:
            if form.fits(case):
                assert form.holds(case, timed), (form.formula, case)
                num_held[form] += 1
    assert all(num_held.values())


@pytest.mark.parametrize("kind", KINDS)
def test_closed_forms_hold_inside_and_fail_outside(kind, docs):
    for form in docs.known_forms.closed_forms(kind):
        assert form.fits(form.inside)
        timed = form.inside.timed()
        assert form.holds(form.inside, timed)
        if form.relation != "=":
            ranks = range(form.inside.p if form.by_rank else 1)
            assert all(form.true_value(timed, rank) == form.formula_value(form.inside, rank) for rank in ranks)
        if form.outside is None:
            assert form.condition == "True" or form.quantity.startswith("peak")
            continue
        as_equation = replace(form, relation="=")
        assert not as_equation.holds(form.outside, form.outside.timed())
        assert form.fits(form.outside) == (form.relation != "=")


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_has_every_computation_at_its_place(kind, docs, made):
    """Block by block as in the program, from left to right by time; of a pair the forward above the backward."""
    timed = docs.shown_schedule.Shown(SCHEDULE_KINDS[kind]).case.timed()
    picture = ET.fromstring(made.pictures[kind])
    rows = [group for group in picture.iter(f"{SVG}g") if group.get("class") == "block"]
    assert len(rows) == len(timed.programs)
    lane = next(rect for rect in picture.iter(f"{SVG}rect") if rect.get("class") == "lane")
    begin, scale = float(lane.get("x")), float(lane.get("width")) / float(timed.makespan)
    for rank, row in enumerate(rows):
        rects = row.findall(f"{SVG}rect")
        ops, starts = timed.programs[rank], timed.starts[rank]
        assert [rect.get("class")[0] for rect in rects] == [op.kind.value for op in ops]
        for rect, start, end in zip(rects, starts, timed.ends[rank], strict=True):
            left, width = float(rect.get("x")), float(rect.get("width"))
            assert left == pytest.approx(begin + scale * float(start), abs=0.01)
            assert width == pytest.approx(scale * float(end - start) - 1, abs=0.01)
        labels = "".join(text.text for text in row.findall(f"{SVG}text"))
        assert labels == "".join(
            f"{op.kind.value}{op.micro_batch}{'' if op.split is None else f'.{op.split}'}" for op in ops
        )
