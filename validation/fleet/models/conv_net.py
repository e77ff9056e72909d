"""A conv net with functions between its layers, and filters that two of them share."""

import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc, SharedLayerDesc

ROWS, CLASSES = 2, 3


def data(rng):
    """Return a micro-batch: inputs and labels."""
    return rng.standard_normal((ROWS, 2, 4, 4)).astype("float32"), rng.integers(0, CLASSES, ROWS)


def described():
    """Return the layers in their order."""
    shared = {"kernel_size": 3, "padding": 1}
    return [
        LayerDesc(nn.Conv2D, 2, 4, kernel_size=3, padding=1),
        LayerDesc(nn.BatchNorm2D, 4),
        F.relu,
        SharedLayerDesc("filters", nn.Conv2D, None, ["weight", "bias"], 4, 4, **shared),
        F.tanh,
        SharedLayerDesc("filters", nn.Conv2D, None, ["weight", "bias"], 4, 4, **shared),
        LayerDesc(nn.MaxPool2D, kernel_size=2, stride=2),
        nn.Flatten(),
        LayerDesc(nn.Linear, 16, CLASSES),
    ]


loss = F.cross_entropy
