"""The simulator against closed forms, in exact arithmetic."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ranks = st.integers(1, 8)
micro_batches = st.integers(1, 20)
durations = st.builds(Fraction, st.integers(1, 12), st.integers(1, 6))
latencies = st.builds(Fraction, st.integers(0, 30), st.integers(1, 6))
per_stage = ranks.flatmap(
    lambda p: st.tuples(st.lists(durations, min_size=p, max_size=p), st.lists(latencies, min_size=p, max_size=p))
)
few = settings(max_examples=60, deadline=None)


def peaks(simulation):
    return [figures.peak_activations for figures in simulation.figures]


@given(p=ranks, m=micro_batches, tf=durations, tb=latencies, c=latencies)
@few
def test_gpipe(run, p, m, tf, tb, c):
    simulation = run(kind="gpipe", p=p, m=m, tf=tf, tb=tb, c=c)
    assert simulation.makespan == (m + p - 1) * (tf + tb) + 2 * (p - 1) * c
    assert peaks(simulation) == [m] * p


@given(times=per_stage, m=micro_batches)
@few
def test_gpipe_uneven_without_latency(run, times, m):
    tf, tb = times
    simulation = run(kind="gpipe", p=len(tf), m=m, tf=tf, tb=tb)
    assert simulation.makespan == sum(tf) + (m - 1) * max(tf) + sum(tb) + (m - 1) * max(tb)
    assert peaks(simulation) == [m] * len(tf)


@given(p=ranks, m=micro_batches, tf=durations, tb=latencies, c=latencies)
@few
def test_1f1b(run, p, m, tf, tb, c):
    simulation = run(kind="1f1b", p=p, m=m, tf=tf, tb=tb, c=c)
    crossings = (p - 1) + (m - 1) * (p - 1) // p
    assert simulation.makespan == (m + p - 1) * (tf + tb) + 2 * c * crossings
    assert peaks(simulation) == [min(m, p - rank) for rank in range(p)]


def uneven_1f1b_bound(tf, tb, m):
    return max(sum(tf[:r]) + m * (tf[r] + tb[r]) + sum(tb[:r]) for r in range(len(tf)))


@given(times=per_stage, m=micro_batches, c=latencies)
@few
def test_1f1b_uneven_is_at_least_its_bound(run, times, m, c):
    tf, tb = times
    p = len(tf)
    simulation = run(kind="1f1b", p=p, m=m, tf=tf, tb=tb, c=c)
    assert simulation.makespan >= uneven_1f1b_bound(tf, tb, m)
    assert peaks(simulation) == [min(m, p - rank) for rank in range(p)]


def test_the_uneven_1f1b_bound_is_no_closed_form(run):
    simulation = run(kind="1f1b", p=2, m=3, tf=[1, 1], tb=[2, 1])
    assert uneven_1f1b_bound([1, 1], [2, 1], 3) == 9
    assert simulation.makespan == 10


@pytest.mark.parametrize(
    ("options", "makespan", "peak"),
    [
        ({"kind": "gpipe"}, 33, [8, 8, 8, 8]),
        ({"kind": "gpipe", "c": 1}, 39, [8, 8, 8, 8]),
        ({"kind": "gpipe", "c": 1, "p2p": "rendezvous"}, 53, [8, 8, 8, 8]),
        ({"kind": "1f1b"}, 33, [4, 3, 2, 1]),
        ({"kind": "1f1b", "c": 1}, 49, [4, 3, 2, 1]),
        ({"kind": "1f1b", "c": 1, "p2p": "rendezvous"}, 52, [4, 3, 2, 1]),
        ({"kind": "1f1b", "c": 1, "p2p": "backend"}, 52, [4, 3, 2, 1]),
    ],
)
def test_goldens(run, options, makespan, peak):
    simulation = run(p=4, m=8, tf=1, tb=2, **options)
    assert simulation.makespan == makespan
    assert peaks(simulation) == peak
    assert [f.peak_activations_at_i for f in simulation.figures] == peak


@given(times=per_stage, m=st.integers(1, 8), c=latencies, kind=st.sampled_from(["gpipe", "1f1b"]))
@few
def test_rendezvous_is_never_faster_and_without_latency_each_bound_holds(run, times, m, c, kind):
    tf, tb = times
    p = len(tf)
    waiting = run(kind=kind, p=p, m=m, tf=tf, tb=tb, c=c, p2p="rendezvous").makespan
    assert waiting >= run(kind=kind, p=p, m=m, tf=tf, tb=tb, c=c).makespan
    assert waiting >= uneven_1f1b_bound(tf, tb, m)


@pytest.mark.parametrize("p2p", ["async", "rendezvous"])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("replicas", [{"tp": 2}, {"tp": 2, "transport": "partial"}, {"dp": 2}, {"tp": 2, "dp": 2}])
def test_replicas_change_nothing(run, kind, p2p, replicas):
    common = {"kind": kind, "p": 3, "m": 5, "tf": [1, 2, 1], "tb": [2, 1, 3], "c": Fraction(1, 3), "p2p": p2p}
    one, many = run(**common), run(**common, **replicas)
    assert many.makespan == one.makespan
    for figures in many.figures:
        alone = one.figures[figures.coords["pp"]]
        assert (figures.span_us, figures.busy_us) == (alone.span_us, alone.busy_us)
        assert figures.peak_activations == alone.peak_activations
