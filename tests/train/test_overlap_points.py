"""Overlap points of a script's modules: turns have the bits of whole computations, and errors end both sides."""

import pytest

from tests.train.launch import run

pytestmark = pytest.mark.needs_torch


def test_outside_of_a_pair_an_overlap_point_only_waits():
    from pipeproof.torch import overlap_point

    waited = []

    class Work:
        def wait(self):
            waited.append(True)

    overlap_point(Work())
    assert waited == [True]


@pytest.mark.slow  # two processes start PyTorch
def test_pairs_that_take_turns_at_overlap_points_have_the_bits_of_whole_ones():
    run("overlap_points.py", 2, timeout=120)
