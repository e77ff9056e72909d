"""``pipeproof schedule list`` and ``show``: the picture, its figures, the formats, and options that cannot be meant."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from pipeproof.cli import schedule_show
from pipeproof.comm.generated_schedule import plan_schedule, sample_plan, stage_costs
from pipeproof.schedule.formats.read_schedule import write_schedule
from pipeproof.schedule.kinds import SCHEDULE_KINDS, ScheduleKind
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import asap
from pipeproof.verify.schedule_verdict import Outcome, ScheduleVerdict
from tests.cli.commands import invoke

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
SIZES = ("-p", 4, "-m", 8)


def schema(name):
    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.schema.json").read_text()))


def shown(kind, *options):
    result = invoke("schedule", "show", kind, *options)
    assert result.exit_code == 0, result.output
    return result.stdout


def times(**costs):
    return [word for name, time in costs.items() for word in ("--set", f"cost.{name}_us={time}")]


UNIT = times(forward=1, backward_input=1, backward_weight=1)


def refused(kind, *options):
    result = invoke("schedule", "show", kind, *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    return re.sub(r"\s+", " ", re.split(r"error(?:\[PP\d+\])?: ", result.stderr)[1])


def generated(kind, *, p=4, m=8, **options):
    return plan_schedule(sample_plan(kind, p, m, num_chunks=SCHEDULE_KINDS[kind].min_chunks, **options).spec)


# --- list ---


def test_the_list_has_every_kind_with_its_title_and_variants():
    result = invoke("schedule", "list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    names = [line.split()[0] for line in lines if re.match(r"\w+ .* {2}", line)]
    assert names == ["kind", *SCHEDULE_KINDS]
    for kind in SCHEDULE_KINDS.values():
        assert f"    {kind.title}" in lines
        assert all(f"{variant}: " in result.stdout for variant in kind.variants)
    facts = {line.split()[0]: re.split(" {2,}", line) for line in lines if line}
    assert "I W" in facts["zb_h1"]
    assert "B I W F+B" in facts["dualpipe_v"]
    assert "both ways" in facts["chimera"]
    assert "2 or more" in facts["interleaved"]


# --- show: the grid ---


def test_the_grid_of_1f1b(check_golden, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    check_golden("schedule_1f1b.txt", shown("1f1b", *SIZES))


def test_the_figures_are_those_of_asap_and_latency_counts():
    for latency, makespan in ((0, 33), (1, 49)):
        text = shown("1f1b", *SIZES, *UNIT, *times(p2p_latency=latency))
        assert f"step time {makespan}, " in text
    assert re.search(r"^0 +49 +24 ", text, re.MULTILINE)


def test_a_schedule_is_named_robust_or_conditional_with_the_reason():
    assert "deadlock: robust: no deadlock under any of" in shown("gpipe", *SIZES)
    conditional = " ".join(shown("1f1b", *SIZES).split())
    assert re.search(r"deadlock: conditional: safe on paddle-gloo, but deadlocks under \d+ of \d+ channel models: one "
                     r"FIFO per .* at rendezvous", conditional)  # fmt: skip
    assert "deadlock" not in shown("1f1b", *SIZES, "--no-check")


def test_a_schedule_that_does_not_pass_fails_the_command(monkeypatch):
    from pipeproof.diagnostics.finding import Finding, Severity

    wrong = ScheduleVerdict("paddle-gloo", (Finding("PP401", Severity.ERROR, "a circle"),), ())
    monkeypatch.setattr(schedule_show, "check_schedule", lambda plan: wrong)
    assert wrong.outcome is Outcome.WRONG
    for form in ("text", "json"):
        result = invoke("schedule", "show", "gpipe", *SIZES, "--format", form)
        assert result.exit_code == 1
        assert "a circle" in result.stdout


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_every_kind_is_shown_with_a_row_for_each_rank_that_fits(kind, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(kind, *SIZES, "--no-check")
    rows = re.findall(r"^rank \d (.*)$", text, re.MULTILINE)
    assert len(rows) == 4
    assert len({len(row) for row in rows}) == 1
    assert all(len(line) <= 80 for line in text.splitlines()[1:])


# --- show: formats ---


def test_fleets_format_takes_fleets_variant():
    """With 10 micro-batches on 4 ranks Fleet starts with a group of 6, PyTorch with one of 5."""
    sizes = ("-p", 4, "-m", 10, "-v", 2)
    fleet = shown("interleaved", *sizes, "--as", "fleet")
    assert fleet == write_schedule(generated("interleaved", m=10, variant="fleet"), "fleet")
    assert fleet.startswith("f0_vp0;f1_vp0;f2_vp0;f3_vp0;f4_vp0;f5_vp0;f0_vp1;")
    theirs = shown("interleaved", *sizes, "--as", "fleet", "--set", "schedule.variant=torch")
    assert theirs.startswith("f0_vp0;f1_vp0;f2_vp0;f3_vp0;f4_vp0;f0_vp1;")
    assert "interleaved (torch), " in shown("interleaved", *sizes, "--no-check")


def test_what_a_format_cannot_say_is_refused():
    assert "--as fleet: 0I0 is a part of a backward" in refused("zb_h1", *SIZES, "--as", "fleet")
    assert "--as csv: 0F0.s0 " in refused("seq1f1b", *SIZES, "--set", "schedule.num_sequence_splits=2", "--as", "csv")


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_json_fits_its_schema_and_has_the_programs_with_their_times(kind):
    content = json.loads(shown(kind, *SIZES, "--format", "json", *times(p2p_latency="1/3")))
    schema("schedule").validate(content)
    spec = sample_plan(
        kind, 4, 8, num_chunks=SCHEDULE_KINDS[kind].min_chunks, variant=content["variant"],
        cost={"p2p_latency_us": "1/3"},
    ).spec  # fmt: skip
    timed = asap(plan_schedule(spec), stage_costs(spec))
    assert content["verdict"]["outcome"] in ("robust", "conditional")
    for rank, own in enumerate(content["ranks"]):
        assert [op["op"] for op in own["ops"]] == [*map(str, timed.programs[rank])]
        assert [op["start"] for op in own["ops"]] == [*map(float, timed.starts[rank])]
        assert [op["end"] for op in own["ops"]] == [*map(float, timed.ends[rank])]
        assert sum(op["overlaps"] for op in own["ops"]) == 2 * len(plan_schedule(spec).pairs_of(rank))
        assert own["busy"] == timed.busy(rank)
        assert own["peak_activations"] == timed.peak(rank)
        assert own["peak_activations_at_i"] == timed.peak(rank, OpKind.BACKWARD_INPUT)


@given(
    st.sampled_from(sorted(SCHEDULE_KINDS)),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from(["grid", "csv", "json"]),
)
@settings(max_examples=40)
def test_whatever_the_sizes_it_is_shown_or_refused_with_a_value_that_fits(kind, p, m, form):
    result = invoke("schedule", "show", kind, "-p", p, "-m", m, "--format", form)
    if result.exit_code:
        assert result.exit_code == 2
        if "--format" not in result.stderr:
            assert "help: " in result.stderr
    else:
        assert result.stdout


# --- show: contradictory options ---


def test_an_unknown_kind_names_the_nearest():
    assert "there is no schedule 'zbh1'; did you mean zb_h1?" in refused("zbh1", *SIZES)
    assert "`pipeproof schedule list` has them all" in refused("nonsense", *SIZES)
    assert "there is no schedule 'file'" in refused("file", *SIZES)


@pytest.mark.parametrize("form", [(), ("--format", "json"), ("--as", "svg"), ("--as", "csv")], ids=" ".join)
@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_a_huge_schedule_is_refused_before_it_is_generated(monkeypatch, kind, form):
    monkeypatch.setattr(ScheduleKind, "generate", lambda *_: pytest.fail("it was generated"))
    message = refused(kind, "-p", 512, "-m", 99_328, *form)
    assert re.search(r"\d{2,3},\d{3},\d{3} (computations|operations)", message)
