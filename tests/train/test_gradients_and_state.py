"""Parameters without a gradient, tied weights in ``compare``, and buffers and random states between steps."""

import pytest

from tests.train.launch import launch
from tests.train.test_compositions import require_done

pytestmark = pytest.mark.needs_torch


@pytest.fixture(scope="module")
def ran():
    return launch("gradients_and_state.py", 2, timeout=500)


@pytest.mark.parametrize(
    "case", ["unused", "unused_copies", "unused_later", "untrained", "tied", "state", "reused", "remembered"]
)
def test_gradients_and_state_are_those_of_the_unpartitioned_model(ran, case):
    require_done(ran, 2, case)
