"""Losses of routers however a step is shared out, their gradients, and loads that are not summed."""

import numpy as np
import pytest

from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
LOSSES = {"aux_loss": 0.1, "z_loss": 0.01}
BIAS = {"expert_bias_rate": 0.003, "score": "sigmoid"}
SP = {"tp": 2, "sequence_parallel": True}


def lowered(topology, schedule, moe, run):
    run = {"seed": 3, "learning_rate": 0.01, **run}
    model = {"num_layers": 4, "moe": {**MOE, **moe}}
    return subject(model=model, topology=topology, schedule=schedule, run=run).unfolded().plan


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
        plan = lowered(topology, schedule, {**LOSSES, "expert_bias_rate": 0.01}, {"steps": 1, "dtype": "float64"})
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
        plan = lowered({}, {"num_micro_batches": 2}, {"aux_loss": factor}, {"steps": 1, "dtype": "float64"})
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
    """Each rank takes its own loads for the loads of all: the step's gradients are right, and the biases are not."""
    from pipeproof.stages.common.experts import Balance
    from tests.exec.in_memory import compared

    topology = {"pp": 1, "ep": 2, "dp": 2}
    plan = lowered(topology, {}, {**LOSSES, **BIAS}, {"steps": 1, "clip_norm": 0.05})
    monkeypatch.setattr(Balance, "set_load", lambda self, experts, load: None)
    (first,) = compared(plan)
    assert all(one.bitwise for one in first.gradients)
    assert set(first.routers.differing) <= {f"bias/layer.{i}.mlp" for i in (1, 2, 3)}
    assert not first.bitwise
