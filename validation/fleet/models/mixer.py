"""An MLP mixer (arXiv:2105.01601) on noise: six blocks that mix patches and channels alternately, with dropout."""

import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc

PATCHES, CHANNELS, CLASSES, ROWS = 6, 8, 5, 2


class Mix(nn.Layer):
    """A norm, an MLP over patches or over channels, and the residual around both."""

    def __init__(self, over_patches):
        super().__init__()
        size = PATCHES if over_patches else CHANNELS
        self.over_patches = over_patches
        self.norm = nn.LayerNorm(CHANNELS)
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        y = self.norm(x)
        y = y.transpose([0, 2, 1]) if self.over_patches else y
        y = self.down(self.drop(F.gelu(self.up(y))))
        return x + (y.transpose([0, 2, 1]) if self.over_patches else y)


class Head(nn.Layer):
    """The mean over patches, and the logits of the classes."""

    def __init__(self):
        super().__init__()
        self.classify = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x):
        return self.classify(x.mean(axis=1))


def data(rng):
    """Return a micro-batch: inputs and labels."""
    return rng.standard_normal((ROWS, PATCHES, 3)).astype("float32"), rng.integers(0, CLASSES, ROWS)


def described():
    """Return the layers in their order."""
    blocks = [LayerDesc(Mix, number % 2 == 0) for number in range(6)]
    return [LayerDesc(nn.Linear, 3, CHANNELS), *blocks, LayerDesc(Head)]


loss = F.cross_entropy
