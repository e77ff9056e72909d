"""Times of stages given to their layers, and taken from them again."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.analysis.tune.repartition import layer_times, stage_times


def even_cut(num_blocks, num_stages):
    share = num_blocks // num_stages
    cut = [[f"layer.{i}" for i in range(stage * share, (stage + 1) * share)] for stage in range(num_stages)]
    cut[0].insert(0, "embed")
    cut[-1] += ["norm", "head"]
    return tuple(map(tuple, cut))


def fractions(*times):
    return [Fraction(time) for time in times]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.data())
def test_no_cut_changes_the_total_and_the_same_cut_changes_nothing(num_stages, data):
    stages = even_cut(60, num_stages)
    times = data.draw(st.lists(st.fractions(0, 9, max_denominator=7), min_size=num_stages, max_size=num_stages))
    layers = layer_times(stages, times)
    assert stage_times(stages, layers) == tuple(times)
    assert all(time >= 0 for time in layers.values())
    for other in (1, 2, 3, 4, 5, 6, 12, 60):
        assert sum(stage_times(even_cut(60, other), layers)) == sum(times)


def test_even_stages_are_cut_evenly():
    layers = layer_times(even_cut(8, 4), fractions(10, 10, 10, 10))
    assert stage_times(even_cut(8, 8), layers) == (5,) * 8


def test_what_the_last_stage_takes_above_the_others_is_the_heads():
    layers = layer_times(even_cut(8, 4), fractions(10, 10, 10, 16))
    assert (layers["head"], layers["layer.7"], layers["norm"]) == (6, 5, 0)
    assert stage_times(even_cut(8, 8), layers) == (5, 5, 5, 5, 5, 5, 5, 11)


def test_what_the_first_stage_takes_above_the_others_is_the_embeddings():
    layers = layer_times(even_cut(8, 4), fractions(12, 10, 10, 10))
    assert (layers["embed"], layers["layer.0"]) == (2, 5)


def test_without_a_stage_of_blocks_alone_nothing_is_known_of_the_ends():
    layers = layer_times(even_cut(4, 2), fractions(10, 20))
    assert (layers["embed"], layers["layer.0"], layers["layer.3"], layers["head"]) == (0, 5, 10, 0)


def test_a_stage_without_blocks_gives_its_time_to_what_it_has():
    layers = layer_times((("embed",), ("layer.0", "layer.1"), ("norm", "head")), fractions(3, 8, 4))
    assert layers == {"embed": 3, "layer.0": 4, "layer.1": 4, "norm": 2, "head": 2}


def test_time_without_a_layer_is_refused():
    with pytest.raises(ValueError, match="stage 1 has a time and no layers"):
        layer_times((("embed", "layer.0", "norm", "head"), ()), fractions(1, 1))
