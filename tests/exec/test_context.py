"""Context parallelism on all ranks: bitwise the reference, near the unpartitioned model, logged as described."""

import pytest

from pipeproof.diagnostics.finding import PipeproofError, Severity
from pipeproof.exec.rank.executor_support import require_executable
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.verify.check_plan import check_subject
from tests.exec.test_blocks import GROUPS, MLA, MOE
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

PLANS = {
    "four parts": {"topology": {"cp": 4}, "model": {"activation_order": "bsh"}, "schedule": {"kind": "zb_h1"}},
    "groups, tp": {"topology": {"cp": 2, "tp": 2}, "model": GROUPS, "transport": "partial"},
    "sp, gathered again": {
        "topology": {"cp": 2, "tp": 2, "sequence_parallel": True},
        "memory": {"sequence_parallel_activations": "regather"},
        "schedule": {"kind": "zb_h1"},
    },
    "dp, sizes of micro-batches": {
        "topology": {"cp": 2, "dp": 2},
        "schedule": {"seq_lengths": [8, 4, 8, 6], "last_micro_batch_size": 1},
    },
    "copies of stages": {"topology": {"cp": 2}, "schedule": {"kind": "dualpipe"}},
    "tied, clipped": {"topology": {"cp": 2}, "model": {"tied_embedding": True}, "run": {"steps": 2, "clip_norm": 0.1}},
    "all computed again": {"topology": {"cp": 2}, "memory": {"recompute": "full"}},
    "attention's core computed again": {
        "topology": {"cp": 2},
        "memory": {"recompute": "selective"},
        "loss": {"normalization": "mean_of_micro_batches"},
    },
    "experts, ep, bias": {"topology": {"cp": 2, "ep": 2}, "model": {"moe": {**MOE, "expert_bias_rate": 0.01}}},
    "streams": {"topology": {"cp": 2}, "model": {"hyper_connections": {"streams": 2, "sinkhorn_iterations": 3}}},
    "modules of multi-token prediction": {"topology": {"cp": 2}, "model": {"mtp": {"num_modules": 1}}},
    "dropout": {"topology": {"cp": 2}, "model": {"dropout": {"embedding": 0.1, "attention": 0.1, "hidden": 0.1}}},
}


def lowered(**sections):
    one = subject(**{"run": {"steps": 2}, **sections}).unfolded()
    assert [finding for finding in check_subject(one).findings if finding.severity is Severity.ERROR] == []
    require_executable(one)
    return one.plan


@pytest.mark.slow(
    but=[
        "four parts",
        "copies of stages",
        "tied, clipped",
        "all computed again",
        "attention's core computed again",
        "dropout",
        "modules of multi-token prediction",
    ]
)
@pytest.mark.parametrize("name", PLANS)
def test_a_run_has_the_bits_of_the_reference_and_is_near_the_unpartitioned_model(name):
    from tests.exec.in_memory import compared

    plan = lowered(**PLANS[name])
    steps = compared(plan)
    assert all(step.bitwise for step in steps)
    assert all(gradient.unpartitioned_max_rel_diff <= parallel_bound(plan.spec) for gradient in steps[0].gradients)


@pytest.mark.slow
def test_20_steps_of_adamw_have_the_bits_of_the_reference():
    from tests.exec.in_memory import compared

    steps = compared(
        lowered(topology={"cp": 2}, model={"num_layers": 2}, schedule={"num_micro_batches": 2}, run={"steps": 20})
    )
    assert len(steps) == 20
    assert all(step.bitwise for step in steps)


@pytest.mark.parametrize(
    ("model", "fact"),
    [
        ({"mla": MLA}, "the plan has cp 2 and latent attention"),
        ({"moe": {**MOE, "aux_loss": 0.01}}, "the plan has cp 2 and model.moe.aux_loss"),
        ({"moe": {**MOE, "z_loss": 0.01}}, "the plan has cp 2 and model.moe.z_loss"),
    ],
)
def test_what_stages_do_not_do_with_a_part_of_a_sequence_is_refused(model, fact):
    with pytest.raises(PipeproofError) as refused:
        require_executable(subject(topology={"cp": 2}, model=model))
    (finding,) = refused.value.findings
    assert (finding.code, finding.message.startswith(fact)) == ("PP909", True)
