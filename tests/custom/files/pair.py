"""Tuples between layers: activations, ids without a gradient, and a weight that is used at both ends."""

import paddle
import paddle.nn.functional as F
from paddle import nn

WORDS, SIZE = 7, 6


class Embed(nn.Layer):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, ids):
        return self.table(ids), ids


class Step(nn.Layer):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(SIZE, SIZE)

    def forward(self, pair):
        states, ids = pair
        return F.silu(self.cell(states)) * (ids > 1).unsqueeze(-1).astype(states.dtype) + states, ids


class Head(nn.Layer):
    """Multiplies by the embedding's weight, and has a bias of its own."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.shift = self.create_parameter([WORDS], is_bias=True)

    def forward(self, pair):
        return paddle.matmul(pair[0], self.table.weight, transpose_y=True) + self.shift


def loss(logits, labels):
    return F.cross_entropy(logits.reshape([-1, WORDS]), labels.reshape([-1]))


def data(step, index, rng):
    ids = rng.integers(0, WORDS, (2, 5))
    return ids[:, :-1], ids[:, 1:]


def build():
    table = nn.Embedding(WORDS, SIZE)
    return [Embed(table), *(Step() for _ in range(6)), Head(table)], loss, data
