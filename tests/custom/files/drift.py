"""Layers with state in addition to weights: running statistics, a count of forwards, a mean that changes outputs."""

import paddle
import paddle.nn.functional as F
from paddle import nn

SIZE = 6


class Drift(nn.Layer):
    """What it gives depends on all forwards before; ``angles`` never change."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(SIZE, SIZE)
        self.register_buffer("count", paddle.zeros([], dtype="int64"))
        self.mean = paddle.zeros([SIZE])
        self.angles = paddle.linspace(0.1, 0.2, SIZE)

    def forward(self, x):
        self.count += 1
        self.mean = 0.7 * self.mean + 0.3 * x.detach().mean(0)
        return F.tanh(self.mix(x)) - self.mean + self.angles / self.count.astype(x.dtype)


class Head(nn.Layer):
    """Multiplies by the first layer's weight."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        return paddle.matmul(x, self.first.weight, transpose_y=True)


def loss(output, labels):
    return (output - labels).square().mean()


def data(step, index, rng):
    x = rng.standard_normal((4, SIZE)).astype(paddle.get_default_dtype())
    return x, x[:, ::-1].copy()


def build():
    first = nn.Linear(SIZE, SIZE)
    inside = [Drift(), nn.BatchNorm1D(SIZE), nn.Dropout(0.2), Drift(), nn.Linear(SIZE, SIZE), F.tanh]
    return [first, *inside, Head(first)], loss, data
