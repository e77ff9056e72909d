"""Keys and values shared by context-parallel ranks: backward is the adjoint of forward."""

import numpy as np
import paddle
import pytest

from pipeproof.stages.common.sequence_splits import GatheredKeys
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.stage import PaddleStage
from tests.stages.references import make_plan

pytestmark = pytest.mark.needs_paddle


class Parts:
    """The collectives of one of three ranks, whose other ranks' tensors are given."""

    def __init__(self, others, place):
        self.others, self.place, self.given = others, place, []

    def all_gather(self, tensor, dim, *, label, axis):
        self.given.append((label, axis, list(tensor.shape)))
        parts = [*self.others[: self.place], tensor, *self.others[self.place :]]
        return paddle.concat(parts, axis=dim)

    def reduce_scatter(self, tensor, dim, *, label, axis):
        self.given.append((label, axis, list(tensor.shape)))
        self.whole = tensor.clone()
        return paddle.split(tensor, 3, axis=dim)[self.place]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_comes_back_is_the_adjoint_of_what_is_shared(place):
    """<A x, y> = <x, A^T y> over all ranks' keys and values, in float64 with generic values."""
    draws = np.random.default_rng(place)
    shape = [2, 3, 4, 5]  # B, K, n, D
    mine = [paddle.to_tensor(draws.standard_normal(shape), stop_gradient=False) for _ in range(2)]
    others = [paddle.to_tensor(draws.standard_normal([2, *shape])) for _ in range(2)]
    parts = Parts(others, place)
    seen = GatheredKeys(OPS, 3, parts).join(*mine, micro_batch=0, layer="layer.0.attn", split=place)
    assert [list(one.shape) for one in seen] == [[2, 3, 4 * (place + 1), 5]] * 2
    back = [paddle.to_tensor(draws.standard_normal(one.shape)) for one in seen]
    paddle.autograd.backward(seen, back)
    forward = sum(float((one * other).sum()) for one, other in zip(seen, back, strict=True))
    all_given = paddle.concat([*others[:place], paddle.stack(mine), *others[place:]], axis=3)
    assert forward == pytest.approx(float((all_given * parts.whole).sum()), rel=1e-12)
    for own, place_of in zip(mine, (0, 1), strict=True):
        assert own.grad.equal_all(paddle.split(parts.whole, 3, axis=3)[place][place_of])
    assert parts.given == [
        ("layer.0.attn.kv", "cp", [2, *shape]),
        ("layer.0.attn.kv.grad", "cp", [2, 2, 3, 12, 5]),
    ]


def test_a_stage_of_one_part_of_each_sequence_needs_collectives():
    plan = make_plan(topology={"cp": 2})
    with pytest.raises(ValueError, match="2 context-parallel ranks need collectives, got None"):
        PaddleStage(plan, describe_gpt(plan))
