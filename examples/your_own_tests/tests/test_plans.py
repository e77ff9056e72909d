"""Requirements on the plans, in addition to their proof (`--pipeproof-plans` in pyproject.toml)."""

import pytest


@pytest.mark.pipeproof_plan("../plans/pretrain.yaml")
def test_what_we_pretrain_with_is_proved_and_keeps_to_our_memory(pipeproof_plan, plan_check):
    report = plan_check(pipeproof_plan, strict=True)
    assert report.certificate is not None
    assert max(rank.peak_activations for rank in report.in_flight) <= 2


@pytest.mark.pipeproof_plan("../plans/pretrain.yaml")
def test_the_slices_that_our_framework_switches_on_by_default_stay_off(pipeproof_plan):
    assert pipeproof_plan.spec.transport.forward == pipeproof_plan.spec.transport.backward == "full"
