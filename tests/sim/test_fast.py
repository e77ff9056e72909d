"""The fast engine equals the reference model to the last tick, or refuses with a reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.op_table import Group, Row, build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.sim import longest_paths as longest
from pipeproof.sim.fast_engine import NotTimedError, run_fast
from pipeproof.sim.longest_paths import longest_paths
from pipeproof.sim.op_durations import Durations, durations_of
from pipeproof.sim.outcome import SimulationError
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import StepTimer, channel_model_of, simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.cli.commands import invoke
from tests.plans import plan_file, plan_spec, subject
from tests.schedule.drawn import generated, plan_of, requests
from tests.verify.test_two_writings import broken_subjects, random_graphs

some = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
EAGER, RENDEZVOUS = (ChannelModel("directed_edge", completes) for completes in ("eager", "rendezvous"))
rules = st.builds(
    ChannelModel,
    queue=st.just("directed_edge"),
    completes=st.sampled_from(["eager", "rendezvous"]),
    host_blocks=st.booleans(),
)
WITHOUT_CUT_SEQUENCES = {"topology": {"cp": 2, "dp": 2}}
MESHES = (
    {},
    {"topology": {"tp": 2}, "transport": "full"},
    {"topology": {"tp": 2}, "transport": "partial"},
    {"topology": {"tp": 2, "sequence_parallel": True}},
    {"topology": {"dp": 2}},
)
COMPILED = [False, pytest.param(True, marks=pytest.mark.needs("numba"))]


@st.composite
def plans(draw):
    """A lowered plan of any kind of schedule with uneven rational costs, on some mesh."""
    kind, request = draw(requests(max_ranks=4, max_chunks=3))
    generated(kind, request)
    plan = plan_of(kind, request)
    cut = request.num_sequence_splits > 1
    mesh = draw(st.sampled_from(MESHES if cut else (*MESHES, WITHOUT_CUT_SEQUENCES)))
    plan["model"]["seq_length"] = 48  # which all splits and meshes divide
    plan["topology"] |= mesh.get("topology", {})
    plan["transport"] = mesh.get("transport", "full")
    plan["cost"]["p2p"] = draw(st.sampled_from(["async", "rendezvous"]))
    return lower(plan_from_dict(plan).spec)


def finished(outcome):
    return None not in outcome.ends and set(outcome.stuck_at) == {None}


LEFT_TO_THE_MODEL = {
    "operations are on named queues other than reductions and copies",
    "operations are called in batches",
    "computations are slowed down by pending receives",
    "messages of one channel take different times",
}


def agree(graph, durations, rules, *, compiled=False):
    """Compare both engines; the reason if the fast one refuses."""
    outcome = run_model(graph, durations, rules)
    try:
        fast, reason = run_fast(graph, durations, rules, compiled=compiled).outcome(graph), None
    except NotTimedError as error:
        fast, reason = None, str(error)
    if reason is None:
        assert fast == outcome
    elif reason not in LEFT_TO_THE_MODEL:
        assert not finished(outcome), reason
    return reason


@given(plan=plans(), rules=rules)
@some
def test_every_tick_of_every_schedule_is_that_of_the_model(plan, rules):
    agree(plan.graph, durations_of(plan), rules)


def simulated(plan, engine):
    """The simulation, or the findings of one that comes to no end."""
    try:
        return simulate(plan, engine=engine)
    except SimulationError as error:
        return error.findings


@given(plan=plans())
@some
def test_figures_and_timelines_are_equal(plan):
    fast, simpy = simulated(plan, "fast"), simulated(plan, "simpy")
    if isinstance(simpy, tuple):  # findings
        assert fast == simpy
        return
    assert (fast.engine, simpy.engine) == ("fast", "simpy")
    assert fast.figures == simpy.figures
    assert fast.makespan == simpy.makespan == fast.timeline.makespan_us
    assert fast.timeline == simpy.timeline


@st.composite
def timed(draw, graphs):
    """A graph with a duration of its own for each operation."""
    graph = draw(graphs)
    each = st.lists(st.integers(0, 9), min_size=graph.num_ops, max_size=graph.num_ops).map(tuple)
    by_channel = draw(st.lists(st.integers(0, 9), min_size=len(graph.channels) + 1, max_size=len(graph.channels) + 1))
    same = tuple(by_channel[channel] for channel in graph.channel.tolist())
    return graph, Durations(
        draw(each),
        draw(st.integers(0, 9)),
        1,
        message_ticks=draw(st.sampled_from([None, same]) | each),
        recv_slowdown=draw(st.sampled_from([Fraction(0), Fraction(0), Fraction(1, 3)])),
    )


@given(one=timed(broken_subjects().map(lambda one: one.graph)), rules=rules)
@settings(max_examples=150, deadline=None)
def test_broken_programs_end_in_both_or_in_neither(one, rules):
    agree(*one, rules)


def to_another(graph):
    """True if no rank sends to itself."""
    return not (graph.peer == graph.rank).any()


@given(one=timed(random_graphs().filter(to_another)), rules=rules)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_random_programs_end_in_both_or_in_neither(one, rules):
    agree(*one, rules)


@pytest.mark.parametrize("compiled", COMPILED)
@pytest.mark.parametrize("completes", ["eager", "rendezvous"])
def test_the_compiled_walk_is_the_same(make_plan, completes, compiled):
    plan = make_plan(p=3, m=6, tf=[1, 4, 2], tb=[3, 2, 5], c=3, tp=2, dp=2, transport="partial")
    durations = durations_of(plan)
    assert agree(plan.graph, durations, ChannelModel("directed_edge", completes), compiled=compiled) is None
    blocking = ChannelModel("directed_edge", completes, host_blocks=True)
    blocked = agree(plan.graph, durations, blocking, compiled=compiled)
    assert blocked == ("operations wait for each other" if completes == "rendezvous" else None)


def graph_of(*programs, groups=()):
    """Programs as lists of (text, fields of its row)."""
    return build_graph([[Row(parse_op(text), **fields) for text, fields in rows] for rows in programs], (), groups)


@pytest.mark.parametrize(("completes", "arrivals"), [("eager", [5, 5, 7]), ("rendezvous", [5, 10, 15])])
def test_messages_that_are_posted_together_go_one_after_the_other_in_a_rendezvous_only(completes, arrivals):
    sends = [(f"0SEND_F{k}", {"peer": 1}) for k in range(3)]
    receives = [(f"1RECV_F{k}", {"peer": 0}) for k in range(3)]
    graph = graph_of([*sends[:2], ("0F9", {}), sends[2]], receives)
    durations, rules = Durations((0, 0, 2, 0, 0, 0, 0), 5, 1), ChannelModel("directed_edge", completes)
    assert agree(graph, durations, rules) is None
    assert run_fast(graph, durations, rules).ends[4:].tolist() == arrivals


def test_three_computations_in_one_call_are_a_pair_and_one_more():
    """The second belongs to the first; the third therefore runs alone."""
    batch = {"batch": 0}
    graph = graph_of([("0F0", batch), ("1B0", batch), ("2F0", batch), ("0F1", {})])
    durations = Durations((5, 7, 3, 2), 0, 1, overlapped={0: 1, 1: 2})
    assert agree(graph, durations, EAGER) is None
    times = run_fast(graph, durations, EAGER)
    assert times.ends.tolist() == [5, 5, 8, 10]


def test_a_transfer_inside_a_pair_is_posted_when_the_pair_is_done():
    pair = {"batch": 0}
    graph = graph_of([("0F0", pair), ("0SEND_F0", {"peer": 1}), ("3B0", pair)], [("1RECV_F0", {"peer": 0})])
    durations = Durations((4, 9, 9, 9), 2, 1, overlapped={0: 2})
    for completes in ("eager", "rendezvous"):
        assert agree(graph, durations, ChannelModel("directed_edge", completes)) is None
    assert run_fast(graph, durations, EAGER).ends.tolist() == [4, 4, 4, 6]


def test_a_rank_that_sends_to_itself_is_left_to_the_model():
    graph = graph_of([("0SEND_F0", {"peer": 0}), ("1RECV_F0", {"peer": 0}), ("WAIT(1RECV_F0)", {})])
    durations = Durations((0, 0, 0), 3, 1)
    assert finished(run_model(graph, durations, EAGER))
    with pytest.raises(NotTimedError, match="a rank sends to itself"):
        run_fast(graph, durations, EAGER)


def test_a_stranger_in_a_collective_is_left_to_the_model():
    call = ("0BARRIER:pp", {"group": 0})
    graph = graph_of([call], [call], [call], groups=(Group("pp", (0, 1)),))
    assert graph.group.tolist() == [0, 0, 0]
    with pytest.raises(NotTimedError, match="a number of ranks that differs"):
        run_fast(graph, Durations((0, 0, 0), 0, 1), EAGER)


def test_a_collective_of_its_own_rank_alone_holds_nobody():
    graph = graph_of([("0F0", {}), ("0BARRIER:pp", {"group": NONE}), ("0B0", {})])
    assert agree(graph, Durations((2, 9, 3), 0, 1), EAGER) is None


def test_ranks_without_operations_take_no_time():
    graph = graph_of([], [("1F0", {})], [])
    assert agree(graph, Durations((3,), 0, 1), RENDEZVOUS) is None
    empty = graph_of([], [])
    assert agree(empty, Durations((), 0, 1), EAGER) is None


# --- the choice of an engine ---

PRIME_COSTS = {"forward_us": ["1/999999999989", "1/999999999961"]}


def test_times_that_need_more_than_64_bits_are_left_to_the_model():
    plan = lower(plan_spec(cost=PRIME_COSTS))
    assert durations_of(plan).ticks_per_us > 2**63
    assert simulate(plan).engine == "simpy"
    with pytest.raises(BadPlanAtError, match="exceed 64 bits") as caught:
        simulate(plan, engine="fast")
    assert (caught.value.findings[0].code, caught.value.path) == ("PP153", ("cost",))


@pytest.mark.parametrize(("ticks", "fits"), [(2**62 - 2, True), (2**62 - 1, False)])
def test_all_times_together_are_below_two_to_the_62nd(ticks, fits):
    graph, rules = graph_of([("0F0", {})]), EAGER
    if fits:
        assert run_fast(graph, Durations((ticks,), 1, 1), rules).ends.tolist() == [ticks]
    else:
        with pytest.raises(NotTimedError, match="64 bits"):
            run_fast(graph, Durations((ticks,), 1, 1), rules)


def test_auto_is_fast_and_any_other_word_is_refused(make_plan):
    plan = make_plan(p=2, m=2)
    assert simulate(plan).engine == simulate(plan, engine="auto").engine == "fast"
    with pytest.raises(ValueError, match="engine 'numba' is not auto, fast or simpy"):
        simulate(plan, engine="numba")


@pytest.mark.parametrize("engine", ["auto", "fast", "simpy"])
def test_what_comes_to_no_end_is_worded_alike(make_plan, edit, engine):
    plan = make_plan(kind="gpipe", p=2, m=2)

    def drop(rows):
        rows[0] = [row for row in rows[0] if str(row.op) != "0SEND_F1"]

    with pytest.raises(SimulationError, match="rank 1 waits in WAIT"):
        simulate(replace(plan, graph=edit(plan.graph, drop)), engine=engine)


def test_the_command_names_its_engine(tmp_path):
    plan = plan_file(tmp_path / "plan.json")
    outputs = {}
    for engine in ("fast", "simpy"):
        shown = invoke("simulate", plan, "--engine", engine)
        assert f"engine {engine}" in shown.stdout
        content = json.loads(invoke("simulate", plan, "--engine", engine, "--format", "json").stdout)
        assert content.pop("engine") == engine
        outputs[engine] = content
    assert outputs["fast"] == outputs["simpy"]


# --- longest paths ---


@st.composite
def edges(draw):
    """(first, source, weight) of a graph whose nodes are in any order, with or without circles."""
    sources = [draw(st.lists(st.integers(0, 7), max_size=3)) for _ in range(8)]
    flat = [source for before in sources for source in before]
    weights = draw(st.lists(st.integers(-5, 5), min_size=len(flat), max_size=len(flat)))
    first = np.concatenate([[0], np.cumsum([len(before) for before in sources])])
    return first, np.array(flat, dtype=np.int64), np.array(weights, dtype=np.int64)


def relaxed(first, source, weight):
    """Longest paths by repeated relaxation: in a graph without circles, n rounds over all nodes are enough."""
    num_nodes = len(first) - 1
    reach = [{int(s) for s in source[first[n] : first[n + 1]]} for n in range(num_nodes)]
    for _ in range(num_nodes):
        reach = [before.union(*(reach[b] for b in before)) for before in reach]
    if any(node in before for node, before in enumerate(reach)):
        return None
    value = [0] * num_nodes
    for _ in range(num_nodes):
        for node in range(num_nodes):
            into = range(first[node], first[node + 1])
            value[node] = max([0, *(value[source[e]] + int(weight[e]) for e in into)])
    return value


@pytest.mark.parametrize("compiled", COMPILED)
@given(one=edges())
@settings(max_examples=100, deadline=None)
def test_longest_paths(compiled, one):
    value = longest_paths(*one, compiled=compiled)
    assert (None if value is None else value.tolist()) == relaxed(*one)


@pytest.mark.parametrize("compiled", COMPILED)
def test_a_chain_of_all_nodes_is_no_circle(compiled):
    """Node 0 comes after node 1 and so on: the walk goes down to the last before it has any value."""
    first, source, weight = np.array([0, 1, 2, 2]), np.array([1, 2]), np.array([3, 4])
    assert longest_paths(first, source, weight, compiled=compiled).tolist() == [7, 4, 0]


@pytest.mark.needs("numba")
def test_large_graphs_are_walked_by_compiled_code(monkeypatch):
    walked = []

    def compiled_walk():
        walked.append("compiled")
        return longest._walk

    monkeypatch.setattr(longest, "_compiled_walk", compiled_walk)
    first, source, weight = np.array([0, 0, 1, 2]), np.array([0, 1]), np.array([3, 4])
    assert longest_paths(first, source, weight).tolist() == [0, 3, 7]
    assert not walked
    monkeypatch.setattr(longest, "COMPILED_ABOVE", 1)
    assert longest_paths(first, source, weight).tolist() == [0, 3, 7]
    assert walked == ["compiled"]


def test_the_code_of_the_simulating_page_runs(monkeypatch):
    root = Path(__file__).parents[2]
    codes = re.findall(r"```python\n(.*?)```", (root / "docs" / "simulating.md").read_text(), re.DOTALL)
    monkeypatch.chdir(root)
    for code in codes:
        exec(compile(code, "simulating.md", "exec"), {})
    assert codes


COST = {"forward_us": 100, "backward_us": 200}


def test_the_durations_of_a_plan_have_its_step_time():
    plan = subject(topology={"pp": 4}, cost=COST).plan
    timer = StepTimer(plan.graph, channel_model_of(plan, None), 2)
    durations = durations_of(plan)
    assert timer.makespan(durations) == simulate(plan).makespan
    assert timer.makespan(replace(durations, ticks=tuple(2 * t for t in durations.ticks))) == (
        2 * simulate(plan).makespan
    )


def test_bounded_channels_are_timed_by_the_reference_model():
    plan = subject(topology={"pp": 2}, cost=COST | {"p2p_latency_us": 5}).plan
    model, durations = ChannelModel("directed_edge", "eager", eager_bytes=1), durations_of(plan)
    outcome = run_model(plan.graph, durations, model)
    assert StepTimer(plan.graph, model, 1).makespan(durations) * durations.ticks_per_us == max(outcome.ends)
