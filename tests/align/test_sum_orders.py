"""Keys of a plan that give two implementations one order of sums: numpy's loop agrees, and so does `state align`."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.analysis.align.read_record import open_record
from pipeproof.specs.model import MoeSpec
from pipeproof.stages.describe.synthetic import micro_batch
from tests.cli.commands import invoke
from tests.plans import plan_file, plan_spec, subject

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


def added(addends):
    """One after another."""
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total


@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_the_gradients_of_a_token_are_added_in_numpys_order(name):
    """Gradients of experts' inputs are added in the order of experts; a weight of an output multiplies the sum's
    gradient."""
    module, tensor = framework(name)
    experts = object.__new__(module.TorchExperts if name == "torch" else module.PaddleExperts)
    experts._moe = MoeSpec(num_experts=EXPERTS, top_k=TOP_K, ffn_size=4, combine="expert")
    experts._region = SimpleNamespace(num_ranks=1, counts=lambda counts, _: counts.reshape([1, -1]),
                                      exchange=lambda rows, *_: rows)  # fmt: skip
    experts._name, experts._swiglu = "", lambda rows, _: rows * 1.0
    tokens, (chosen, gains) = tensor(OUTPUTS[:, 0]), module.choose(tensor(LOGITS), experts._moe)
    tokens.stop_gradient = gains.stop_gradient = False  # Paddle's; PyTorch has an attribute more
    if name == "torch":
        tokens.requires_grad_()
        gains = gains.detach().requires_grad_()
    results = experts._visit(tokens, chosen, experts._counts(chosen))
    given = RANDOM.normal(size=(TOKENS, HIDDEN)).astype("f4")
    (experts._weighted(results, gains) * tensor(given)).sum().backward()
    weights = gains.detach().numpy()
    of_visits = given[:, None] * weights[..., None]
    assert tokens.grad.numpy().tobytes() == added([of_visits[:, visit] for visit in range(TOP_K)]).tobytes()
    expected = (given[:, None] * results.detach().numpy()).astype("f8").sum(-1)
    np.testing.assert_allclose(gains.grad.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_16_bits_are_added_in_float32():
    module, _ = framework("torch")
    experts = object.__new__(module.TorchExperts)
    experts._moe = MoeSpec(num_experts=EXPERTS, top_k=TOP_K, ffn_size=4, combine="expert")
    experts._region, experts._swiglu = SimpleNamespace(num_ranks=1), lambda rows, _: rows * 1.0
    tokens = torch.tensor(OUTPUTS[:, 0]).bfloat16().requires_grad_()
    chosen, _ = module.choose(torch.tensor(LOGITS), experts._moe)
    given = torch.tensor(OUTPUTS[:, :TOP_K]).bfloat16()
    (experts._visit(tokens, chosen, experts._counts(chosen)) * given).sum().backward()
    expected = added(given.float().numpy().transpose(1, 0, 2))
    assert torch.equal(tokens.grad, torch.tensor(expected).bfloat16())
    assert not torch.equal(tokens.grad, added(given.unbind(1)))


@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_gathered_tokens_add_their_experts_of_a_rank_in_numpys_order(name):
    """With all_gather a rank adds its own experts of each token; forward and the gradient of tokens."""
    module, tensor = framework(name)
    experts = object.__new__(module.TorchExperts if name == "torch" else module.PaddleExperts)
    experts._moe = MoeSpec(num_experts=EXPERTS, top_k=TOP_K, ffn_size=4, combine="expert", dispatcher="all_gather")
    experts._region, experts._swiglu = SimpleNamespace(num_ranks=2, rank=1), lambda rows, _: rows * 1.0
    tokens, (chosen, gains) = tensor(OUTPUTS[:, 0]), module.choose(tensor(LOGITS), experts._moe)
    tokens.stop_gradient = False
    if name == "torch":
        tokens.requires_grad_()
    sums = experts._visit_own(tokens, chosen, gains)
    given = RANDOM.normal(size=(TOKENS, HIDDEN)).astype("f4")
    (sums * tensor(given)).sum().backward()
    own = np.asarray(chosen)[..., None] >= EXPERTS // 2
    weights, zero = np.where(own, gains.numpy()[..., None], np.float32(0)), np.zeros_like(given)
    expected = added([zero, *(OUTPUTS[:, 0] * weights[:, visit] for visit in range(TOP_K))])
    assert np.array_equal(sums.detach().numpy(), expected)
    assert np.array_equal(tokens.grad.numpy(), added([zero, *(given * weights[:, visit] for visit in range(TOP_K))]))


@pytest.mark.parametrize("dtype", [None, "float32", "float64"])
@pytest.mark.parametrize("name", ["torch", "paddle"])
def test_the_router_and_its_gradients_are_products_in_their_type(name, dtype):
    x, given = OUTPUTS[:, 1], RANDOM.normal(size=(TOKENS, EXPERTS))
    matrix = RANDOM.normal(size=(HIDDEN, EXPERTS)).astype("f4")
    wide = np.dtype(dtype or "f4")
    if name == "torch":
        from pipeproof.stages.torch.weights import SplitWeights, Weight

        weights, weight = SplitWeights(torch.device("cpu")), Weight(torch.tensor(matrix))
        activation = torch.tensor(x, requires_grad=True)
        output = weights.product(activation, weight, dtype=dtype)
        weights.backward(output, torch.tensor(given.astype(wide))).accumulate()
        found = output.detach(), activation.grad, weight.gradient
    else:
        import paddle

        from pipeproof.stages.paddle.weights import SplitWeights

        weights, weight, activation = SplitWeights(), paddle.to_tensor(matrix), paddle.to_tensor(x)
        weight.stop_gradient = activation.stop_gradient = False
        output = weights.product(activation, weight, dtype=dtype)
        weights.backward(output, paddle.to_tensor(given.astype(wide))).accumulate()
        found = output, activation.grad, weight.grad
    rows, factor, back = x.astype(wide), matrix.astype(wide), given.astype(wide)
    expected = rows @ factor, (back @ factor.T).astype("f4"), (rows.T @ back).astype("f4")
    for one, other in zip(found, expected, strict=True):
        assert (one.numpy().dtype, one.numpy().shape) == (other.dtype, other.shape)
        is_rounded = wide == "f8" and other.dtype == "f4"
        np.testing.assert_allclose(one.numpy(), other, rtol=0 if is_rounded else 16 * np.finfo(other.dtype).eps,
                                   atol=0 if is_rounded else 16 * np.finfo(other.dtype).eps)  # fmt: skip


@pytest.mark.parametrize("main", [None, "float64"])
@pytest.mark.parametrize("order", ["sbh", "bsh"])
@pytest.mark.parametrize("backend", ["torch", "paddle"])
def test_gradients_of_weights_add_tokens_in_the_order_of_activations(backend, order, main, tmp_path):
    """The gradient of the embedding, whose rows are added token by token, of a vocabulary in which they repeat."""
    sections = {
        "model": {"num_layers": 1, "vocab_size": 8, "activation_order": order}, "topology": {"pp": 1},
        "schedule": {"num_micro_batches": 3, "micro_batch_size": 4},
        "run": {"backend": backend, "dtype": "float32", "steps": 1, **({"main_grad_dtype": main} if main else {})},
    }  # fmt: skip
    plan_file(tmp_path / "plan.json", **sections)
    plan = plan_spec(**sections)
    result = invoke("run", tmp_path / "plan.json", "--record", tmp_path / "r", "--record-layers", "--record-values")
    assert result.exit_code == 0, result.output
    side = open_record(tmp_path / "r" / "run")
    (step,) = side.steps()
    found = {tensor.key: side.values(tensor).whole for tensor in step.tensors}
    total = next(value for key, value in found.items() if "embed.weight" in key)
    expected, wide = np.zeros_like(total), np.dtype(main or "f4")
    for number in range(3):
        tokens = micro_batch(plan, 0, number).tokens
        given = next(
            found[tensor.key]
            for tensor in step.tensors
            if (tensor.layer, tensor.direction, tensor.side) == ("embed", "backward", "input")
            and tensor.micro_batch == number
        )
        rows, ids = given.reshape(-1, given.shape[-1]), (tokens.T if order == "sbh" else tokens).reshape(-1)
        if backend == "torch":  # adds each row to the buffer; Paddle first adds the rows of a micro-batch
            np.add.at(expected, ids, rows.astype(wide))
        else:
            part = np.zeros(total.shape, "f4")
            np.add.at(part, ids, rows)
            expected = expected + part.astype(wide)
    assert total.tobytes() == expected.tobytes()


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
