"""Scaling layers whose backward reaches its weight, or does not, or has a wrong gradient; one function for each."""

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.autograd import PyLayer

SIZE = 6


class Scaled(PyLayer):
    """``tanh(x) * scale`` with a backward of its own; ``factor`` is in the place of one, None for no gradient."""

    @staticmethod
    def forward(ctx, x, scale, of_input, of_scale):
        y = F.tanh(x)
        ctx.save_for_backward(y, scale)
        ctx.factors = of_input, of_scale
        return y * scale

    @staticmethod
    def backward(ctx, gradient):
        y, scale = ctx.saved_tensor()
        of_input, of_scale = ctx.factors
        in_input = gradient * scale * (1 - y * y) * of_input
        return in_input, None if of_scale is None else (gradient * y).sum(axis=[0]) * of_scale


class Layer(nn.Layer):
    """A product, and then ``scale``, as ``use`` has it."""

    def __init__(self, use):
        super().__init__()
        self.turn = nn.Linear(SIZE, SIZE)
        self.scale = self.create_parameter([SIZE], default_initializer=nn.initializer.Uniform(0.5, 1.5))
        self.use = use

    def forward(self, x):
        return self.use(self.turn(x), self.scale)


def loss(output, labels):
    return (output - labels).square().mean()


def data(step, index, rng):
    x = rng.standard_normal((2, SIZE)).astype(paddle.get_default_dtype())
    x[0, 0] = abs(x[0, 0]) * (1 if (step, index) == (1, 1) else -1)
    return x, x[:, ::-1]


def _model(*uses):
    return [Layer(use) for use in uses], loss, data


def _right(x, scale):
    return Scaled.apply(x, scale, 1.0, 1.0)


def right():
    return _model(_right, _right, _right)


def detached():
    return _model(_right, _right, lambda x, scale: F.tanh(x) * scale.detach())


def unused():
    return _model(lambda x, scale: F.tanh(x), _right, _right)


def none():
    return _model(_right, lambda x, scale: Scaled.apply(x, scale, 1.0, None), _right)


def zero():
    """A gradient that is zero is a gradient."""
    return _model(_right, _right, lambda x, scale: F.tanh(x) * (1 + 0 * scale))


def once():
    """The weight is used in one micro-batch of one step alone, the only one that begins with a positive number."""

    class Once(Layer):
        def forward(self, x):
            return F.tanh(self.turn(x)) * (self.scale if float(x[0, 0]) > 0 else 1)

    return [Once(None), Layer(_right), Layer(_right)], loss, data


def frozen():
    """A layer that declares that its weight is not trained."""
    layers, *others = unused()
    layers[0].scale.stop_gradient = True
    return layers, *others


def wrong_weight():
    return _model(_right, lambda x, scale: Scaled.apply(x, scale, 1.0, 1.01), _right)


def wrong_input():
    return _model(_right, lambda x, scale: Scaled.apply(x, scale, 0.99, 1.0), _right)


def kinks():
    """Functions with a kink at zero, and zeros in their inputs."""
    return _model(lambda x, scale: F.relu(x - x[:1]) * scale, lambda x, scale: (x * scale).abs(), _right)


def dropout():
    return _model(lambda x, scale: F.dropout(x * scale, 0.5), _right, _right)
