"""Other people's models in numpy, as their own code defines them: forward passes that read weights by their names.

Llama, Qwen, Mixtral, DeepSeek, GLM, StarCoder2 and GPT-2 as Hugging Face's
transformers has them; the layers of Megatron-Core and of PaddleFormers. ``OwnModel`` computes the meaning of a plan's
keys, with pipeproof's names. Nothing of pipeproof is used.

Shape letters: B rows, S sequence, H hidden, A heads, K heads of keys and values, D head size.
"""

from math import erf

import numpy as np


def linear(x, weight):
    """torch.nn.Linear: the weight is [out, in]."""
    return x @ weight.T


def paddle_linear(x, weight):
    """paddle.nn.Linear: the weight is [in, out]."""
    return x @ weight


def rms(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def layer_norm(x, weight, bias):
    x = x - np.mean(x, axis=-1, keepdims=True)
    return rms(x, weight) + bias


def gelu(x):
    return x / 2 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


GELUS = {"gelu": gelu, "gelu_tanh": gelu_tanh}


def silu(x):
    return x / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - x.max(axis=-1, keepdims=True))
    return x / x.sum(axis=-1, keepdims=True)


def tables(length, size):
    """Cosines and sines [S, D], each half of D the same frequencies."""
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, size, 2) / size))
    angles = np.concatenate([angles, angles], axis=-1)
    return np.cos(angles), np.sin(angles)


def rope(x):
    """Half-split rotary positions of [B, A, S, D]."""
    cos, sin = tables(x.shape[2], x.shape[3])
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def rope_interleaved(x):
    """Rotary of latent attention: even elements first, then odd ones, and then as above."""
    return rope(np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1))


def heads(x, size):
    """[B, S, A * D] as [B, A, S, D]."""
    return x.reshape(*x.shape[:2], -1, size).transpose(0, 2, 1, 3)


def attention(q, k, v):
    """Causal; query head a sees the head a * K // A of keys and values. [B, S, A * D]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeats, axis=1), np.repeat(v, repeats, axis=1)
    scores = q @ k.transpose(0, 1, 3, 2) * q.shape[-1] ** -0.5
    scores = np.where(np.tri(q.shape[2], dtype=bool), scores, -np.inf)
    mixed = softmax(scores) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)


def chosen(logits, moe, bias):
    """Weights of experts [.., E], zero for experts that are not chosen."""
    scores = softmax(logits) if moe["score"] == "softmax" else 1 / (1 + np.exp(-logits))
    order = np.argsort(-(scores if bias is None else scores + bias), axis=-1, kind="stable")[..., : moe["top_k"]]
    gains = np.take_along_axis(scores, order, axis=-1)
    if moe["normalize"]:
        gains = gains / gains.sum(axis=-1, keepdims=True)
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, order, gains, axis=-1)
    return weights


BIASED = {"none": (), "qkv": ("qkv",), "all": ("qkv", "out", "mlp")}


class OpenModel:
    """Common parts of the conventions: the order of layers, and modules that read the state before the norm, as
    pipeproof's do."""

    POSITIONS = None
    rope = staticmethod(rope)

    def __init__(self, weights, model):
        self.weights, self.model = weights, model
        self.read = set()

    def get(self, name):
        self.read.add(name)
        return self.weights[name]

    def logits(self, lanes):
        """The main model's and each module's [B, S, V]; ``lanes`` are the tokens [B, S] that each reads."""
        model = self.model
        embed = self.get(self.EMBED)
        x = embed[lanes[0]]
        if model["positions"] == "learned":
            x = x + self.get(self.POSITIONS)
        for number in range(model["num_layers"]):
            x = self.block(x, self.BLOCK.format(number), number)
        found = [self.head(self.norm(x, self.NORM))]
        for number, tokens in enumerate(lanes[1:]):
            name = self.module_name(number)
            both = [self.norm(self.module_embed(name)[tokens], f"{name}.enorm.weight")]
            both.append(self.norm(x, f"{name}.hnorm.weight"))
            x = self.linear(np.concatenate(self.in_order(both), axis=-1), self.get(f"{name}.eh_proj.weight"))
            x = self.block(x, name + self.MODULE_BLOCK, model["num_layers"] - 1)
            found.append(self.module_head(name, self.norm(x, self.module_norm(name))))
        return found

    def norm(self, x, name):
        weight = self.get(name)
        if self.model["norm"] == "rms":
            return rms(x, weight)
        return layer_norm(x, weight, self.get(name.removesuffix("weight") + "bias"))

    def product(self, x, name, part):
        """A product with its bias, if products of this part have one."""
        y = self.linear(x, self.get(name))
        return y + self.get(name.removesuffix("weight") + "bias") if part in BIASED[self.model["biases"]] else y

    def gelu(self, x, first, second):
        return self.product(GELUS[self.model["mlp"]](self.product(x, first, "mlp")), second, "mlp")

    def mixed_heads(self, q, k, v, names):
        """Attention of [B, A, S, D], normed and rotated before, if the model says so; ``names`` are the norms'
        names."""
        if self.model["qk_norm"]:
            q, k = (self.norm(x, name) for x, name in zip((q, k), names, strict=True))
        if self.model["positions"] == "rotary":
            q, k = self.rope(q), self.rope(k)
        return attention(q, k, v)

    def in_order(self, embedded_and_hidden):
        return embedded_and_hidden

    def module_norm(self, name):
        return f"{name}.{self.MODULE_NORM}"

    def module_embed(self, name):
        return self.get(self.EMBED)

    def module_head(self, name, x):
        return self.head(x)

    def head(self, x):
        return x @ self.get(self.EMBED if self.model["tied_embedding"] else self.HEAD).T

    def block(self, x, name, number):
        model = self.model
        size = model["head_size"] or model["hidden_size"] // model["num_heads"]
        attend = self.latent if model["mla"] else self.attend
        x = x + attend(self.norm(x, self.attn_norm(name)), name, size)
        moe = model["moe"]
        has_experts = moe is not None and number >= moe["dense_layers"]
        normed = self.norm(x, self.mlp_norm(name, has_experts))
        return x + (self.experts(normed, name, moe) if has_experts else self.mlp(normed, f"{name}.mlp"))

    def mixed(self, x, gains, expert):
        return sum(gains[..., e, None] * expert(x, e) for e in range(gains.shape[-1]))


class HuggingFace(OpenModel):
    EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    BLOCK, MODULE_BLOCK, MODULE_NORM = "model.layers.{}", "", "shared_head.norm.weight"
    ROUTER_BIAS = "gate.e_score_correction_bias"
    linear = staticmethod(linear)

    def module_name(self, number):
        return self.BLOCK.format(self.model["num_layers"] + number)

    def module_embed(self, name):
        return self.get(f"{name}.embed_tokens.weight")

    def module_head(self, name, x):
        return linear(x, self.get(f"{name}.shared_head.head.weight"))

    def attn_norm(self, name):
        return f"{name}.input_layernorm.weight"

    def mlp_norm(self, name, has_experts):
        return f"{name}.post_attention_layernorm.weight"

    def attend(self, x, name, size):
        at = f"{name}.self_attn"
        q, k, v = (heads(self.product(x, f"{at}.{part}_proj.weight", "qkv"), size) for part in "qkv")
        mixed = self.mixed_heads(q, k, v, [f"{at}.{part}_norm.weight" for part in "qk"])
        return self.product(mixed, f"{at}.o_proj.weight", "out")

    def latent(self, x, name, size):
        mla, at = self.model["mla"], f"{name}.self_attn"
        nope, rotary, value = (mla[f"{part}_head_size"] for part in ("nope", "rope", "value"))
        if mla["q_rank"] is None:
            q = self.linear(x, self.get(f"{at}.q_proj.weight"))
        else:
            q = rms(self.linear(x, self.get(f"{at}.q_a_proj.weight")), self.get(f"{at}.q_a_layernorm.weight"))
            q = self.linear(q, self.get(f"{at}.q_b_proj.weight"))
        compressed = self.linear(x, self.get(f"{at}.kv_a_proj_with_mqa.weight"))
        latent, shared = compressed[..., : mla["kv_rank"]], compressed[..., mla["kv_rank"] :]
        kv = self.linear(rms(latent, self.get(f"{at}.kv_a_layernorm.weight")), self.get(f"{at}.kv_b_proj.weight"))
        mixed = latent_heads(heads(q, nope + rotary), heads(kv, nope + value), heads(shared, rotary), nope)
        return self.linear(mixed, self.get(f"{at}.o_proj.weight"))

    def swiglu(self, x, gate, up, down):
        inner = silu(self.product(x, gate, "mlp")) * self.product(x, up, "mlp")
        return self.product(inner, down, "mlp")

    def mlp(self, x, at):
        if self.model["mlp"] != "swiglu":
            return self.gelu(x, f"{at}.c_fc.weight", f"{at}.c_proj.weight")
        return self.swiglu(x, *(f"{at}.{part}_proj.weight" for part in ("gate", "up", "down")))

    def router(self, x, name):
        return linear(x, self.get(name))

    def experts(self, x, name, moe):
        if self.is_mixtral():
            at = f"{name}.block_sparse_moe"
            gains = chosen(self.router(x, f"{at}.gate.weight"), moe, None)
            return self.mixed(
                x, gains, lambda x, e: self.swiglu(x, *(f"{at}.experts.{e}.w{part}.weight" for part in (1, 3, 2)))
            )
        at = f"{name}.mlp"
        bias = self.get(f"{at}.{self.ROUTER_BIAS}") if moe["expert_bias_rate"] else None
        gains = chosen(self.router(x, f"{at}.gate.weight"), moe, bias)
        y = self.mixed(x, gains, lambda x, e: self.mlp(x, f"{at}.experts.{e}"))
        return y + self.mlp(x, f"{at}.shared_experts") if moe["num_shared_experts"] else y

    def is_mixtral(self):
        moe, plain = self.model["moe"], not (self.model["mla"] or self.model["mtp"] or self.model["qk_norm"])
        return plain and not moe["num_shared_experts"] and not moe["dense_layers"] and moe["score"] == "softmax"


def latent_heads(q, kv, shared, nope):
    """Latent attention from its products: rotary positions on the last elements of q, and on the shared key."""
    k = np.concatenate([kv[..., :nope], np.repeat(rope_interleaved(shared), q.shape[1], axis=1)], axis=-1)
    q = np.concatenate([q[..., :nope], rope_interleaved(q[..., nope:])], axis=-1)
    return attention(q, k, kv[..., nope:])


class Phi3(HuggingFace):
    """All queries, then all keys, then all values in one; gate and up in one."""

    def attend(self, x, name, size):
        model = self.model
        queries, keys = model["num_heads"] * size, (model["num_kv_heads"] or model["num_heads"]) * size
        mixed = linear(x, self.get(f"{name}.self_attn.qkv_proj.weight"))
        q, k, v = (heads(part, size) for part in np.split(mixed, [queries, queries + keys], axis=-1))
        return linear(attention(rope(q), rope(k), v), self.get(f"{name}.self_attn.o_proj.weight"))

    def mlp(self, x, at):
        gate, up = np.split(linear(x, self.get(f"{at}.gate_up_proj.weight")), 2, axis=-1)
        return linear(silu(gate) * up, self.get(f"{at}.down_proj.weight"))


class Ernie(HuggingFace):
    """Rotary positions turn neighbours; the bias of a router is a row."""

    ROUTER_BIAS = "moe_statics.e_score_correction_bias"
    rope = staticmethod(rope_interleaved)

    def is_mixtral(self):
        return False


class Megatron(OpenModel):
    POSITIONS = "embedding.position_embeddings.weight"
    EMBED, NORM, HEAD = "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"
    BLOCK, MODULE_BLOCK, MODULE_NORM = "decoder.layers.{}", ".transformer_layer", "final_layernorm.weight"
    linear = staticmethod(linear)

    def module_name(self, number):
        return f"mtp.layers.{number}"

    def attn_norm(self, name):
        return (
            f"{name}.input_layernorm.weight"
            if self.model["mla"]
            else f"{name}.self_attention.linear_qkv.layer_norm_weight"
        )

    def mlp_norm(self, name, has_experts):
        return f"{name}.pre_mlp_layernorm.weight" if has_experts else f"{name}.mlp.linear_fc1.layer_norm_weight"

    def attend(self, x, name, size):
        """The rows of linear_qkv are, for each query group, its queries, its key, its value."""
        groups = self.model["num_kv_heads"] or self.model["num_heads"]
        at = f"{name}.self_attention"
        mixed = self.product(x, f"{at}.linear_qkv.weight", "qkv").reshape(*x.shape[:2], groups, -1)
        q, k, v = mixed[..., : -2 * size], mixed[..., -2 * size : -size], mixed[..., -size:]
        q, k, v = (heads(part.reshape(*x.shape[:2], -1), size) for part in (q, k, v))
        mixed = self.mixed_heads(q, k, v, [f"{at}.{part}_layernorm.weight" for part in "qk"])
        return self.product(mixed, f"{at}.linear_proj.weight", "out")

    def latent(self, x, name, size):
        mla, at = self.model["mla"], f"{name}.self_attention"
        nope, rotary, value = (mla[f"{part}_head_size"] for part in ("nope", "rope", "value"))
        if mla["q_rank"] is None:
            q = linear(x, self.get(f"{at}.linear_q_proj.weight"))
        else:
            q = linear(x, self.get(f"{at}.linear_q_down_proj.weight"))
            q = self.norm(q, f"{at}.linear_q_up_proj.layer_norm_weight")
            q = linear(q, self.get(f"{at}.linear_q_up_proj.weight"))
        down = linear(x, self.get(f"{at}.linear_kv_down_proj.weight"))
        latent, shared = down[..., :-rotary], down[..., -rotary:]
        kv = self.norm(latent, f"{at}.linear_kv_up_proj.layer_norm_weight")
        kv = linear(kv, self.get(f"{at}.linear_kv_up_proj.weight"))
        mixed = latent_heads(heads(q, nope + rotary), heads(kv, nope + value), heads(shared, rotary), nope)
        return linear(mixed, self.get(f"{at}.linear_proj.weight"))

    def swiglu(self, x, first, second):
        gate, up = np.split(self.product(x, first, "mlp"), 2, axis=-1)
        return self.product(silu(gate) * up, second, "mlp")

    def mlp(self, x, at):
        activation = self.swiglu if self.model["mlp"] == "swiglu" else self.gelu
        return activation(x, f"{at}.linear_fc1.weight", f"{at}.linear_fc2.weight")

    def experts(self, x, name, moe):
        at = f"{name}.mlp"
        bias = self.get(f"{at}.router.expert_bias") if moe["expert_bias_rate"] else None
        gains = chosen(linear(x, self.get(f"{at}.router.weight")), moe, bias)
        y = self.mixed(
            x, gains, lambda x, e: self.swiglu(x, *(f"{at}.experts.linear_fc{part}.weight{e}" for part in (1, 2)))
        )
        return y + self.mlp(x, f"{at}.shared_experts") if moe["num_shared_experts"] else y


class PaddleFormersUnfused(HuggingFace):
    """With latent attention DeepSeek-V3's class: the router is a Linear, modules share the last norm, hidden first."""

    MODULE_BLOCK, MODULE_NORM = ".transformer_layer", "norm.weight"
    linear = staticmethod(paddle_linear)
    module_embed, module_head = OpenModel.module_embed, OpenModel.module_head

    def is_deepseek(self):
        return self.model["mla"] is not None

    def in_order(self, embedded_and_hidden):
        return embedded_and_hidden[::-1] if self.is_deepseek() else embedded_and_hidden

    def module_norm(self, name):
        return self.NORM if self.is_deepseek() else super().module_norm(name)

    def block(self, x, name, number):
        return super().block(x, name.removesuffix(self.MODULE_BLOCK) if self.is_deepseek() else name, number)

    def is_mixtral(self):
        return False

    def router(self, x, name):
        """A Linear in Qwen3MoE and DeepSeek-V3, [in, out]; a parameter [experts, in] in GLM, of sigmoids."""
        transposed = self.model["moe"]["score"] == "sigmoid" and not self.is_deepseek()
        return (linear if transposed else paddle_linear)(x, self.get(name))


class PaddleFormers(PaddleFormersUnfused):
    HEAD_NORM = "_norm"

    def is_deepseek(self):
        return False

    def attend(self, x, name, size):
        groups = self.model["num_kv_heads"] or self.model["num_heads"]
        per_group = self.model["num_heads"] // groups
        at = f"{name}.self_attn"
        mixed = self.product(x, f"{at}.qkv_proj.weight", "qkv")
        mixed = mixed.reshape(*x.shape[:2], groups, (per_group + 2) * size)
        shards = np.split(mixed, [per_group * size, (per_group + 1) * size], axis=-1)
        q, k, v = (heads(part.reshape(*x.shape[:2], -1), size) for part in shards)
        mixed = self.mixed_heads(q, k, v, [f"{at}.q{self.HEAD_NORM}.weight", f"{at}.k{self.HEAD_NORM}.weight"])
        return paddle_linear(mixed, self.get(f"{at}.o_proj.weight"))

    def mlp(self, x, at):
        gate, up = np.split(paddle_linear(x, self.get(f"{at}.up_gate_proj.weight")), 2, axis=-1)
        return paddle_linear(silu(gate) * up, self.get(f"{at}.down_proj.weight"))


class PaddleFleet(PaddleFormers):
    """A router is [experts, in] any its scores; a head that is tied is there, and read."""

    HEAD_NORM = "_layernorm"
    EMBED, HEAD = "model.embedding.embed_tokens.weight", "model.lm_head.weight"

    def head(self, x):
        return linear(x, self.get(self.HEAD))

    def router(self, x, name):
        return linear(x, self.get(name))


class GPT2(OpenModel):
    """Matrices [in, out] (Conv1D); c_attn makes all queries, then all keys, then all values."""

    EMBED, POSITIONS, NORM = "transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"
    BLOCK, HEAD = "transformer.h.{}", "lm_head.weight"
    linear = staticmethod(paddle_linear)

    def attn_norm(self, name):
        return f"{name}.ln_1.weight"

    def mlp_norm(self, name, has_experts):
        return f"{name}.ln_2.weight"

    def attend(self, x, name, size):
        q, k, v = np.split(self.product(x, f"{name}.attn.c_attn.weight", "qkv"), 3, axis=-1)
        mixed = self.mixed_heads(heads(q, size), heads(k, size), heads(v, size), None)
        return self.product(mixed, f"{name}.attn.c_proj.weight", "out")

    def mlp(self, x, at):
        return self.gelu(x, f"{at}.c_fc.weight", f"{at}.c_proj.weight")


class OwnModel(OpenModel):
    """Pipeproof's own names and layouts, without experts, latent attention and modules."""

    EMBED, POSITIONS, NORM, BLOCK = "embed.weight", "embed.positions.weight", "norm.weight", "layer.{}"
    linear = staticmethod(paddle_linear)

    def head(self, x):
        return x @ (self.get(self.EMBED).T if self.model["tied_embedding"] else self.get("head.weight"))

    def attn_norm(self, name):
        return f"{name}.attn_norm.weight"

    def mlp_norm(self, name, has_experts):
        return f"{name}.mlp_norm.weight"

    def attend(self, x, name, size):
        """For each head of keys and values: its queries, its key, its value."""
        at, groups = f"{name}.attn", self.model["num_kv_heads"] or self.model["num_heads"]
        mixed = self.product(x, f"{at}.qkv.weight", "qkv")
        mixed = mixed.reshape(*x.shape[:2], groups, -1, size).transpose(0, 2, 3, 1, 4)
        q, k, v = mixed[:, :, :-2], mixed[:, :, -2], mixed[:, :, -1]
        q = q.reshape(q.shape[0], -1, *q.shape[3:])
        mixed = self.mixed_heads(q, k, v, [f"{at}.{part}_head_norm.weight" for part in "qk"])
        return self.product(mixed, f"{at}.out.weight", "out")

    def mlp(self, x, at):
        up = self.product(x, f"{at}.up.weight", "mlp")
        if self.model["mlp"] == "swiglu":
            inner = silu(self.product(x, f"{at}.gate.weight", "mlp")) * up
        else:
            inner = GELUS[self.model["mlp"]](up)
        return self.product(inner, f"{at}.down.weight", "mlp")


def open_model(convention, model):
    """The class of a convention for a model, as ``model_dump`` has it."""
    if convention == "huggingface" and model["positions"] == "learned":
        return GPT2
    return OPEN_MODELS[convention]


OPEN_MODELS = {
    "huggingface": HuggingFace,
    "huggingface-phi3": Phi3,
    "huggingface-ernie4_5": Ernie,
    "megatron": Megatron,
    "paddleformers": PaddleFormers,
    "paddleformers-unfused": PaddleFormersUnfused,
    "paddlefleet": PaddleFleet,
}
