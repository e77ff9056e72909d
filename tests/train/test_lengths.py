"""One pipeline for steps of many lengths and rows, next to the unpartitioned model in one process."""

import pytest

from tests.train.launch import launch
from tests.train.test_compositions import require_done

pytestmark = pytest.mark.needs_torch

CASES = ["random_lengths", "refused_steps", "listed", "tools", "many"]


@pytest.fixture(scope="module")
def ran():
    return launch("lengths.py", 2, *CASES, timeout=400)


@pytest.mark.parametrize("case", CASES)
def test_steps_of_other_sizes_have_the_bits_of_the_unpartitioned_model_or_are_refused_together(ran, case):
    require_done(ran, 2, case)
