"""Every operation with a backward of its own, and what is built of them: slopes in float64, with generic values.

What a backward says of inputs and weights is compared with central differences along random directions.
"""

from functools import partial

import numpy as np
import pytest
import torch

from pipeproof.specs.model import HyperConnectionsSpec
from pipeproof.stages.common.backend_ops import clamped_swiglu
from pipeproof.stages.common.experts import ExpertRegion
from pipeproof.stages.common.sequence_splits import EarlierSplits, GatheredKeys
from pipeproof.stages.common.stage import (
    contract_streams,
    expand_streams,
    gated_sum_of_streams,
    sinkhorn,
    sinkhorn_of_softmax,
    with_positions,
    with_streams,
)
from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.describe.gradient_facts import loss_weights
from pipeproof.stages.describe.layers.layer_operations import ENDS
from pipeproof.stages.torch.backend_ops import OPS, recompute_in_backward
from pipeproof.stages.torch.experts import TorchBalance, inverse, reorder, visits
from pipeproof.stages.torch.functional import (
    Groups,
    causal_attention,
    clip,
    fork,
    mlp_activation,
    rms_norm,
    rotate,
    rotated_heads,
    swiglu,
)
from pipeproof.stages.torch.stage import summed_cross_entropies
from pipeproof.stages.torch.weights import SplitWeights, Weight
from tests.stages.torch.features import EVEN, MLA, MOE, make_plan
from tests.stages.torch.staged_run import CPU
from tests.stages.world import World

pytestmark = pytest.mark.needs_torch

STEP = 1e-5


def draws_of(seed):
    generator = np.random.default_rng(seed)
    return lambda *shape: torch.tensor(generator.standard_normal(shape))


def assert_slopes(compute, inputs, weights=(), *, split=None):
    """``compute(*inputs)`` is a tensor or several; ``weights`` have the gradients that ``split`` puts off."""
    draw, split = draws_of(7), split or SplitWeights(CPU)
    shapes = [out.shape for out in outputs_of(compute, inputs)]
    back = [draw(*shape) for shape in shapes]

    def value():
        with torch.no_grad():
            return sum((out * g).sum() for out, g in zip(outputs_of(compute, inputs), back, strict=True)).item()

    leaves = [x.detach().requires_grad_() for x in inputs]
    total = sum((out * g).sum() for out, g in zip(outputs_of(compute, leaves), back, strict=True))
    split.backward(total, None).accumulate()
    found = [leaf.grad for leaf in leaves] + [weight.gradient for weight in weights]
    for place, (tensor, gradient) in enumerate(
        zip([*inputs, *(weight.main for weight in weights)], found, strict=True)
    ):
        direction = draw(*tensor.shape)
        tensor.add_(direction, alpha=STEP)
        above = value()
        tensor.add_(direction, alpha=-2 * STEP)
        slope = (above - value()) / (2 * STEP)
        tensor.add_(direction, alpha=STEP)
        size = gradient.norm().item() * direction.norm().item()
        assert abs((gradient * direction).sum().item() - slope) < 1e-7 * max(size, 1e-3), place
        assert size > 0, place


def outputs_of(compute, inputs):
    made = compute(*inputs)
    return [made] if isinstance(made, torch.Tensor) else list(made)


def tables(*shape):
    return draws_of(1)(*shape)


ORDER = torch.tensor([2, 0, 3, 1])
FACTORS = (draws_of(2)(2, 2, 3, 4, 6) > 0).double() * 1.5
PLAIN = {
    "rotary": (lambda x: rotate(x, tables(5, 6), draws_of(3)(5, 6)), (2, 3, 5, 6)),
    "heads turned": (lambda x: rotated_heads(x, tables(5, 6), draws_of(3)(5, 6)), (2, 3, 4, 5, 6)),
    "norm": (rms_norm, (3, 4, 8)),
    "GELU": (mlp_activation(make_plan("plain", model={"mlp": "gelu"}).gpt), (3, 8)),
    "GELU with tanh": (mlp_activation(make_plan("plain", model={"mlp": "gelu_tanh"}).gpt), (3, 8)),
    "swiglu": (swiglu, (3, 8), (3, 8)),
    "clamped": (lambda g, u: clamped_swiglu(g, u, 0.6, clip), (6, 8), (6, 8)),
    "attention": (causal_attention, (2, 2, 3, 4, 6), (2, 2, 4, 6), (2, 2, 4, 3)),
    "attention of a later split": (causal_attention, (2, 2, 3, 4, 6), (2, 2, 6, 6), (2, 2, 6, 3)),
    "attention with dropout": (
        partial(causal_attention, factors=FACTORS), (2, 2, 3, 4, 5), (2, 2, 6, 5), (2, 2, 6, 3),
    ),
    "positions": (
        lambda q, k, s: with_positions(OPS, q, k, s, make_plan("latent").model.mla, tables(5, 4), draws_of(3)(5, 4)),
        (2, 3, 5, 8), (2, 3, 5, 4 + MLA["value_head_size"]), (2, 5, 4),
    ),
    "fork": (lambda x: [one * (place + 1) for place, one in enumerate(fork(x, 3))], (3, 4)),
    "rows moved": (lambda x: reorder(x, ORDER, inverse(ORDER)).tanh(), (4, 3)),
    "rows visited": (lambda x: visits(x, ORDER, inverse(ORDER)).tanh(), (2, 3)),
    "recomputed": (lambda *x: recompute_in_backward(lambda a, b: a.tanh() * b, *x), (3, 4), (3, 4)),
    "streams expand_streams": (lambda x: expand_streams(OPS, x, 3).tanh(), (2, 2, 4)),
    "streams contract_streams": (lambda x: contract_streams(OPS, x, 3).tanh(), (2, 2, 12)),
    "Sinkhorn of softmax": (lambda x: sinkhorn_of_softmax(OPS, x, 3, 0.1), (2, 2, 3, 3)),
    "Sinkhorn": (lambda x: sinkhorn(OPS, x, 3), (2, 2, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_functions(name):
    compute, *shapes = PLAIN[name]
    draw = draws_of(0)
    assert_slopes(compute, [draw(*shape) for shape in shapes])


def weights(*shapes):
    draw = draws_of(4)
    return [Weight(draw(*shape)) for shape in shapes]


PLACES = torch.tensor([[1, 0], [3, 1], [1, 1]])
STREAMS = HyperConnectionsSpec(streams=2, sinkhorn_iterations=2)
V4 = STREAMS.model_copy(update={"sinkhorn": "softmax", "epsilon": 0.1, "transposed": True})
WITH_WEIGHTS = {
    "product": (lambda s, x, w: s.product(x, w), [(3, 2, 4)], [(4, 5)]),
    "product with the transpose": (lambda s, x, w: s.product(x, w, transposed=True), [(3, 2, 4)], [(5, 4)]),
    "product of part of a tensor": (lambda s, x, w: s.product(x[:, 1:], w), [(3, 4, 4)], [(4, 5)]),
    "norm": (lambda s, x, w: s.norm(x, w, None), [(3, 2, 4)], [(4,)]),
    "norm of heads": (lambda s, x, w: s.norm(x[:, :, 1:], w, None), [(3, 2, 4, 4)], [(4,)]),
    "LayerNorm": (lambda s, x, w, b: s.norm(x, w, b), [(3, 2, 4)], [(4,), (4,)]),
    "added": (lambda s, x, w: s.added(x, w).tanh(), [(3, 2, 4)], [(4,)]),
    "added rows": (lambda s, x, w: s.added(x, w, lambda whole: whole[1:4].unsqueeze(1)).tanh(), [(3, 2, 4)], [(5, 4)]),
    "scaled and shifted": (
        lambda s, x, a, b: s.scaled_and_shifted(x, a, b, [2, 1, 3]), [(3, 2, 6)], [(3,), (6,)],
    ),
    "groups of rows": (lambda s, x, w: s.grouped(x, w, Groups(torch.tensor([2, 0, 3]))).tanh(), [(5, 4)], [(3, 4, 2)]),
    "rows": (lambda s, w: s.rows(PLACES, w).tanh(), [], [(4, 3)]),
    "one weight twice": (lambda s, x, w: s.product(s.product(x, w).tanh(), w), [(3, 4)], [(4, 4)]),
    "streams of DeepSeek-V4 around a sub-layer": (
        lambda s, x, *own: with_streams(OPS, x, torch.tanh, V4, s, dict(zip(ENDS, own, strict=True))),
        [(3, 2, 8)], [(8, 8), (3,), (8,)],
    ),
    "gated sum of streams": (
        lambda s, x, *own: gated_sum_of_streams(OPS, x, V4, s, dict(zip(ENDS, own, strict=True))),
        [(3, 2, 8)], [(8, 2), (1,), (2,)],
    ),
    "streams with_streams a sub-layer": (
        lambda s, x, *own: with_streams(
            OPS, x, torch.tanh, STREAMS, s, dict(zip(ENDS, own, strict=True))
        ),
        [(3, 2, 8)], [(8, 8), (3,), (8,)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_weights(name):
    compute, inputs, shapes = WITH_WEIGHTS[name]
    draw, split, own = draws_of(0), SplitWeights(CPU), weights(*shapes)
    assert_slopes(lambda *x: compute(split, *x, *own), [draw(*shape) for shape in inputs], own, split=split)


def test_a_row_that_nobody_looks_up_has_no_gradient():
    split, (weight,) = SplitWeights(CPU), weights((4, 3))
    split.backward(split.rows(PLACES, weight).sum(), None).accumulate()
    assert weight.gradient[:, 0].tolist() == [1.0, 4.0, 0.0, 1.0]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_of_routers_add_their_gradient(score):
    """The choice is a constant: no direction here changes it."""
    plan = make_plan("plain", model={"moe": {**MOE, **EVEN, "score": score}})
    scale = loss_weights(plan)
    balance = TorchBalance(plan, (), CPU, adds_losses=True)
    router = balance.of("layer.1.mlp", 0, 0)
    logits, back, direction = (draws_of(seed)(7, MOE["num_experts"]) for seed in range(3))

    def losses(x):
        balance.begin()
        router.enter(x)
        return sum(value for value in balance.values().values())

    leaf = logits.clone().requires_grad_()
    router.enter(leaf).backward(back)
    slope = (losses(logits + STEP * direction) - losses(logits - STEP * direction)) / (2 * STEP)
    assert ((leaf.grad - back) * direction).sum().item() == pytest.approx(slope, rel=1e-6)
    assert set(balance.values()) == {f"{name}/layer.1.mlp/0/0" for name in scale}


@pytest.mark.parametrize("recomputes", [False, True])
def test_splits_of_a_sequence(recomputes):
    """Later splits look at the keys and values of those before; backwards come from the last to the first."""
    draw = draws_of(0)
    own = [(draw(2, 2, 3, 4).requires_grad_(), draw(2, 2, 3, 4).requires_grad_()) for _ in range(3)]
    back = [draw(2, 2, 3 * (number + 1), 4) for number in range(3)]
    earlier = EarlierSplits(OPS, 3, recomputes=recomputes)

    def split(number, key, value):
        keys, values = earlier.join(key, value, micro_batch=0, layer="x", split=number)
        return keys.tanh() * values

    made = [
        recompute_in_backward(partial(split, number), *tensors) if recomputes else split(number, *tensors)
        for number, tensors in enumerate(own)
    ]
    for output, gradient in reversed([*zip(made, back, strict=True)]):
        output.backward(gradient)
    whole = [torch.cat([pair[place].detach() for pair in own], 2).requires_grad_() for place in range(2)]
    for number, gradient in enumerate(back):
        seen = [tensor[:, :, : 3 * (number + 1)] for tensor in whole]
        (seen[0].tanh() * seen[1]).backward(gradient)
    for place in range(2):
        assert torch.allclose(torch.cat([pair[place].grad for pair in own], 2), whole[place].grad, rtol=1e-13)


def on_ranks(world, work, inputs, back):
    """``work(rank, *inputs)`` on each rank, back with its gradient; outputs, and gradients of inputs, by rank."""

    def on_rank(place):
        leaves = [x.clone().requires_grad_() for x in inputs[place]]
        output = work(world.ranks[place], *leaves)
        output.backward(back[place])
        return output.detach(), [leaf.grad for leaf in leaves]

    return world.run(on_rank)


def shared_keys(rank, key, value):
    keys, values = GatheredKeys(OPS, 3, rank).join(key, value, micro_batch=0, layer="x", split=rank.coords["cp"])
    return keys.tanh() * values


def logits_of_ranks(rank, logits):
    region = TensorParallelRegion(OPS, rank.coords["tp"], 3, None, rank)
    labels = [torch.tensor([[0, 11], [5, -100]]), torch.tensor([[-100, 2], [7, 8]])]
    return torch.stack(summed_cross_entropies(logits, labels, region, 1)) / 3


def visiting(rank, rows):
    region, place = ExpertRegion(OPS, rank.coords["ep"], 3, rank), rank.coords["ep"]
    send, receive = [1, place, 2], [[1, 1, 1], [0, 1, 2], [2, 2, 2]][place]
    return region.exchange(rows, send, receive, "x").tanh()


ACROSS = {
    "keys that context-parallel ranks share": (shared_keys, "cp", lambda rank: [(2, 2, 3, 4)] * 2),
    "losses of a vocabulary on several ranks": (logits_of_ranks, "tp", lambda rank: [(2, 4, 4)]),
    "rows that visit other ranks": (visiting, "ep", lambda rank: [(3 + rank, 4)]),
}


@pytest.mark.parametrize("name", ACROSS)
def test_across_ranks(name):
    """Slopes of the sum over ranks, along a direction on all of them."""
    work, axis, shapes_of = ACROSS[name]
    draw = draws_of(0)
    inputs = [[draw(*shape) for shape in shapes_of(rank)] for rank in range(3)]
    directions = [[draw(*x.shape) for x in of_rank] for of_rank in inputs]

    def moved(step):
        return [[x + step * d for x, d in zip(xs, ds, strict=True)] for xs, ds in zip(inputs, directions, strict=True)]

    def outputs(step, back):
        return [output for output, _ in on_ranks(World(torch, **{axis: 3}), work, moved(step), back)]

    shapes = {
        "cp": [(2, 2, 3 * (rank + 1), 4) for rank in range(3)], "tp": [(2,)] * 3, "ep": [(3, 4), (3, 4), (6, 4)],
    }[axis]  # fmt: skip
    # All ranks of a vocabulary have the same losses, whose gradients are given to each.
    back = [draw(2)] * 3 if axis == "tp" else [draw(*shape) for shape in shapes]
    above, below = (outputs(step, back) for step in (STEP, -STEP))
    slope = sum(((a - b) * g).sum().item() for a, b, g in zip(above, below, back, strict=True)) / (2 * STEP)
    gradients = [gradient for _, gradient in on_ranks(World(torch, **{axis: 3}), work, inputs, back)]
    ours = sum(
        (g * d).sum().item() for gs, ds in zip(gradients, directions, strict=True) for g, d in zip(gs, ds, strict=True)
    )
    # Each rank's loss is the whole one, so that their sum counts it three times where a gradient counts it once.
    assert ours * (3 if axis == "tp" else 1) == pytest.approx(slope, rel=1e-7)
