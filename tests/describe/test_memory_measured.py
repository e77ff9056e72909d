"""Bytes that PyTorch's autograd saves for the same operations, with the exceptions named here."""

import weakref

import pytest

from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.model_family import stored_activations
from tests.describe.test_memory import plan

pytestmark = pytest.mark.needs_torch

ROWS, SEQ, HIDDEN, HEADS, FFN, VOCAB = 2, 16, 32, 4, 48, 100
TOKENS = ROWS * SEQ


def saved_by(compute, *shared, whole=False):
    """Bytes of the distinct tensors that autograd saves in ``compute``, ``shared`` ones and scalars left out.

    ``whole``: of the memory that they are parts of.
    """
    from torch.autograd.graph import saved_tensors_hooks

    def memory(tensor):
        return tensor.untyped_storage() if whole else tensor

    own = {memory(tensor).data_ptr() for tensor in shared}
    found = {}

    def pack(tensor):
        if memory(tensor).data_ptr() not in own and tensor.dim():
            size = tensor.untyped_storage().nbytes() if whole else tensor.nbytes
            found[memory(tensor).data_ptr(), None if whole else tensor.numel()] = size
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compute()
    assert result.requires_grad
    return sum(found.values())


class Block:
    """The block of the description in PyTorch's own operations."""

    def __init__(self, dtype, *, fused):
        import torch

        self.fused = fused
        draws = torch.Generator().manual_seed(0)

        def weight(*shape):
            return torch.randn(*shape, dtype=dtype, generator=draws).mul_(0.1).requires_grad_()

        self.x = torch.randn(ROWS, SEQ, HIDDEN, dtype=dtype, generator=draws).requires_grad_()
        self.norms = [torch.ones(HIDDEN, dtype=dtype).requires_grad_() for _ in range(2)]
        self.qkv, self.out = weight(3 * HIDDEN, HIDDEN), weight(HIDDEN, HIDDEN)
        self.gate_up, self.down = weight(2 * FFN, HIDDEN), weight(HIDDEN, FFN)
        turns = torch.outer(torch.arange(SEQ), torch.ones(HIDDEN // HEADS // 2))[:, None]
        self.cos, self.sin = turns.cos().to(dtype), turns.sin().to(dtype)

    @property
    def shared(self):
        """Tensors that no micro-batch changes: weights, and the tables of the rotary embedding."""
        return (*self.norms, self.qkv, self.out, self.gate_up, self.down, self.cos, self.sin)

    def rotated(self, heads):
        import torch

        a, b = heads.chunk(2, dim=-1)
        return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], dim=-1)

    def norm(self, x, weight):
        import torch

        if self.fused:
            return fused_norm().apply(x, weight)
        return torch.nn.functional.rms_norm(x, (HIDDEN,), weight, eps=1e-5)

    def attention(self, x, *, flash):
        import torch

        shape = (ROWS, SEQ, HEADS, HIDDEN // HEADS)
        q, k, v = (part.reshape(shape) for part in (x @ self.qkv.T).split(HIDDEN, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (self.rotated(q), self.rotated(k), v))
        if flash:
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-1, -2)) / (HIDDEN // HEADS) ** 0.5
            scores = scores + torch.full((SEQ, SEQ), float("-inf"), dtype=q.dtype).triu(1)
            mixed = torch.softmax(scores, dim=-1) @ v
        return mixed.transpose(1, 2).reshape(ROWS, SEQ, HIDDEN) @ self.out.T

    def mlp(self, x):
        import torch

        gate, up = (x @ self.gate_up.T).split(FFN, dim=-1)
        inner = fused_swiglu().apply(gate, up) if self.fused else torch.nn.functional.silu(gate) * up
        return inner @ self.down.T

    def forward(self, *, flash):
        middle = self.x + self.attention(self.norm(self.x, self.norms[0]), flash=flash)
        return middle + self.mlp(self.norm(middle, self.norms[1]))


def fused_norm():
    """RMSNorm as kernels have it: they keep its input, and the factor of each token in float32."""
    import torch

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            factor = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
            ctx.save_for_backward(x, factor, weight)
            return (x * factor * weight).to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            x, factor, weight = ctx.saved_tensors
            plain = x * factor
            scaled = grad * weight
            inner = factor * (scaled - plain * (scaled * plain).mean(-1, keepdim=True))
            return inner.to(x.dtype), (grad * plain).sum((0, 1)).to(x.dtype)

    return Norm


def fused_swiglu():
    """SwiGLU as kernels have it: they keep gate and up."""
    import torch

    class SwiGlu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return torch.nn.functional.silu(gate) * up

        @staticmethod
        def backward(ctx, grad):
            gate, up = ctx.saved_tensors
            sigmoid = torch.sigmoid(gate)
            return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid

    return SwiGlu


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_with_fused_norms_and_activation(dtype, flash):
    import torch

    block = Block(getattr(torch, dtype), fused=True)
    saved = saved_by(lambda: block.forward(flash=flash), *block.shared)
    assert saved == described("layer.0", dtype, flash=flash)


def test_the_fused_operations_of_this_test_have_the_gradients_of_pytorchs_own():
    """Otherwise their saved tensors would prove nothing."""
    import torch

    block = Block(torch.float64, fused=True)
    gradients = []
    for block.fused in (True, False):
        given = (block.x, *block.shared[:-2])
        gradients.append(torch.autograd.grad(block.forward(flash=False).pow(2).sum(), given))
    for ours, theirs in zip(*gradients, strict=True):
        rounding = 1e-6 * theirs.abs().max().item()  # the factor is float32, and its products are added up
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=rounding)


@pytest.mark.parametrize("flash", [True, False])
def test_a_block_of_small_operations_keeps_more(flash):
    import torch

    block = Block(torch.float32, fused=False)
    more = {
        "before its weight is multiplied in, each norm's result": 2 * HIDDEN,
        "silu(gate), which a fused SwiGLU computes again": FFN,
    }
    saved = saved_by(lambda: block.forward(flash=flash), *block.shared)
    assert saved - described("layer.0", "float32", flash=flash) == 4 * TOKENS * sum(more.values())


def test_the_embedding_and_the_loss():
    import torch
    from torch.nn.functional import cross_entropy, embedding

    tokens = torch.randint(0, VOCAB, (ROWS, SEQ))
    table = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    assert saved_by(lambda: embedding(tokens, table), table) == described("embed", "float32")
    x, head = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN, requires_grad=True)
    saved = saved_by(lambda: cross_entropy(x @ head.T, tokens.flatten()), head)
    assert saved == described("head", "float32")


V4 = {
    "hyper_connections": {
        "streams": 4, "sinkhorn_iterations": 20, "sinkhorn": "softmax", "epsilon": 1e-6, "transposed": True,
        "contraction": "learned",
    },
    "moe": {
        "num_experts": 4, "top_k": 2, "ffn_size": 32, "num_shared_experts": 1, "score": "sqrtsoftplus",
        "routed_scale": 1.5, "expert_bias_rate": 0.001,
    },
    "swiglu_limit": 10.0, "swiglu_formula": "silu",
}  # fmt: skip
ATTENTION = {
    "q_lora_rank": 24, "qk_rope_head_dim": 8, "sliding_window": 32, "o_groups": 2, "o_lora_rank": 16,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
}  # fmt: skip


def most_alive():
    """A mode that counts the bytes of the tensors that operations make: ``alive``, and the ``most`` of them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    class Alive(TorchDispatchMode):
        alive = most = 0
        known = frozenset()

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            result = operation(*args, **(kwargs or {}))
            tree_map_only(torch.Tensor, self.see, result)
            return result

        def see(self, tensor):
            memory = tensor.untyped_storage()
            key, size = memory._cdata, memory.nbytes()
            if key not in self.known:
                self.known |= {key}
                self.alive += size
                self.most = max(self.most, self.alive)
                weakref.finalize(memory, self.free, key, size)

        def free(self, key, size):
            self.known -= {key}
            self.alive -= size

    return Alive()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_of_unfused_compressed_attention_needs_two_tensors_of_its_scores(dtype):
    import torch

    from pipeproof.stages.common.compressed_attention import CompressedAttention
    from pipeproof.stages.torch.backend_ops import OPS

    core = object.__new__(CompressedAttention)
    weights = type("Weights", (), {"deferred": staticmethod(lambda weight: weight)})()
    vars(core).update(_ops=OPS, _weights=weights)
    heads, length, size, entries = 4, 256, 8, 64
    query, keys = (
        torch.randn(*shape, dtype=getattr(torch, dtype)).requires_grad_()
        for shape in ((1, heads, length, size), (1, length + entries, size))
    )
    sinks, unseen = (
        torch.zeros(heads, dtype=query.dtype),
        torch.zeros(1, 1, length, length + entries, dtype=query.dtype),
    )
    with most_alive() as memory:
        mixed = core._mixed(query, keys, sinks=sinks, unseen=unseen)
        before, gradient = memory.alive, torch.ones_like(mixed)
        mixed.backward(gradient)
    probabilities = heads * length * (length + entries) * query.itemsize
    assert 1.9 * probabilities < memory.most - before < 2.3 * probabilities


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("more", [{}, V4, {"documents": [160, 96]}], ids=["attention", "whole block", "documents"])
@pytest.mark.parametrize("kind", ["sliding", "compressed_sparse", "heavily_compressed"])
def test_a_block_of_deepseek_v4_with_fused_norms_and_activation(kind, more, dtype, monkeypatch):
    """Within 3 %: parts of the gates of streams and of the weights of experts are not described."""
    import torch

    from pipeproof.stages.common.dropout import Dropouts
    from pipeproof.stages.describe.synthetic import DropoutKeys
    from pipeproof.stages.torch.backend_ops import OPS
    from pipeproof.stages.torch.stage import TorchStage
    from tests.stages.torch.features import make_plan
    from tests.stages.torch.staged_run import CPU

    attention = {**ATTENTION, "layer_types": [f"{kind}_attention"], "documents": more.get("documents")}
    model = {
        "num_layers": 3, "hidden_size": 64, "num_heads": 4, "head_size": 32, "seq_length": 256, "ffn_size": 32,
        "compressed_attention": attention, **(more if more is V4 else {}),
    }  # fmt: skip
    spec = make_plan("plain", model=model, memory={"attention": "unfused"}, run={"backend": "torch", "dtype": dtype})
    stage = TorchStage(spec, describe_gpt(spec), CPU)
    stage._mlp_activation = fused_swiglu().apply
    monkeypatch.setattr(
        torch.nn.functional, "rms_norm",
        lambda x, size, weight, _: fused_norm().apply(x, torch.ones(size, dtype=x.dtype) if weight is None else weight),
    )  # fmt: skip
    x = torch.randn(2, 256, 64 * spec.gpt.num_streams, dtype=getattr(torch, dtype)).requires_grad_()
    ids, dropouts = torch.zeros(2, 256, dtype=torch.int64), Dropouts(OPS, DropoutKeys(spec, 0, 0), 0, stage._region)
    if spec.gpt.activation_order == "sbh":
        x = x.detach().transpose(0, 1).contiguous().requires_grad_()
    weights = [tensor for one in stage.parameters.values() for tensor in (one.main, one.value)]
    constants = [table for own in stage._compressed_attention._tables.values() for table in own if table is not None]
    saved = saved_by(
        lambda: stage._block(x, "layer.1", 0, 0, ids, dropouts),
        *weights, *constants, whole=True,
    )  # fmt: skip
    held = stored_activations(spec, describe_gpt(spec)[2:3], MicroBatchSize(256, 2))
    described = sum(one.num_bytes for one in held if one.lifetime.is_from_forward)
    assert 0.97 < described / saved < 1.005


def described(layer, dtype, *, flash=True):
    """Bytes by the description."""
    spec = plan(
        hidden=HIDDEN, heads=HEADS, ffn=FFN, dtype=dtype, attention="flash" if flash else "unfused", seq=SEQ,
        model={"vocab_size": VOCAB},
    )  # fmt: skip
    layers = [one for one in describe_gpt(spec) if one.name == layer]
    held = stored_activations(spec, layers, MicroBatchSize(SEQ, ROWS))
    return sum(one.num_bytes for one in held if one.lifetime.is_from_forward)
