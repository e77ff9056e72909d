"""A conv net as a Fleet ``PipelineLayer``, with functions between its layers and filters shared by two of them."""

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

ROWS, CLASSES = 2, 3


class Net(PipelineLayer):
    """A description in Fleet's form; pipeproof reads it and builds no process group."""

    def __init__(self, **where):
        shared = {"kernel_size": 3, "padding": 1}
        described = [
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
        super().__init__(layers=described, loss_fn=nn.CrossEntropyLoss(), **where)


def data(step, index, rng):
    """Return micro-batch ``index`` of a step: inputs and labels."""
    inputs = rng.standard_normal((ROWS, 2, 4, 4)).astype(paddle.get_default_dtype())
    return inputs, rng.integers(0, CLASSES, ROWS)


def build():
    """Return the layers, which include the loss function, and the data; the plan overrides ``num_stages``."""
    return Net(num_stages=2), None, data
