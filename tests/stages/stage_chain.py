"""The stages of every rank of a mesh in one process, and one work item forward through them and back."""

from itertools import pairwise

from pipeproof.stages.describe.gpt import describe_gpt
from tests.stages.world import World


class StageChain:
    """``cut`` lists where stages begin, besides at layer 0; ``make(layers, place, rank)`` makes a stage.

    ``enter`` makes an activation a leaf with a gradient.
    """

    def __init__(self, plan, cut, library, make, enter, *, layers=None, **sizes):
        self.plan, self.layers, self._enter = plan, tuple(layers or describe_gpt(plan)), enter
        self.world = World(library, **sizes)
        parts = [self.layers[a:b] for a, b in pairwise([0, *cut, len(self.layers)])]
        self.stages = [[make(part, place, rank) for part in parts] for place, rank in enumerate(self.world.ranks)]
        self.issued = []
        """For each work item and rank: the operations issued forward, backward and for gradients of weights."""

    @property
    def parameters(self):
        return [parameter for layer in self.layers for parameter in layer.parameters]

    def forward(self, place, batch, **where):
        """The stages' inputs and outputs, and the losses."""
        inputs, outputs, activation = [], [], None
        for stage in self.stages[place]:
            inputs.append(None if activation is None else self._enter(activation))
            activation = stage.forward(inputs[-1], batch, **where)
            outputs.append(activation)
        return inputs, outputs, self.stages[place][-1].losses

    def backward(self, place, inputs, outputs):
        """The gradients of weights of each stage, which are still to be accumulated."""
        gradient, later = None, []
        for stage, received, output in zip(*map(reversed, (self.stages[place], inputs, outputs)), strict=True):
            later.append(stage.backward_input(output, gradient))
            gradient = None if received is None else received.grad
        return later

    def take_issued(self, place):
        issued = list(self.world.ranks[place].issued)
        self.world.ranks[place].issued.clear()
        return issued
