"""Arguments and results of stages, tied weights on one rank, uneven stages, schedules of scripts, varied lengths."""

import pytest

from tests.train.launch import launch
from tests.train.test_compositions import require_done

pytestmark = pytest.mark.needs_torch


@pytest.fixture(scope="module")
def ran():
    return launch("stage_inputs.py", 2, timeout=400)


@pytest.mark.parametrize(
    "case", ["structured", "uneven", "inside", "named", "mirrored", "frozen_ties", "sparse", "lengths"]
)
def test_gradients_are_those_of_the_unpartitioned_model(ran, case):
    require_done(ran, 2, case)
