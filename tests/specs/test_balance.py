"""Keys that keep experts evenly loaded: what they take, and what they say to what they do not."""

import pytest

from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict, refusal

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8}


def test_without_the_keys_nothing_is_balanced():
    moe = plan_from_dict(plan_dict(model={"moe": MOE})).spec.model.moe
    assert (moe.aux_loss, moe.z_loss, moe.expert_bias_rate) == (0.0, 0.0, None)


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("aux_loss", -0.1, "PP106"),
        ("z_loss", float("inf"), "PP106"),
        ("aux_loss", "0.01", "PP105"),
        ("expert_bias_rate", 0.0, "PP106"),
        ("expert_bias_rate", True, "PP105"),
        ("aux_los", 0.1, "PP102"),
    ],
)
def test_what_is_no_factor_is_refused_at_its_place(key, value, code):
    found = refusal(plan_dict(model={"moe": {**MOE, key: value}}))
    assert found.code == code
    assert key in found.message
