"""The end of a step: optimizers, optimizer shards, and the clip."""

import numpy as np
import pytest
import torch

from pipeproof.stages.describe.stage_memory import Kept
from pipeproof.stages.torch.optimizer import GradientClip, ShardedOptimizer, StageOptimizer
from pipeproof.stages.torch.weights import Weight
from tests.stages.torch.features import make_plan

pytestmark = pytest.mark.needs_torch

WHOLE = Kept(gradients=True, weights=True)


def weights_of(*shapes, dtype=torch.float64, value=None, seed=3):
    draws = np.random.default_rng(seed)
    return {str(i): Weight(torch.tensor(draws.standard_normal(shape), dtype=dtype), value)
            for i, shape in enumerate(shapes)}  # fmt: skip


def give_gradients(weights, step):
    draws = np.random.default_rng(100 + step)
    for weight in weights.values():
        weight.gradient.copy_(torch.tensor(draws.standard_normal(weight.main.shape)))


def test_adamw_is_what_its_paper_says():
    run = make_plan("plain", run={"optimizer": "adamw", "learning_rate": 0.1}).run
    weights = weights_of((3, 4), (5,))
    expected = {name: weight.main.numpy().copy() for name, weight in weights.items()}
    moments = {name: [np.zeros_like(array), np.zeros_like(array)] for name, array in expected.items()}
    optimizer = StageOptimizer(run, weights)
    for step in range(1, 4):
        give_gradients(weights, step)
        optimizer.step()
        for name, weight in weights.items():
            gradient, (first, second) = weight.gradient.numpy(), moments[name]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            ratio = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
            expected[name] -= 0.1 * (0.01 * expected[name] + ratio)
            np.testing.assert_allclose(weight.main.numpy(), expected[name], rtol=1e-12)


def test_sgd_goes_down_the_gradient():
    run = make_plan("plain", run={"optimizer": "sgd", "learning_rate": 0.5}).run
    weights = weights_of((3,))
    before = weights["0"].main.clone()
    give_gradients(weights, 0)
    StageOptimizer(run, weights).step()
    assert torch.equal(weights["0"].main, before - 0.5 * weights["0"].gradient)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_buffers_begin_anew_in_the_same_memory(optimizer):
    run = make_plan("plain", run={"optimizer": optimizer}).run
    weights = weights_of((2, 2), dtype=torch.float32)
    made, memory = StageOptimizer(run, weights), weights["0"].gradient.data_ptr()
    give_gradients(weights, 0)
    made.step()
    made.zero_grad()
    assert weights["0"].gradient.data_ptr() == memory
    assert weights["0"].gradient.numpy().tobytes() == bytes(16)
    before = weights["0"].main.clone()
    weights["0"].gradient.fill_(1.0)
    made.step()
    assert not torch.equal(weights["0"].main, before)


def test_a_stage_without_weights_has_an_optimizer():
    optimizer = StageOptimizer(make_plan("plain").run, {})
    optimizer.zero_grad()
    optimizer.step()


@pytest.mark.parametrize("value", [None, torch.bfloat16])
@pytest.mark.parametrize("num_shards", [2, 3, 7])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_shares_together_are_the_whole_update(optimizer, num_shards, value):
    """Bit for bit, with shapes that do not divide, and one weight with fewer elements than shares."""
    run = make_plan("plain", run={"optimizer": optimizer, "learning_rate": 0.1}).run
    shapes = (3, 5), (2,), (17, 9)
    whole = weights_of(*shapes, dtype=torch.float32, value=value)
    ranks = [weights_of(*shapes, dtype=torch.float32, value=value) for _ in range(num_shards)]
    update = StageOptimizer(run, whole)
    shares = [ShardedOptimizer(run, weights, num_shards, place, WHOLE) for place, weights in enumerate(ranks)]
    for step in range(3):
        for one in (update, *shares):
            one.zero_grad()
        give_gradients(whole, step)
        for weights in ranks:
            give_gradients(weights, step)
        update.step()
        for name in whole:
            for place, one in enumerate(shares):
                one.put_sum(name, one.to_scatter(name).chunk(num_shards)[place])
        for one in shares:
            one.step()
        for name, weight in whole.items():
            gathered = torch.cat([one.to_gather(name) for one in shares])
            for one, weights in zip(shares, ranks, strict=True):
                one.put_whole(name, gathered)
                assert torch.equal(weights[name].main, weight.main)
                assert torch.equal(weights[name].value, weight.value)


def clip_of(weights, limit, num_weights, first=0, dtype=torch.float64):
    counted = dict(enumerate(weights.values(), first))
    return GradientClip(counted, num_weights, limit, dtype, torch.device("cpu"))


def test_gradients_are_clipped_to_the_norm_over_ranks():
    one, other = weights_of((3, 4)), weights_of((5,), (2,), seed=4)
    give_gradients(one, 0)
    give_gradients(other, 1)
    before = [weight.gradient.clone() for weight in (*one.values(), *other.values())]
    clips = clip_of(one, 0.25, 3), clip_of(other, 0.25, 3, first=1)
    for clip in clips:
        clip.begin()
    summed = clips[0].squares + clips[1].squares
    for clip, weights in zip(clips, (one, other), strict=True):
        clip.squares = summed
        clip.clip(weights)
    norm = sum(gradient.square().sum() for gradient in before).sqrt()
    for weight, gradient in zip((*one.values(), *other.values()), before, strict=True):
        assert torch.allclose(weight.gradient, gradient * (0.25 / norm), rtol=1e-14)


def test_short_gradients_stay_as_they_are():
    weights = weights_of((3, 4))
    give_gradients(weights, 0)
    before = weights["0"].gradient.clone()
    clip = clip_of(weights, 100.0, 1)
    clip.begin()
    clip.clip(weights)
    assert torch.equal(weights["0"].gradient, before)


def test_a_clip_begins_anew_each_step():
    weights = weights_of((4,))
    clip = clip_of(weights, 1.0, 1)
    for step in range(2):
        clip.begin()
        give_gradients(weights, step)
        expected = weights["0"].gradient.square().sum()
        assert clip.squares.tolist() == [expected.item()]
        clip.clip(weights)
        assert weights["0"].gradient.norm().item() == pytest.approx(1.0)
