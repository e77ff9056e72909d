"""Layers with state between micro-batches, each in another place; one with buffers of all types."""

import os

import numpy as np
import paddle
from paddle import nn

SIZE = 4


class _WithLinear(nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)


class Mean(nn.Layer):
    def __init__(self, tensor):
        super().__init__()
        self.register_buffer("mean", tensor)

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


class InTwoPlaces(_WithLinear):
    """One tensor, of which the first forward makes two."""

    def __init__(self):
        super().__init__()
        zeros = paddle.zeros([SIZE])
        self.one, self.other = Mean(zeros), Mean(zeros)

    def forward(self, x):
        return self.other(self.linear(self.one(x)))


class MadeLate(_WithLinear):
    """What it gives does not depend on the mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        now = x.detach().mean(0)
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        return self.linear(x)


class Counts(_WithLinear):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return self.linear(x) / self.count


class Draws(nn.Layer):
    def forward(self, x):
        return x * float(np.random.rand())


class BuiltOtherwise(_WithLinear):
    def __init__(self):
        super().__init__()
        self.scale = paddle.to_tensor(list(os.urandom(8 * SIZE))).astype("float32").reshape([8, SIZE]).sum(0)

    def forward(self, x):
        return self.linear(x) * self.scale


class Caches(_WithLinear):
    """What it made of the last micro-batch, and what it makes once, are no state."""

    def __init__(self):
        super().__init__()
        self.last = self.places = None

    def forward(self, x):
        if self.places is None:
            self.places = paddle.arange(SIZE).astype(x.dtype)
        self.last = self.linear(x)
        return self.last + self.places


class Types(_WithLinear):
    """A buffer of each type that a state has; ``turns`` is of no dim, as is ``scale``, which Paddle would not save."""

    def __init__(self):
        super().__init__()
        self.register_buffer("flags", paddle.zeros([3], dtype="bool"))
        self.register_buffer("turn", paddle.zeros([], dtype="bool"))
        self.register_buffer("large", paddle.zeros([2], dtype="int64"))
        self.register_buffer("count", paddle.zeros([], dtype="int32"))
        self.register_buffer("sums", paddle.ones([SIZE], dtype="float64"))
        self.register_buffer("scale", paddle.ones([], dtype="float64"), persistable=False)

    def forward(self, x):
        self.turn = paddle.logical_not(self.turn)
        self.flags = paddle.concat([self.flags[1:], paddle.logical_xor(self.turn, self.flags[0]).reshape([1])])
        self.large = self.large * 3 + paddle.to_tensor([1, 2**40])
        self.count += 1
        self.sums = self.sums * 0.9 + x.detach().mean(0).astype("float64")
        self.scale.set_value(self.scale * 1.1)
        numbers = [(self.large % 7).sum(), self.flags.sum(), self.count, self.scale]
        return self.linear(x) + self.sums.astype(x.dtype) + sum(0.01 * one.astype(x.dtype) for one in numbers)


def loss(output, labels):
    return (output - labels).square().mean()


def data(step, index, rng):
    x = rng.standard_normal((4, SIZE)).astype("float32")
    return x, x[:, ::-1].copy()


def _between(layer):
    return [nn.Linear(SIZE, SIZE), layer(), nn.Linear(SIZE, SIZE)], loss, data


def two_places():
    return _between(InTwoPlaces)


def made_late():
    return _between(MadeLate)


def counts():
    return _between(Counts)


def draws():
    return _between(Draws)


def built_otherwise():
    return _between(BuiltOtherwise)


def caches():
    return _between(Caches)


def types():
    return _between(Types)
