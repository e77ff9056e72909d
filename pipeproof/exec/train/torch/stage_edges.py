"""The module of a stage with edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeproof.exec.train.stage_edges import PassedEdges, StageEdges


def wrapped(edges: StageEdges, number: int, module: nn.Module) -> nn.Module:
    """A stage in a wrapper that makes, takes and passes on the tensors of edges; the module itself without any."""
    passed = edges.of_stage(number)
    return module if passed is None else EdgeStage(module, passed)


class EdgeStage(nn.Module):  # type: ignore[misc]  # torch is untyped
    """A stage that takes its edges as keyword arguments, and returns those that leave it."""

    def __init__(self, module: nn.Module, edges: PassedEdges) -> None:
        super().__init__()
        self._orig_mod = module  # the name that PyTorch's wrappers have, which names of weights leave out
        self._edges = edges

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output with the edges that leave the stage; without any, the output itself.

        Raises:
            PipelineError: the stage does not return the tensor of an edge that it makes.
        """
        positional, named, arrived = self._edges.split(kwargs)
        used = {name: arrived[name] for name in self._edges.used}
        value = self._orig_mod(*args, *positional, **named, **used)
        return self._edges.output(value, arrived, torch.Tensor)
