"""Tensor- and data-parallel ranks have the ordered reference's bits, within the bound of the unpartitioned model."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.stages.reference.unpartitioned import unpartitioned_step
from tests.stages.staged_run import StagedRun, make_plan, run_in_order, same_bits
from tests.stages.world import Issued

pytestmark = pytest.mark.needs_paddle


def max_rel_diff(ours, reference):
    return max(
        np.abs(ours[name].astype(np.float64) - whole).max() / np.abs(whole).max() for name, whole in reference.items()
    )


def assert_bitwise_and_bounded(plan, cut=()):
    bound = parallel_bound(plan)
    for ours, ordered in zip(StagedRun(plan, cut).steps(), run_in_order(plan), strict=True):
        assert ours.loss.tobytes() == ordered.loss.tobytes()
        assert same_bits(ours.gradients, ordered.gradients) == []
        unpartitioned = unpartitioned_step(plan, ordered.weights, ordered.step)
        assert max_rel_diff(ordered.gradients, unpartitioned.gradients) <= bound
        assert abs(ordered.loss - unpartitioned.loss) <= bound * unpartitioned.loss


@pytest.mark.slow(
    but=["2-False-float64-bsh", "2-True-float32-sbh", "2-True-float64-bsh", "4-True-float32-bsh", "4-True-float64-sbh"]
)
@pytest.mark.parametrize("order", ["sbh", "bsh"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_are_bitwise_the_ordered_model_over_three_steps(tp, sequence_parallel, dtype, order):
    plan = make_plan(
        model={"activation_order": order, "num_layers": 2},
        topology={"tp": tp, "sequence_parallel": sequence_parallel},
        schedule={"num_micro_batches": 3},
        run={"dtype": dtype, "steps": 3, "seed": 3},
    )
    assert_bitwise_and_bounded(plan, cut=(1, 2, 4) if order == "sbh" else ())


@pytest.mark.slow(but=["1-False-sgd", "1-False-adamw", "2-True-adamw"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_data_parallel_ranks_are_bitwise_the_ordered_model(tp, sequence_parallel, optimizer):
    plan = make_plan(
        topology={"tp": tp, "sequence_parallel": sequence_parallel, "dp": 3},
        loss={"normalization": "mean_of_micro_batches"},
        run={"optimizer": optimizer, "steps": 2},
    )
    assert_bitwise_and_bounded(plan)


@pytest.mark.parametrize("order", ["sbh", "bsh"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_micro_batches_of_different_sizes_are_bitwise_the_ordered_model(tp, sequence_parallel, order):
    plan = make_plan(
        model={"activation_order": order, "num_layers": 2},
        topology={"tp": tp, "sequence_parallel": sequence_parallel, "dp": 2},
        schedule={"num_micro_batches": 4, "last_micro_batch_size": 1, "seq_lengths": [8, 2, 6, 4]},
        run={"steps": 2},
    )
    assert_bitwise_and_bounded(plan)


@st.composite
def odd_plans(draw):
    """Sizes that fill no vector register and no cache line: where another shape may take another kernel."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    sequence_parallel = draw(st.booleans())
    num_heads = tp * draw(st.integers(1, 2))
    return make_plan(
        model={
            "num_layers": 1,
            "hidden_size": num_heads * 2 * draw(st.integers(1, 5)),
            "num_heads": num_heads,
            "ffn_size": tp * draw(st.integers(1, 9)),
            "vocab_size": tp * draw(st.integers(4, 17)),
            "seq_length": tp * draw(st.integers(1, 5)),
            "activation_order": draw(st.sampled_from(["sbh", "bsh"])),
        },
        topology={"tp": tp, "dp": draw(st.integers(1, 2)), "sequence_parallel": sequence_parallel},
        schedule={"num_micro_batches": draw(st.integers(1, 3)), "micro_batch_size": draw(st.integers(1, 3))},
        run={"steps": 2, "seed": draw(st.integers(0, 999)), "dtype": draw(st.sampled_from(["float32", "float64"]))},
    )


@given(odd_plans())
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_odd_sizes_are_bitwise_too(plan):
    for ours, ordered in zip(StagedRun(plan).steps(), run_in_order(plan), strict=True):
        assert ours.loss.tobytes() == ordered.loss.tobytes()
        assert same_bits(ours.gradients, ordered.gradients) == []


@pytest.mark.parametrize("cut", [(), (2, 5)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_layers_issue_exactly_the_collectives_that_the_description_lists(tp, sequence_parallel, cut):
    assert_issued_as_described({}, tp, sequence_parallel, cut)


MLA = {"kv_rank": 4, "nope_head_size": 2, "rope_head_size": 4, "value_head_size": 3}
MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "model", [{"num_kv_heads": 2, "head_size": 6}, {"mla": MLA}, {"mla": {**MLA, "q_rank": 4}}, {"moe": MOE}]
)
def test_parts_of_blocks_issue_exactly_the_collectives_that_the_description_lists(model, sequence_parallel):
    """Compressed vectors of one size: only their names tell them apart."""
    assert_issued_as_described(model, 2, sequence_parallel, (2,))


def assert_issued_as_described(model, tp, sequence_parallel, cut):
    plan = make_plan(model=model, topology={"tp": tp, "sequence_parallel": sequence_parallel}, run={"steps": 1})
    run = StagedRun(plan, cut)
    list(run.steps())
    layers = describe_gpt(plan)
    forward = [_issued(c) for layer in layers for c in layer.forward_collectives]
    backward = [_issued(c) for layer in reversed(layers) for c in layer.backward_collectives]
    assert bool(forward) == (tp > 1)
    assert len(run.issued) == tp * plan.schedule.num_micro_batches
    assert all(issued == (forward, backward) for issued in run.issued)


def _issued(collective):
    return Issued(str(collective.kind), collective.axis, collective.numel, collective.label, collective.reduction)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_bound_is_tight_enough_to_see_one_wrong_weight(dtype):
    plan = make_plan(topology={"tp": 2}, run={"dtype": dtype, "steps": 1})
    (ordered,) = run_in_order(plan)
    weights = {name: weight.copy() for name, weight in ordered.weights.items()}
    weights["layer.1.mlp.up.weight"][0, 0] *= 1.5
    damaged = unpartitioned_step(plan, weights, 0)
    assert max_rel_diff(ordered.gradients, damaged.gradients) > 5 * parallel_bound(plan)


def test_a_rank_that_issues_something_else_is_not_waited_for():
    run = StagedRun(make_plan(topology={"tp": 2}))
    ones = run.stages[0][0].parameters["norm.weight"].detach()
    with pytest.raises(AssertionError, match="different collectives"):
        run.world.run(lambda rank: run.world.ranks[rank].all_reduce(ones, label=f"from {rank}"))
