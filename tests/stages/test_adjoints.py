"""The backward of every operation is the adjoint of its forward's derivative, and the test detects wrong ones."""

import pytest

from tests.stages.adjoints.coverage import EXCUSED, operations
from tests.stages.adjoints.experts import require_gradient_of_router
from tests.stages.adjoints.on_paddle import PADDLE, all_cases
from tests.stages.adjoints.world import agrees

pytestmark = pytest.mark.needs_paddle

TABLE = {case.name: case for case in all_cases()}


@pytest.mark.parametrize("name", TABLE)
def test_backward_is_the_adjoint(name):
    assert agrees(PADDLE, TABLE[name])


def test_every_operation_has_a_row():
    assert len(TABLE) == len(all_cases()), "two rows have one name"
    covered = {name for case in TABLE.values() for name in case.covers}
    assert operations() - covered - set(EXCUSED) == set()
    assert covered - operations() == set(), "rows of removed operations"
    assert set(EXCUSED) - operations() == set()
    assert set(EXCUSED) & covered == set()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_gradient_of_a_router_is_that_of_what_it_feeds_and_of_its_losses(score):
    require_gradient_of_router(PADDLE, score)
