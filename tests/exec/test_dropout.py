"""Dropout reaches every position, and a rank with the mask of another is seen."""

import pytest

from tests.exec.test_reference_bits import DROPOUT, lowered

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


@pytest.mark.parametrize("place", DROPOUT["dropout"])
def test_elements_are_dropped_at_every_position(place):
    from tests.exec.in_memory import run_all

    losses = []
    for dropout in (None, {place: 0.3}):
        plan = lowered({"pp": 1}, {}, {"dropout": dropout}, steps=1)
        losses.append(run_all(plan)[0][0][0].loss)
    assert losses[0] != losses[1]


def test_a_rank_with_the_mask_of_another_is_seen(monkeypatch):
    """Each tensor-parallel rank takes the other's heads of the mask: from the first forward on, bits differ."""
    from pipeproof.stages.describe.synthetic import DropoutKeys
    from tests.exec.in_memory import run_all

    plan = lowered({"pp": 1, "tp": 2}, {}, {"dropout": {"attention": 0.3}}, steps=1)
    right = run_all(plan)[0][0][0].loss
    mine = DropoutKeys.of_attention
    monkeypatch.setattr(
        DropoutKeys,
        "of_attention",
        lambda self, layer, rate, heads, queries: mine(self, layer, rate, (2 - heads[0], 6 - heads[1]), queries),
    )
    assert run_all(plan)[0][0][0].loss != right
