"""The clamped SwiGLU: its formula, and its corners, on both sides of a comparison."""

import numpy as np
import paddle
import pytest

from pipeproof.stages.common.backend_ops import gated
from pipeproof.stages.paddle.functional import swiglu
from pipeproof.stages.reference import layer_math as reference
from tests.stages.references import make_plan

pytestmark = pytest.mark.needs_paddle

LIMIT = 0.75
MODEL = {
    formula: make_plan(model={"swiglu_limit": LIMIT, "swiglu_formula": formula}).gpt for formula in ("gpt_oss", "silu")
}
"""A limit that is exact in float32: values can be equal to it."""


def with_gradients(function, *arrays):
    leaves = [paddle.to_tensor(array, stop_gradient=False) for array in arrays]
    made = function(*leaves)
    made.sum().backward()
    return [made.numpy(), *(leaf.grad.numpy() for leaf in leaves)]


def test_it_is_the_formula():
    gate, up = np.random.default_rng(6).standard_normal((2, 5, 8))
    g, u = np.minimum(gate, LIMIT), np.clip(up, -LIMIT, LIMIT)
    expected = {"gpt_oss": g / (1 + np.exp(-1.702 * g)) * (u + 1), "silu": g / (1 + np.exp(-g)) * u}
    for formula, model in MODEL.items():
        made = gated(swiglu, model, paddle.clip)(*map(paddle.to_tensor, (gate, up))).numpy()
        np.testing.assert_allclose(made, expected[formula], rtol=1e-14)


@pytest.mark.parametrize("formula", MODEL)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_stages_and_references_make_the_same_choice_at_the_corners(dtype, formula):
    """Zero behind the corner and not at it; and the same bits everywhere."""
    below, above = np.nextafter(np.array([LIMIT, LIMIT], dtype), np.array([0, 1], dtype))
    ends = np.array([-2.0, -LIMIT, -0.3, 0.0, 0.4, below, LIMIT, above, 2.0], dtype)
    gate, up = (grid.astype(dtype) for grid in np.meshgrid(ends, ends))
    ours = with_gradients(gated(swiglu, MODEL[formula], paddle.clip), gate, up)
    theirs = with_gradients(lambda g, u: reference.gated(g, u, MODEL[formula]), gate, up)
    for one, other in zip(ours, theirs, strict=True):
        assert one.tobytes() == other.tobytes()
    _, of_gate, of_up = ours
    assert not of_gate[gate > LIMIT].any()
    assert of_gate[(gate <= LIMIT) & (up != 0)].all()
    assert not of_up[np.abs(up) > LIMIT].any()
    assert of_up[(np.abs(up) <= LIMIT) & (gate != 0)].all()


def test_without_a_limit_it_is_swiglu():
    gate, up = np.random.default_rng(6).standard_normal((2, 5, 8))
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(
        gated(swiglu, make_plan().gpt, paddle.clip)(*map(paddle.to_tensor, (gate, up))).numpy(), expected, rtol=1e-14
    )
