"""Figures in units that do not change with chunks and micro-batches."""

from fractions import Fraction

import pytest

from pipeproof.analysis.tune.step_clock import asap_clock, block_sequences, figures_of, simulated_clock
from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from tests.tune.plans import four_ranks, loaded


def figures(data):
    plan = loaded(data).spec
    return figures_of(asap_clock(lower(plan).schedule, plan), block_sequences(plan))


def test_1f1b_has_the_figures_of_the_closed_form():
    found = figures(four_ranks())
    assert (found.makespan_us, found.work_us, found.idle_us) == (33, 24, 9)
    assert found.peak == 4


def test_activations_count_blocks_and_sequences():
    """Interleaved with two chunks holds 11 of one block; 1F1B holds 4 of two."""
    assert figures(four_ranks(num_layers=8)).peak == 4 * 2
    assert figures(four_ranks(num_layers=8, kind="interleaved", num_chunks=2)).peak == 11
    assert figures(four_ranks(num_layers=8, micro_batch_size=3)).peak == 4 * 2 * 3
    assert figures(four_ranks(num_layers=8, kind="seq1f1b", num_sequence_splits=4)).peak == Fraction(7 * 2, 4)


def test_the_peak_is_where_the_large_stages_are():
    data = four_ranks()
    data["stages"] = [["embed"], ["layer.0"], ["layer.1", "layer.2", "layer.3"], ["norm", "head"]]
    found = figures(data)
    assert block_sequences(loaded(data).spec) == (1, 1, 3, 1)
    assert found.peak == 6  # two of three blocks; rank 0 holds four of one


def test_activations_are_held_to_the_end_of_the_weights_half():
    """Every rank of ZB-H1 holds four; freed at the end of I, the last rank, with the large stage, would hold one."""
    data = four_ranks(num_layers=6, kind="zb_h1")
    data["stages"] = [["embed", "layer.0"], ["layer.1"], ["layer.2"], ["layer.3", "layer.4", "layer.5", "norm", "head"]]
    found = figures(data)
    assert found.peak == 4 * 3


def test_what_runs_side_by_side_takes_the_time_that_the_plan_gives_it():
    data = four_ranks(num_layers=8, kind="dualpipe_v", num_chunks=2, cost={"overlapped_us": "5/2"})
    plan = loaded(data).spec
    beside, alone = figures(data), figures(four_ranks(num_layers=8, kind="dualpipe_v", num_chunks=2))
    assert beside.makespan_us == simulate(lower(plan)).makespan < alone.makespan_us
    assert beside.work_us < alone.work_us


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zb_h1", "dualpipe", "chimera"])
@pytest.mark.parametrize("latency", [0, "1/3"])
def test_the_reference_model_has_the_same_clock(kind, latency):
    """As-soon-as-possible times equal the simulator's if no message waits for another."""
    plan = loaded(four_ranks(kind=kind, cost={"forward_us": [1, "1/2", 2, 1], "p2p_latency_us": latency})).spec
    lowered = lower(plan)
    fast, slow = asap_clock(lowered.schedule, plan), simulated_clock(lowered)
    sizes = block_sequences(plan)
    assert figures_of(fast, sizes) == figures_of(slow, sizes)
    assert fast.path() == slow.path()
    assert simulate(lowered).makespan == figures_of(fast, sizes).makespan_us


def test_messages_that_wait_for_their_receives_take_longer():
    plan = loaded(four_ranks(cost={"p2p_latency_us": 1, "p2p": "rendezvous"})).spec
    lowered = lower(plan)
    sizes = block_sequences(plan)
    assert figures_of(asap_clock(lowered.schedule, plan), sizes).makespan_us == 49
    assert figures_of(simulated_clock(lowered), sizes).makespan_us == 52
