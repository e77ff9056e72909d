"""The page `pipeproof play` in Chromium: its schedules, times and verdicts equal Python's, and it can be used."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
import yaml

from pipeproof.comm.backends import declared_backend
from pipeproof.comm.channel_models import MODELS, declared_model
from pipeproof.comm.generated_schedule import plan_schedule
from pipeproof.comm.lower import lower, lower_loaded
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.kinds import SCHEDULE_KINDS, VARIANTS
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.outcome import SimulationError
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import channel_model_of, simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.deadlock.deadlock_verdict import deadlocks
from pipeproof.views.play.play_page import LEFT_OUT, play_html
from tests.verify.deadlock_definition import events_of, stuck_events

pytestmark = pytest.mark.needs_browser

OFFERED = [
    (kind.name, variant)
    for kind in SCHEDULE_KINDS.values()
    if kind.name not in LEFT_OUT
    for variant in kind.variants or (VARIANTS[0],)
]
ROWS = """
const values = {...play.readFragment("").values, ...arguments[0]}, solved = play.solve(values);
if (solved.unfit) return {plan: play.planText(values), unfit: solved.unfit, fitting: solved.fitting};
const {graph, timed, figures} = solved;
return {
  plan: play.planText(values), isStuck: timed.isStuck, isDeadlock: solved.verdict.isStuck, figures,
  rows: graph.kind.map((_, row) => [graph.rank[row], graph.text(row), timed.starts[row], timed.ends[row]]),
  cycle: solved.verdict.cycle.map((row) => [graph.rank[row], graph.text(row)]),
  durations: Array.from(solved.durations.rows), messages: Array.from(solved.durations.messages),
  models: arguments[1] ? Array.from(play.verdicts(graph, values), ({isDeadlock}) => isDeadlock) : null,
};
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("play") / "play.html"
    path.write_text(play_html(), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, page):
    """The page with the settings that it begins with; whatever the browser complains about fails the test."""
    browser.open(page)
    browser.run("play.picture.fit(); document.getElementById('reset').click()")
    browser.settle()
    yield browser
    assert browser.complaints() == []


def plan_of_text(text):
    return plan_from_dict(yaml.safe_load(text)).spec


def lowered_plan(text):
    return lower(plan_of_text(text))


def rows_of_python(lowered, timeline):
    """Rank, text, start and end in ns of every operation; the page has the first all-reduce of a sum for all."""
    own_rank = dict(enumerate(lowered.graph.global_rank))
    return [
        [own_rank[span.rank], span.op, float(span.start * 1000), float(span.end * 1000)]
        for span in timeline.spans
        if "/" not in span.op or "/0." in span.op
    ]


def random_values(draw, kind, variant):
    """Settings of any size; half of the sizes suit the schedule if a multiple of the ranks does."""
    p = draw.randint(1, 16)
    m = draw.choice([draw.randint(1, 64), min(64, p * draw.randint(1, 4))])
    time = lambda: str(Fraction(draw.randint(1, 3_000_000), 1000) + 0.0)  # noqa: E731 - three decimals at most
    return {
        "kind": kind,
        "variant": variant,
        "p": str(p),
        "m": str(m),
        "v": str(draw.randint(1, 4)),
        "per": draw.choice(["rank", "stage"]),
        "f": time(),
        "i": time(),
        "w": time(),
        "o": draw.choice(["", time()]),
        "latency": draw.choice(["0", time()]),
        "speed": draw.choice(["", time()]),
        "hidden": str(64 * draw.randint(1, 128)),
        "seq": str(draw.randint(1, 8192)),
        "sends": draw.choice(["async", "rendezvous", "backend"]),
        "queue": draw.choice(["directed_edge", "pair", "communicator", "direction", "rank", "device"]),
        "recv": draw.choice(["just_in_time", "prefetch_one", "send_order"]),
    }


@pytest.mark.parametrize(("kind", "variant"), OFFERED)
def test_times_of_all_operations_are_those_of_python(opened, kind, variant):
    draw = random.Random(f"{kind} {variant}")
    num_compared = 0
    while num_compared < 6:
        page = opened.run(ROWS, values := random_values(draw, kind, variant), False)
        plan = plan_of_text(page["plan"])
        if "unfit" in page:
            with pytest.raises(BadPlanAtError) as refused:
                plan_schedule(plan)
            assert [finding.code for finding in refused.value.findings] == ["PP140"], values
            continue
        lowered = lower(plan)
        num_compared += 1
        assert page["isDeadlock"] == deadlocks(lowered.graph, declared_model(declared_backend(plan))), values
        if page["isStuck"]:
            with pytest.raises(SimulationError):
                simulate(lowered)
            continue
        simulation = simulate(lowered)
        assert page["rows"] == rows_of_python(lowered, simulation.timeline), values
        figures = page["figures"]
        assert figures["makespan"] == simulation.makespan * 1000
        for of_rank, expected in zip(figures["ranks"], simulation.figures, strict=True):
            assert of_rank["peak"] == expected.peak_activations
            assert of_rank["busy"] == expected.busy_us * 1000
            assert of_rank["bubble"] == expected.bubble_makespan_us * 1000


@pytest.mark.parametrize(("kind", "variant"), OFFERED)
def test_verdicts_under_all_channel_models_are_those_of_python(opened, kind, variant):
    draw = random.Random(f"verdict {kind} {variant}")
    num_compared = 0
    while num_compared < 4:
        values = {**random_values(draw, kind, variant), "m": str(draw.randint(1, 24)), "v": "2"}
        page = opened.run(ROWS, values, True)
        if "unfit" in page:
            continue
        num_compared += 1
        graph = lowered_plan(page["plan"]).graph
        assert page["models"] == [deadlocks(graph, model) for model in MODELS], values


@pytest.mark.parametrize("sends", ["async", "rendezvous", "backend"])
def test_the_step_drawn_with_noise_takes_its_durations(opened, sends):
    values = {"kind": "zb_v", "cv": "0.3", "ncv": "0.5", "seed": "7", "sends": sends}
    page = opened.run(ROWS, values, False)
    lowered = lowered_plan(page["plan"])
    undisturbed = durations_of(lowered)
    per_ns = Fraction(undisturbed.ticks_per_us, 1000)
    assert len({*page["durations"]}) > 50
    noisy = replace(
        undisturbed,
        ticks=tuple(int(ns) for ns in page["durations"]),
        message_ticks=tuple(int(ns) for ns in page["messages"]),
        ticks_per_us=1000,
    )
    outcome = run_model(lowered.graph, noisy, channel_model_of(lowered))
    assert [row[2:] for row in page["rows"]] == [
        list(times) for times in zip(outcome.starts, outcome.ends, strict=True)
    ]
    mean = sum(page["durations"]) / sum(tick / per_ns for tick in undisturbed.ticks)
    assert 0.9 < mean < 1.1


def test_a_deadlock_is_shown_with_a_cycle_and_its_fix(opened):
    page = opened.run(ROWS, {"queue": "pair"}, False)
    graph = lowered_plan(page["plan"]).graph
    stuck = stuck_events(events_of(graph, declared_model(declared_backend(plan_of_text(page["plan"])))))
    names = {(graph.global_rank[int(graph.rank[event // 2])], str(graph.ops[event // 2])) for event in stuck}
    assert len(page["cycle"]) >= 2
    assert {tuple(row) for row in page["cycle"]} <= names
    opened.run("location.hash = 'queue=pair'")
    opened.settle()
    assert text(opened, "verdict").startswith("Deadlock.With one FIFO per pair of ranks, ")
    opened.run("document.querySelector('#verdict button').click()")
    assert text(opened, "verdict").startswith("Valid.")
    assert "transport: {recv_order: send_order, queue: pair}" in text(opened, "plan")


def text(browser, name):
    return browser.run("return document.getElementById(arguments[0]).textContent", name)


def test_sizes_that_do_not_exist_offer_those_that_do(opened):
    opened.run("location.hash = 'kind=dualpipe&p=4&m=5'")
    opened.settle()
    assert text(opened, "verdict") == "Does not exist.dualpipe needs p even, m even and at least 2p. Use m = 8 "
    assert opened.run("return document.getElementById('drawing').hidden")
    opened.run("document.querySelector('#verdict button').click()")
    assert text(opened, "verdict").startswith("Valid.")
    assert not opened.run("return document.getElementById('drawing').hidden")


def test_a_link_reproduces_the_settings_and_what_it_does_not_understand_is_named(opened):
    opened.run("location.hash = 'kind=zb_h1&p=3&m=70&f=abc&colour=red'")
    opened.settle()
    values = opened.run("return play.values")
    assert (values["kind"], values["p"], values["m"], values["f"]) == ("zb_h1", "3", "8", "1000")
    assert text(opened, "refused").endswith("left out: m=70, f=abc, colour=red")
    set_field(opened, "m", "12")
    assert opened.run("return play.readFragment(location.hash)") == {
        "values": {**values, "m": "12"},
        "pinned": None,
        "refused": [],
    }


def set_field(browser, name, value):
    browser.run(
        "const field = document.getElementById('field-' + arguments[0]);"
        "field.value = arguments[1]; field.dispatchEvent(new Event(field.tagName === 'SELECT' ? 'change' : 'input'))",
        name,
        value,
    )
    browser.settle()


def test_every_field_has_a_label_and_every_schedule_its_source(opened):
    fields = "[...document.querySelectorAll('input, select')]"
    assert opened.run(f"return {fields}.filter((field) => !field.labels.length && !field.ariaLabel).length") == 0
    offered = opened.run("return [...document.getElementById('field-kind').options].map((option) => option.value)")
    assert offered == [name for name in SCHEDULE_KINDS if name not in LEFT_OUT]
    for name in offered:
        set_field(opened, "kind", name)
        assert SCHEDULE_KINDS[name].source in text(opened, "field-kind-help")


PASTED = (
    "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1: 1F0 1F1 1I0 1I1 1F2 1W0 1W1 1B2\n",
    "0F0,0F1,0B0,0B1\n1F0,1B0,,1F1,1B1\n",
    "0F0 3F0 0F1 3F1 3B0 0B0 3B1 0B1\n1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
)


@pytest.mark.parametrize("program", PASTED)
def test_a_schedule_that_is_pasted_has_the_times_of_python(opened, program):
    page = opened.run(ROWS, {"program": program}, True)
    lowered = lower_loaded(plan_from_dict(yaml.safe_load(page["plan"])))
    assert not page["isStuck"]
    assert page["rows"] == rows_of_python(lowered, simulate(lowered).timeline)
    assert page["models"] == [deadlocks(lowered.graph, model) for model in MODELS]
    set_field(opened, "program", program)
    assert "Valid" in text(opened, "verdict")
    assert yaml.safe_load(text(opened, "plan"))["schedule"]["kind"] == "custom"


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("0F0 0X0", "0X0 is not a computation"),
        ("0F0 0F0 0B0", "0F0 is there twice"),
        ("0B0 0F0", "before its forward"),
        ("0F0 0F1 0B0", "either B, or I and W"),
        ("0F0 0I0", "0W0 is missing"),
        ("0F0 0B0 1F0 1B0\n2F0 2B0", "each rank needs as many"),
        ("0F0 0B0\n1F1 1B1", "0F1 is missing"),
        ("0F99 0B99", "at most 16 ranks, 64 micro-batches"),
    ],
)
def test_what_is_pasted_and_is_no_schedule_is_refused_with_the_reason(opened, program, problem):
    set_field(opened, "program", program)
    assert problem in text(opened, "field-program-problem")
    assert yaml.safe_load(text(opened, "plan"))["schedule"]["kind"] == "1f1b"  # the last settings that were right


def test_no_settings_make_the_page_complain(opened):
    """Any schedule and size, noise, deadlocks without a timeline included: the verdict is shown, and all that it
    allows."""
    draw = random.Random("settings")
    shown = set()
    for place in range(2 * len(OFFERED)):
        values = random_values(draw, *OFFERED[place % len(OFFERED)]) | {"cv": draw.choice(["0", "0.2"])}
        opened.run("location.hash = new URLSearchParams(arguments[0])", values)
        opened.settle()
        assert opened.run("return play.values") == opened.run("return {...play.values, ...arguments[0]}", values)
        kind = opened.run("return document.getElementById('verdict').className")
        is_drawn = not opened.run("return document.getElementById('figures').hidden")
        assert is_drawn == (kind == "valid" or (kind == "deadlock" and values["sends"] != "backend")), values
        shown.add((kind, is_drawn))
    assert shown == {("valid", True), ("deadlock", True), ("deadlock", False), ("unfit", False)}
