"""Seams of a script's modules: turns have the bits of whole computations, and errors end both sides."""

import pytest

from tests.train.launch import run

pytestmark = pytest.mark.needs_torch


def test_outside_of_a_pair_a_seam_only_waits():
    from pipeproof.torch import seam

    waited = []

    class Work:
        def wait(self):
            waited.append(True)

    seam(Work())
    assert waited == [True]


@pytest.mark.slow  # two processes start PyTorch
def test_pairs_that_take_turns_at_seams_have_the_bits_of_whole_ones():
    run("seams.py", 2, timeout=120)
