"""Runs with noise: without any they are the simulation, slow ranks have closed forms, quantiles are those drawn."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from pipeproof.analysis.jitter import noisy_runs as runs_module
from pipeproof.analysis.jitter.disturbed_durations import Disturbance
from pipeproof.analysis.jitter.noise import Noise, Stream
from pipeproof.analysis.jitter.noisy_runs import run_jitter
from pipeproof.comm.lower import lower
from pipeproof.schedule.op_table import Group, Row, build_graph
from pipeproof.schedule.ops import COLLECTIVE_KINDS, COMPUTE_KINDS, parse_op
from pipeproof.sim.fast_engine import NotTimedError, run_fast
from pipeproof.sim.op_durations import Durations, durations_of
from pipeproof.sim.sim_codes import SimulationError
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import channel_model_of, simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict
from tests.schedule.drawn import generated, plan_of, requests

some = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
few = settings(max_examples=40, deadline=None)


@st.composite
def plans(draw):
    """A lowered plan of any kind of schedule, with messages of either kind."""
    kind, request = draw(requests(max_ranks=4, max_chunks=2))
    generated(kind, request)
    plan = plan_of(kind, request)
    plan["cost"]["p2p"] = draw(st.sampled_from(["async", "rendezvous"]))
    return lower(plan_from_dict(plan).spec)


def makespan(plan):
    """The simulated one; None for a plan that comes to no end."""
    try:
        return simulate(plan).makespan
    except SimulationError:
        return None


@given(plan=plans())
@some
def test_without_noise_a_run_is_the_simulation(plan):
    expected = makespan(plan)
    if expected is None:
        with pytest.raises(SimulationError):
            run_jitter(plan, Noise(), 1)
        return
    result = run_jitter(plan, Noise(seed=7), 2)
    assert (result.undisturbed, *result.makespans) == (expected,) * 3


@given(plan=plans(), seed=st.integers(0, 99), network_cv=st.sampled_from([0.0, 0.5]))
@some
def test_both_engines_agree_on_every_run(plan, seed, network_cv):
    noise = Noise(0.3, network_cv, straggler_probability=0.3, straggler_factor=2.0, seed=seed)
    disturbance = Disturbance(plan.graph, durations_of(plan), noise)
    model = channel_model_of(plan)
    for run in range(2):
        durations = disturbance.of_run(run)
        outcome = run_model(plan.graph, durations, model)
        fast, reason = fast_outcome(plan.graph, durations, model)
        if reason is None:
            assert fast == outcome
        else:
            assert None in outcome.ends or (network_cv and "different times" in reason)


def fast_outcome(graph, durations, model):
    """What the fast engine gives, or why it does not."""
    try:
        return run_fast(graph, durations, model).outcome(graph), None
    except NotTimedError as reason:
        return None, str(reason)


@given(p=st.integers(1, 4), m=st.integers(1, 6), factor=st.integers(1, 5), kind=st.sampled_from(["gpipe", "1f1b"]))
@few
def test_all_ranks_slow_by_one_factor_make_the_step_longer_by_it(make_plan, p, m, factor, kind):
    plan = make_plan(kind=kind, p=p, m=m, tf=3, tb=5)
    result = run_jitter(plan, Noise(slow=dict.fromkeys(range(p), float(factor))), 1)
    assert result.makespans == (factor * result.undisturbed,)


@given(
    times=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5),
    m=st.integers(1, 7), data=st.data(),
)  # fmt: skip
@few
def test_slow_ranks_of_gpipe_are_uneven_stages(make_plan, times, m, data):
    """sum tf + (m - 1) max tf + sum tb + (m - 1) max tb, with the times of slow ranks longer."""
    factors = [data.draw(st.integers(1, 4)) for _ in times]
    plan = make_plan(kind="gpipe", p=len(times), m=m, tf=[f for f, _ in times], tb=[b for _, b in times])
    tf = [f * factor for (f, _), factor in zip(times, factors, strict=True)]
    tb = [b * factor for (_, b), factor in zip(times, factors, strict=True)]
    result = run_jitter(plan, Noise(slow={rank: float(factor) for rank, factor in enumerate(factors)}), 1)
    assert result.makespans == (sum(tf) + (m - 1) * max(tf) + sum(tb) + (m - 1) * max(tb),)


def one_slow_rank_of_1f1b(p, m, tf, tb, slow, factor):
    """Makespan of 1F1B with equal stages, one of them slower by ``factor``, for m >= p.

    The slow rank s computes m times, after the s ranks before it for the first time and before them for the last. It
    idles only twice: between the forwards of its warm-up and the first backward, which comes back after p - 1 - s
    forwards and backwards, and likewise at the end between its last backwards.
    """
    behind = p - 1 - slow
    idle = max(0, tf + tb - factor * tf) + max(0, tf + tb - factor * tb)
    return (slow + factor * m) * (tf + tb) + behind * idle


@given(
    p=st.integers(1, 6), more=st.integers(0, 6), tf=st.integers(1, 9), tb=st.integers(1, 9),
    slow=st.integers(0, 5), factor=st.builds(Fraction, st.integers(4, 16), st.just(4)),
)  # fmt: skip
@few
def test_one_slow_rank_of_1f1b(make_plan, p, more, tf, tb, slow, factor):
    slow %= p
    result = run_jitter(make_plan(p=p, m=p + more, tf=tf, tb=tb), Noise(slow={slow: float(factor)}), 1)
    assert result.makespans == (one_slow_rank_of_1f1b(p, p + more, tf, tb, slow, factor),)


@pytest.mark.parametrize("p2p", ["async", "rendezvous"])
def test_collectives_that_take_time_of_their_own(p2p):
    """Times on links: without noise the simulation, with noise equal on both engines."""
    topology = {"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True}
    plan = lower(plan_from_dict(plan_dict(topology=topology, cost={"analytic": "h200", "p2p": p2p})).spec)
    assert run_jitter(plan, Noise(), 1).makespans == (simulate(plan).makespan,)
    disturbance = Disturbance(plan.graph, durations_of(plan), Noise(0.2, 0.4))
    drawn, model = disturbance.of_run(0), channel_model_of(plan)
    collectives = plan.graph.is_kind(COLLECTIVE_KINDS)
    assert (np.array(drawn.ticks) != np.array(disturbance.undisturbed.ticks))[collectives].all()
    outcome = run_model(plan.graph, drawn, model)
    fast, reason = fast_outcome(plan.graph, drawn, model)
    assert fast == outcome or "different times" in reason
    quiet = Disturbance(plan.graph, durations_of(plan), Noise(0.2)).of_run(0)
    assert run_fast(plan.graph, quiet, model).outcome(plan.graph) == run_model(plan.graph, quiet, model)


# --- what is drawn ---

SHARES = (0.05, 0.5, 0.95, 0.99)


@pytest.mark.parametrize(
    ("distribution", "of_one"),
    [
        ("lognormal", stats.lognorm(s=math.sqrt(math.log1p(0.09)), scale=1 / math.sqrt(1.09))),
        ("gamma", stats.gamma(a=1 / 0.09, scale=0.09)),
    ],
)
def test_one_operation_has_the_quantiles_of_its_distribution(make_plan, distribution, of_one):
    """The true quantile lies between order statistics that miss it once in 30,000 times."""
    plan = make_plan(p=1, m=1, tf=1000, tb=0)
    result = run_jitter(plan, Noise(0.3, distribution=distribution, seed=3), 2000)
    for share in SHARES:
        low, high = (int(place) for place in stats.binom(2000, share).ppf([1.5e-5, 1 - 1.5e-5]))
        assert result.ordered[low - 1] <= 1000 * of_one.ppf(share) <= result.ordered[high]
    assert of_one.mean() == pytest.approx(1)
    assert abs(result.mean.value - 1000) < 4 * 300 / math.sqrt(2000)


def test_runs_do_not_depend_on_how_many_there_are_nor_on_noise_elsewhere(make_plan):
    plan = make_plan(p=2, m=3, c=1)
    noise = Noise(0.2, seed=11)
    few_runs, many = run_jitter(plan, noise, 3).makespans, run_jitter(plan, noise, 9).makespans
    assert many[:3] == few_runs
    assert len(set(many)) == 9
    assert run_jitter(plan, replace(noise, seed=12), 3).makespans != few_runs
    quiet = Disturbance(plan.graph, durations_of(plan), noise)
    loud = Disturbance(plan.graph, durations_of(plan), replace(noise, network_cv=0.7))
    assert quiet.of_run(5).ticks == loud.of_run(5).ticks
    assert quiet.of_run(5).message_ticks is None
    assert len({loud.of_run(5).message(send) for send in range(plan.graph.num_ops)}) > 4


def test_disturbed_times_are_whole_nanoseconds_and_others_stay_exact(make_plan):
    plan = make_plan(p=2, m=2, tf=Fraction(1, 7), tb=Fraction(2, 7), c=Fraction(1, 3))
    base = durations_of(plan)
    drawn = Disturbance(plan.graph, base, Noise(slow={1: 2.0}), slow={1: 2.0}).of_run(0)
    assert drawn.ticks_per_us % 1000 == 0
    assert Fraction(drawn.latency_ticks, drawn.ticks_per_us) == Fraction(1, 3)
    for op, rank, ticks in zip(plan.graph.ops, plan.graph.rank.tolist(), drawn.ticks, strict=True):
        if op.kind in COMPUTE_KINDS:
            exact = Fraction(1 if op.is_forward else 2, 7)
            expected = exact if rank == 0 else Fraction(round(2000 * exact), 1000)
            assert Fraction(ticks, drawn.ticks_per_us) == expected


def test_members_of_a_collective_share_its_factor():
    call = ("0ALL_REDUCE:tp", {"group": 0})
    programs = [[call, call], [call, call], [("1ALL_REDUCE:tp", {"group": -1})]]
    rows = [[Row(parse_op(text), **fields) for text, fields in rank] for rank in programs]
    graph = build_graph(rows, (), (Group("tp", (0, 1)),))
    assert all(op.kind in COLLECTIVE_KINDS for op in graph.ops)
    ticks = Disturbance(graph, Durations((5,) * 5, 0, 1), Noise(network_cv=0.5)).of_run(0).ticks
    assert ticks[0] == ticks[2] != ticks[1] == ticks[3]
    assert len(set(ticks)) == 3


def test_of_many_ranks_some_are_stragglers_and_folded_ones_more_often():
    noise = Noise(straggler_probability=0.1, straggler_factor=3.0)
    often = [noise.stragglers(run, 1000, 1).mean() for run in range(20)]
    folded = [noise.stragglers(run, 1000, 7).mean() for run in range(20)]
    assert np.mean(often) == pytest.approx(0.1, abs=0.01)
    assert np.mean(folded) == pytest.approx(1 - 0.9**7, abs=0.02)


def test_stragglers_make_their_runs_longer_and_no_others(make_plan):
    plan = make_plan(p=1, m=1, tf=10, tb=20)
    result = run_jitter(plan, Noise(straggler_probability=0.25, straggler_factor=1.5), 400)
    assert set(result.makespans) == {30, 45}
    assert result.makespans.count(45) == pytest.approx(100, abs=4 * math.sqrt(400 * 0.25 * 0.75))


# --- replicas ---

WIDE = {"topology": {"pp": 2, "tp": 2, "dp": 2}, "cost": {"forward_us": 10, "backward_us": 20}}


def folded_plan(monkeypatch, most_unfolded):
    monkeypatch.setattr("pipeproof.comm.lower.FOLD_ABOVE", 0)
    monkeypatch.setattr(runs_module, "MOST_UNFOLDED", most_unfolded)
    plan = lower(plan_from_dict(plan_dict(**WIDE)).spec)
    assert plan.folded
    return plan


def test_replicas_are_drawn_one_by_one_where_they_are_few(monkeypatch):
    plan = folded_plan(monkeypatch, 10**6)
    apart = run_jitter(plan, Noise(0.3), 20)
    assert apart.replicas == 1
    monkeypatch.setattr(runs_module, "MOST_UNFOLDED", 0)
    together = run_jitter(plan, Noise(0.3), 20)
    assert together.replicas == 4
    assert apart.undisturbed == together.undisturbed
    assert apart.mean.value > together.mean.value


@pytest.mark.parametrize("most_unfolded", [0, 10**6])
def test_a_slow_rank_is_slow_whether_its_replicas_are_folded_or_not(monkeypatch, most_unfolded):
    plan = folded_plan(monkeypatch, most_unfolded)
    result = run_jitter(plan, Noise(slow={7: 2.0, 6: 1.5}), 1)  # both on the last stage
    assert result.makespans == (one_slow_rank_of_1f1b(2, 4, 10, 20, 1, 2),)


# --- what is refused ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute_cv": -0.1}, "compute_cv must be from 0 to 10, found -0.1"),
        ({"network_cv": 11}, "network_cv must be from 0 to 10, found 11"),
        ({"slow": {0: 0.0}}, "a rank is slow by a factor above 0 and at most 1000, found 0.0"),
        ({"straggler_factor": 1e9}, "found 1000000000.0"),
        ({"straggler_probability": 1.5}, "straggler_probability must be from 0 to 1, found 1.5"),
        ({"seed": -1}, "seed must be at least 0, found -1"),
        ({"compute_cv": math.nan}, "compute_cv must be from 0 to 10, found nan"),
    ],
)
def test_figures_out_of_bounds_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Noise(**fields)


def test_no_runs_and_ranks_that_are_not_there_are_refused(make_plan):
    plan = make_plan(p=2, m=2)
    with pytest.raises(ValueError, match="0 runs: there must be at least one"):
        run_jitter(plan, Noise(), 0)
    with pytest.raises(ValueError, match=r"rank 2 is to be slow: the plan has ranks 0\.\.1"):
        run_jitter(plan, Noise(slow={2: 2.0}), 1)


def test_streams_are_told_apart():
    noise = Noise(0.5, 0.5)
    compute, network = (noise.factors(0, stream, 0.5, 5).tolist() for stream in (Stream.COMPUTE, Stream.NETWORK))
    assert compute != network
    assert noise.factors(0, Stream.COMPUTE, 0.0, 3).tolist() == [1, 1, 1]
