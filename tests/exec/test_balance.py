"""Losses and biases of routers on all ranks: bitwise the reference, near the unpartitioned model, and logged."""

import numpy as np
import pytest

from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
LOSSES = {"aux_loss": 0.1, "z_loss": 0.01}
BIAS = {"expert_bias_rate": 0.003, "score": "sigmoid"}
SP = {"tp": 2, "sequence_parallel": True}
PLANS = {
    "stages in a line": ({}, {}, {**LOSSES, **BIAS}, {}),
    "split backward": ({}, {"kind": "zb_v", "num_chunks": 2}, LOSSES, {}),
    "one loss": ({}, {"kind": "interleaved", "num_chunks": 2}, {"aux_loss": 0.1, "normalize": False}, {}),
    "computed again": ({}, {"kind": "zb_h1"}, {**LOSSES, **BIAS}, {"memory": {"recompute": "full"}}),
    "tp": ({"tp": 2}, {}, {**LOSSES, "expert_bias_rate": 0.003}, {}),
    "sp, dp": ({**SP, "pp": 1, "dp": 2}, {}, {**LOSSES, **BIAS}, {}),
    "ep, dp": ({"pp": 1, "ep": 2, "dp": 2}, {}, {**LOSSES, **BIAS}, {"run": {"clip_norm": 0.05}}),
    "ep, sp, computed again": ({**SP, "pp": 1, "ep": 2}, {}, {**LOSSES, **BIAS}, {"memory": {"recompute": "full"}}),
    "copies of stages": ({"ep": 2}, {"kind": "dualpipe"}, {**LOSSES, **BIAS}, {}),
    "sequence splits": ({"ep": 2}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {**LOSSES, **BIAS}, {}),
    "pieces, one rank of experts": ({}, {"kind": "seq1f1b", "num_sequence_splits": 2}, {**LOSSES, **BIAS}, {}),
    "sharded optimizer": ({"dp": 2}, {}, {**LOSSES, **BIAS}, {"memory": {"shard_optimizer": "dp"}}),
    "sums when ready": ({"dp": 2}, {"reduce_gradients": "when_ready"}, {**LOSSES, **BIAS}, {}),
    "gradients of twice the bits": ({}, {}, {**LOSSES, **BIAS}, {"run": {"main_grad_dtype": "float64"}}),
    "residual streams, sp, ep": (
        {**SP, "pp": 1, "ep": 2},
        {},
        {**LOSSES, **BIAS},
        {"model": {"hyper_connections": {"streams": 2}}},
    ),
    "modules that predict ahead": ({"ep": 2}, {}, {**LOSSES, **BIAS}, {"model": {"mtp": {"num_modules": 1}}}),
    "sizes of micro-batches": ({"ep": 2}, {"last_micro_batch_size": 1, "seq_lengths": [8, 4, 8, 6]}, LOSSES, {}),
}
WHOLE = {"stages in a line", "split backward", "one loss", "computed again", "gradients of twice the bits"}
"""Placements that add in the order of the unpartitioned model."""


def lowered(topology, schedule, moe, sections=(), **model):
    given = dict(sections)
    run = {"steps": 2, "seed": 3, "learning_rate": 0.01, **given.pop("run", {})}
    model = {"num_layers": 4, "moe": {**MOE, **moe}, **given.pop("model", {}), **model}
    return subject(model=model, topology=topology, schedule=schedule, run=run, **given).unfolded().plan


@pytest.mark.slow(
    but=[
        "stages in a line",
        "split backward",
        "tp",
        "ep, sp, computed again",
        "pieces, one rank of experts",
        "gradients of twice the bits",
    ]
)
@pytest.mark.parametrize("name", PLANS)
def test_routers_have_the_bits_of_the_reference(name):
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    plan = lowered(*PLANS[name])
    first, second = compared(plan)
    assert first.bitwise, first.routers.differing
    assert second.bitwise, second.routers.differing
    difference = max(one.unpartitioned_max_rel_diff for one in first.gradients)
    assert difference <= parallel_bound(plan.spec)
    assert (difference > 0) == (name not in WHOLE)
    for loss in first.routers.losses:
        ours, unpartitioned = first.routers.of_run[loss], first.routers.unpartitioned[loss]
        assert ours == unpartitioned if name in WHOLE else ours == pytest.approx(unpartitioned, rel=1e-5)


TWENTY = {"steps": 20, "seed": 5, "learning_rate": 0.01}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{"kind": "1f1b"}, {"kind": "zb_v", "num_chunks": 2}])
def test_twenty_steps_of_a_pipeline_are_those_of_the_unpartitioned_model(schedule):
    """Trained by itself, not step by step from equal weights; in between, loads pull the biases to and fro."""
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned
    from tests.exec.in_memory import run_all

    moe = {**LOSSES, **BIAS, "num_shared_experts": 0}
    plan = lowered({}, {**schedule, "num_micro_batches": 2}, moe, {"run": TWENTY}, seq_length=4)
    outcomes, _ = run_all(plan)
    biases = set()
    for of_step, unpartitioned in zip(outcomes, run_unpartitioned(plan.spec), strict=True):
        gradients = {name: array for rank in of_step for name, array in rank.gradients.items()}
        routers = {name: array for rank in of_step for name, array in rank.routers.items()}
        (loss,) = (rank.loss for rank in of_step if rank.loss is not None)
        assert loss.tobytes() == unpartitioned.loss.tobytes()
        for ours, theirs in ((gradients, unpartitioned.gradients), (routers, unpartitioned.routers)):
            assert ours.keys() == theirs.keys()
            assert [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()] == []
        biases.add(routers["bias/layer.3.mlp"].tobytes())
    assert len(biases) == 20


@pytest.mark.slow
def test_twenty_steps_over_data_ranks_keep_the_bits():
    from tests.exec.in_memory import compared

    topology, schedule = {"pp": 1, "ep": 2}, {"num_micro_batches": 2, "micro_batch_size": 1}
    plan = lowered(topology, schedule, {**LOSSES, **BIAS}, {"run": TWENTY}, seq_length=4, num_layers=2)
    assert all(step.bitwise for step in compared(plan))


@pytest.mark.slow
def test_the_losses_are_the_same_however_the_step_is_shared_out():
    """Eight micro-batches of a step on one, two and four data ranks, in one and four stages, in float64."""
    from tests.exec.in_memory import run_all

    shares = [
        ({"pp": 1}, {"num_micro_batches": 8}),
        ({"pp": 4}, {"num_micro_batches": 8}),
        ({"pp": 2}, {"num_micro_batches": 8, "kind": "interleaved", "num_chunks": 2}),
        ({"pp": 2, "dp": 2}, {"num_micro_batches": 4}),
        ({"pp": 2, "ep": 2}, {"num_micro_batches": 4}),
        ({"pp": 1, **SP, "ep": 2, "dp": 2}, {"num_micro_batches": 2}),
    ]
    seen = []
    for topology, schedule in shares:
        plan = lowered(
            topology, schedule, {**LOSSES, "expert_bias_rate": 0.01}, {"run": {"steps": 1, "dtype": "float64"}}
        )
        ((*ranks,),), _ = run_all(plan)
        losses = {key: value for rank in ranks for key, value in rank.routers.items()}
        router = next(
            r.gradients["layer.1.mlp.router.weight"] for r in ranks if "layer.1.mlp.router.weight" in r.gradients
        )
        seen.append((losses, router))
    losses, router = seen[0]
    assert len([key for key in losses if key.startswith("aux/")]) == 3 * 8
    for others, gradient in seen[1:]:
        assert others.keys() == losses.keys()
        assert all(np.allclose(others[key], losses[key], rtol=1e-12, atol=0) for key in losses)
        assert np.allclose(gradient, router, rtol=0, atol=1e-12 * np.abs(router).max())


def test_losses_of_routers_reach_the_weights_before_them():
    from tests.exec.in_memory import run_all

    gradients = []
    for factor in (0.0, 1.0, 2.0):
        plan = lowered({}, {"num_micro_batches": 2}, {"aux_loss": factor}, {"run": {"steps": 1, "dtype": "float64"}})
        ((*ranks,),), _ = run_all(plan)
        gradients.append({name: array for rank in ranks for name, array in rank.gradients.items()})
    plain, once, twice = gradients
    unreached = {name for name in plain if plain[name].tobytes() == once[name].tobytes()}
    behind = {"norm.weight", "head.weight"} | {name for name in plain if name.startswith("layer.3.mlp.experts")}
    assert behind <= unreached
    assert {"embed.weight", "layer.0.mlp.up.weight", "layer.3.mlp.router.weight"} <= plain.keys() - unreached
    for name in plain:
        assert np.allclose(twice[name] - plain[name], 2 * (once[name] - plain[name]), rtol=0, atol=1e-14)


def test_loads_of_one_rank_alone_are_seen(monkeypatch):
    """Each rank takes its own loads for those of all: the step's gradients are right, and the biases are not."""
    from pipeproof.stages.common.experts import Balance
    from tests.exec.in_memory import compared

    topology, schedule, moe, _ = PLANS["ep, dp"]
    plan = lowered(topology, schedule, moe, {"run": {"steps": 1}})
    monkeypatch.setattr(Balance, "set_load", lambda self, experts, load: None)
    (first,) = compared(plan)
    assert all(one.bitwise for one in first.gradients)
    assert set(first.routers.differing) <= {f"bias/layer.{i}.mlp" for i in (1, 2, 3)}
    assert not first.bitwise
