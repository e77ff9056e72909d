"""Tensor- and data-parallel ranks of odd sizes have the ordered reference's bits; how tight the bound is."""

import numpy as np
import paddle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.stages.reference.unpartitioned import unpartitioned_step
from tests.exec.in_memory import compared
from tests.plans import subject
from tests.stages.references import make_plan, run_in_order
from tests.stages.world import World

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


def max_rel_diff(ours, reference):
    return max(
        np.abs(ours[name].astype(np.float64) - whole).max() / np.abs(whole).max() for name, whole in reference.items()
    )


@st.composite
def odd_plans(draw):
    """Sizes that fill no vector register and no cache line: where another shape may take another kernel."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    sequence_parallel = draw(st.booleans())
    num_heads = tp * draw(st.integers(1, 2))
    return {
        "model": {
            "num_layers": 1,
            "hidden_size": num_heads * 2 * draw(st.integers(1, 5)),
            "num_heads": num_heads,
            "ffn_size": tp * draw(st.integers(1, 9)),
            "vocab_size": tp * draw(st.integers(4, 17)),
            "seq_length": tp * draw(st.integers(1, 5)),
            "activation_order": draw(st.sampled_from(["sbh", "bsh"])),
        },
        "topology": {"pp": 1, "tp": tp, "dp": draw(st.integers(1, 2)), "sequence_parallel": sequence_parallel},
        "schedule": {"num_micro_batches": draw(st.integers(1, 3)), "micro_batch_size": draw(st.integers(1, 3))},
        "run": {"steps": 2, "seed": draw(st.integers(0, 999)), "dtype": draw(st.sampled_from(["float32", "float64"]))},
    }


@given(odd_plans())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_odd_sizes_are_bitwise_too(sections):
    assert all(step.bitwise for step in compared(subject(**sections).unfolded().plan))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_bound_is_tight_enough_to_see_one_wrong_weight(dtype):
    plan = make_plan(topology={"tp": 2}, run={"dtype": dtype, "steps": 1})
    (ordered,) = run_in_order(plan)
    weights = {name: weight.copy() for name, weight in ordered.weights.items()}
    weights["layer.1.mlp.up.weight"][0, 0] *= 1.5
    damaged = unpartitioned_step(plan, weights, 0)
    assert max_rel_diff(ordered.gradients, damaged.gradients) > 5 * parallel_bound(plan)


def test_a_rank_that_issues_something_else_is_not_waited_for():
    world = World(paddle, tp=2)
    with pytest.raises(AssertionError, match="different collectives"):
        world.run(lambda rank: world.ranks[rank].all_reduce(paddle.ones([2]), label=f"from {rank}"))
