"""A plan with measured times of layers, as ``pipeproof.torch.tune`` saves it, on other numbers of ranks."""

import random

import pytest

from pipeproof.analysis.tune.search_layouts import tune
from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict


def measured_on_two_ranks(dp=1, **memory):
    rng = random.Random(6)
    layers = []
    for number in range(12):
        us = rng.choice([1000, 2000, 3000])
        output = {"out": [{"shape": ["b", 16]}]} if number < 11 else {}
        times = {"forward_us": us, "backward_input_us": us, "backward_weight_us": us // 2, "activation_bytes": 1000}
        weight = {"name": "w", "shape": [256, 256]}
        layers.append({"name": f"l{number}", "parameters": [weight], **output, **times})
    return plan_from_dict(
        {
            "pipeproof": 1, "loss": {"normalization": "mean_of_micro_batches"},
            "model": {"kind": "layers", "layers": layers}, "topology": {"pp": 2, "dp": dp},
            "schedule": {"kind": "1f1b", "num_micro_batches": 16, "micro_batch_size": 4},
            "stages": [[f"l{n}" for n in range(6)], [f"l{n}" for n in range(6, 12)]],
            "cost": {"p2p_latency_us": 50}, "memory": memory,
        }
    )  # fmt: skip


SHARDED = dict.fromkeys(("shard_optimizer", "shard_gradients", "shard_weights"), "dp")


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize(("dp", "memory"), [(1, {}), (2, SHARDED)], ids=["pp", "pp and FSDP"])
def test_more_ranks_have_layouts_with_the_same_times_of_layers(gpus, dp, memory):
    plan = measured_on_two_ranks(dp, **memory)
    rows = tune(plan, gpus=gpus, top=2, workers=1, fix={"schedule": ["1f1b", "zb_h1"]}).rows
    assert len(rows) == 2
    work_us = sum(sum(layer.times.values()) for layer in plan.spec.custom.layers)
    for row in rows:
        spec = plan_from_dict(row.plan).spec
        assert (spec.topology.pp, spec.topology.dp) == (gpus // dp, dp)
        assert [name for stage in spec.stages for name in stage] == [f"l{n}" for n in range(12)]
        assert float(simulate(lower(spec)).makespan) == pytest.approx(1e6 * row.step)
        assert 1e6 * row.step > 16 * work_us / spec.topology.pp  # without a bubble
