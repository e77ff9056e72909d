"""Keys of a plan that give two implementations one order of sums: that of numpy's loop, and what `state align` says."""

import numpy as np
import pytest
import torch

from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.specs.model import MoeSpec
from tests.plans import subject

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]
RANDOM = np.random.default_rng(3)
TOKENS, EXPERTS, HIDDEN, TOP_K = 40, 8, 16, 5
LOGITS = RANDOM.normal(size=(TOKENS, EXPERTS)).astype("f4")
OUTPUTS = RANDOM.normal(size=(TOKENS, EXPERTS, HIDDEN)).astype("f4")


def framework(name):
    """Its experts, and a function that makes a tensor."""
    if name == "torch":
        from pipeproof.stages.torch import experts

        return experts, torch.tensor
    import paddle

    from pipeproof.stages.paddle import experts

    return experts, paddle.to_tensor


@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_the_experts_of_a_token_are_added_in_numpys_order(name):
    module, tensor = framework(name)
    sums = {}
    for combine in ("choice", "expert"):
        moe = MoeSpec(num_experts=EXPERTS, top_k=TOP_K, ffn_size=4, combine=combine)
        chosen, gains = module.choose(tensor(LOGITS), moe)
        order = np.argsort(-LOGITS, axis=1)[:, :TOP_K]
        order = order if combine == "choice" else np.sort(order, axis=1)
        np.testing.assert_array_equal(np.asarray(chosen), order)
        rows = np.take_along_axis(OUTPUTS, order[..., None], 1)
        experts = object.__new__(module.TorchExperts if name == "torch" else module.PaddleExperts)
        experts._moe = moe
        sums[combine] = experts._weighted(tensor(rows), gains).numpy()
        total = rows[:, 0] * gains.numpy()[:, :1]
        for visit in range(1, TOP_K):
            total = total + rows[:, visit] * gains.numpy()[:, visit : visit + 1]
        is_equal = sums[combine].tobytes() == total.tobytes()
        assert is_equal == (name == "paddle" or combine == "expert")  # a kernel of PyTorch has an order of its own
    assert sums["choice"].tobytes() != sums["expert"].tobytes()
    np.testing.assert_allclose(sums["choice"], sums["expert"], rtol=1e-4, atol=1e-6)


def test_runs_that_differ_by_the_order_of_a_sum_are_told_so(tmp_path):
    from tests.align.recorded_plan import record, reference_run

    for combine in ("choice", "expert"):
        plan = subject(
            model={"moe": {"num_experts": 8, "top_k": 5, "ffn_size": 16, "dense_layers": 1, "combine": combine}},
            topology={"pp": 2}, run={"steps": 1},
        ).plan  # fmt: skip
        steps = record(plan, reference_run(plan), tmp_path / combine)
        assert all(step.bitwise for step in steps)
    runs = [tmp_path / combine / "run" for combine in ("choice", "expert")]
    first = align(*runs, Tolerance()).tensors.first
    assert (first.a.layer, first.a.direction, first.a.side) == ("layer.1", "forward", "output")
    assert first.cause.family == "accumulation order"
    assert align(*runs, Tolerance(rounding=True)).equal
