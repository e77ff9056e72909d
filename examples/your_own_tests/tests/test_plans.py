"""Each plan is proved, and keeps to our own requirements."""

from pathlib import Path

import pytest

from pipeproof import load_plan
from pipeproof.testing import assert_plan_sound

PLANS = Path(__file__).parents[1] / "plans"


@pytest.mark.parametrize("plan", sorted(PLANS.glob("*.yaml")), ids=lambda plan: plan.name)
def test_every_plan_is_proved(plan):
    assert_plan_sound(plan)


def test_what_we_pretrain_with_keeps_to_our_memory():
    report = assert_plan_sound(PLANS / "pretrain.yaml", strict=True)
    assert max(rank.peak_activations for rank in report.in_flight) <= 2


def test_the_slices_that_our_framework_switches_on_by_default_stay_off():
    transport = load_plan(PLANS / "pretrain.yaml").spec.transport
    assert transport.forward == transport.backward == "full"
