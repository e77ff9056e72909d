"""A small GPT in plain Paddle, with faults to plant; the same one as in small_torch."""

import math

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

import pipeproof.paddle
from tests.align.small_model import HEADS, HIDDEN, MICRO_BATCHES, VOCAB, tokens, weights


class Rotary(nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x):  # [batch, sequence, heads, head]
        size = x.shape[-1]
        angles = paddle.arange(x.shape[1]).astype("float32")[:, None] / 100.0 ** (
            paddle.arange(size // 2).astype("float32") * 2 / size
        )
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        if self.fault == "rotary":
            first, second = x[..., 0::2], x[..., 1::2]
            return paddle.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return paddle.concat((first * cos - second * sin, second * cos + first * sin), -1)


class Attention(nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.rotary_q, self.rotary_k = Rotary(fault), Rotary(fault)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape([*x.shape[:2], 3, HEADS, HIDDEN // HEADS]).unbind(2)
        q, k = self.rotary_q(q), self.rotary_k(k)
        q, k, v = (each.transpose([0, 2, 1, 3]) for each in (q, k, v))
        size = q.shape[-1]
        scores = q @ k.transpose([0, 1, 3, 2]) / (size if self.fault == "attention" else math.sqrt(size))
        length = x.shape[1]
        scores = scores + paddle.full([length, length], -1e9).triu(1)
        return self.out((F.softmax(scores, -1) @ v).transpose([0, 2, 1, 3]).reshape(x.shape))


class Mlp(nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.up, self.act, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        y = self.act(self.up(x))
        if self.fault == "cast":
            y = y.astype("bfloat16").astype("float32")
        return self.down(y)


class Dropout(nn.Layer):
    """Dropout from one stream of numpy, the same in both frameworks."""

    def __init__(self, seed):
        super().__init__()
        self.random = np.random.default_rng(seed)

    def forward(self, x):
        kept = paddle.to_tensor((self.random.random(tuple(x.shape)) >= 0.1).astype("f4"))
        return x * kept / 0.9


class Block(nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.norm1, self.attn = nn.LayerNorm(HIDDEN), Attention(fault)
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN, epsilon=1e-3 if fault == "epsilon" else 1e-5), Mlp(fault)
        self.drop = Dropout(2 if fault == "dropout" else 1)

    def forward(self, x):
        read = self.norm1(x)
        attended = self.drop(self.attn(read))
        if self.fault == "residual":
            x = x.transpose([1, 0, 2]).reshape(x.shape)
        if self.fault == "norm":
            x = read
        if self.fault == "detached":
            x = x.detach()
        x = x + attended
        return x + self.mlp(self.norm2(x))


class Model(nn.Layer):
    def __init__(self, fault):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.LayerList([Block(fault if number else "") for number in range(2)])
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias_attr=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(directory, fault="", steps=2, names=("*",)):
    model = Model(fault)
    with paddle.no_grad():
        for name, value in weights().items():
            weight = dict(model.named_parameters())[name]
            weight.set_value(
                value.T if weight.shape != [*value.shape] or ("attn.out" in name and value.ndim == 2) else value
            )
    clip = nn.ClipGradByGlobalNorm(0.5) if fault == "clip" else None
    rate = 0.2 if fault == "rate" else 0.1
    optimizer = paddle.optimizer.SGD(rate, parameters=model.parameters(), grad_clip=clip)
    with pipeproof.paddle.record_layers(model, directory, names=names):
        for step in range(steps):
            for micro_batch in range(MICRO_BATCHES):
                x, y = (paddle.to_tensor(each) for each in tokens(step, micro_batch))
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / (1 if fault == "loss" else MICRO_BATCHES)
                if fault == "reduction":
                    optimizer.clear_grad()
                loss.backward()
            optimizer.step()
            optimizer.clear_grad()
