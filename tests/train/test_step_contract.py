"""What a step is given, through pipelines of two processes, against plain loops over micro-batches."""

import pytest

from tests.train.launch import launch
from tests.train.test_compositions import require_done

pytestmark = pytest.mark.needs_torch


@pytest.fixture(scope="module")
def ran():
    return launch("step_contract.py", 2, timeout=400)


@pytest.mark.parametrize("case", ["random_arguments", "block_masks", "collators_dicts", "other_rows"])
def test_micro_batches_are_those_of_a_plain_loop(ran, case):
    require_done(ran, 2, case)
