"""Bytes that Paddle's autograd saves in the stages' arithmetic, compared with the description."""

import pytest

from pipeproof.stages.describe.stage_memory import Lifetime
from tests.describe.test_memory import held, plan

pytestmark = pytest.mark.needs_paddle

ROWS, SEQ, HIDDEN, HEADS, FFN, VOCAB = 1, 16, 32, 4, 48, 100


def described(*names, layer="layer.0"):
    """Bytes of these operations in float32."""
    spec = plan(hidden=HIDDEN, heads=HEADS, ffn=FFN, seq=SEQ, dtype="float32", model={"vocab_size": VOCAB})
    return sum(
        one.num_bytes for one in held(spec, (layer,)) if one.name in names and one.lifetime is not Lifetime.BETWEEN
    )


def saved_by(compute, *weights):
    """Bytes of the distinct tensors that autograd saves while ``compute`` runs, weights left out."""
    import paddle

    own = {weight.data_ptr() for weight in weights}
    found = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            found[tensor.data_ptr(), tuple(tensor.shape)] = int(tensor.size) * tensor.element_size()
        return tensor

    with paddle.autograd.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    assert not result.stop_gradient
    return sum(found.values())


def leaf(*shape):
    import paddle

    tensor = paddle.randn(list(shape))
    tensor.stop_gradient = False
    return tensor


def test_attention_keeps_queries_keys_values_and_probabilities():
    from pipeproof.stages.paddle.functional import causal_attention

    k, v = (leaf(ROWS, HEADS, SEQ, HIDDEN // HEADS) for _ in range(2))
    q = leaf(ROWS, HEADS, 1, SEQ, HIDDEN // HEADS)
    assert saved_by(lambda: causal_attention(q, k, v)) == described("attn.qkv_out", "attn.core")


def test_a_product_keeps_its_input():
    import paddle

    x, weight = leaf(SEQ * ROWS, HIDDEN), leaf(HIDDEN, 3 * HIDDEN)
    assert saved_by(lambda: paddle.matmul(x, weight), weight) == described("attn.qkv")


def test_swiglu_of_small_operations_keeps_silu_of_the_gate_too():
    from pipeproof.stages.paddle.functional import swiglu

    gate, up = leaf(SEQ, ROWS, FFN), leaf(SEQ, ROWS, FFN)
    assert saved_by(lambda: swiglu(gate, up)) == described("mlp.swiglu") + 4 * SEQ * ROWS * FFN


def test_the_embedding_keeps_the_tokens():
    import paddle

    table, tokens = leaf(VOCAB, HIDDEN), paddle.randint(0, VOCAB, [SEQ, ROWS])
    assert saved_by(lambda: paddle.nn.functional.embedding(tokens, table), table) == described("embed", layer="embed")
