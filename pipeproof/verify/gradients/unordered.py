"""Copies of a weight: whether the sum over them and the other sums of its gradient are done one after the other.

Everything else that several queues may do to one gradient at a time is a race
like any other, and the rules on lifetimes find it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from pipeproof.schedule.optable import OpGraph
from pipeproof.verify.gradients.causes import Cause, Problem
from pipeproof.verify.gradients.explain import Held
from pipeproof.verify.gradients.views import What
from pipeproof.verify.lifetime.order import Order

_REDUCTIONS = (What.REDUCE, What.TOUCH)


def unordered(graph: OpGraph, order: Order, held: Held) -> Iterator[Problem]:
    """A sum over copies and its neighbour among the sums of the gradient, where neither is sure to come first."""
    for rank, view in held.views.items():
        for first, second in pairwise(view.where(*_REDUCTIONS)):
            axes = {view.moves[first].axis, view.moves[second].axis}
            if "pp" not in axes or len(axes) == 1:
                continue
            a, b = (int(view.ops[place][-1]) for place in (first, second))
            if order.surely(np.array([a]), np.array([b]))[0] or order.before(a, b):
                continue
            earlier, later = str(graph.ops[a]), str(graph.ops[b])
            yield Problem(
                Cause.COPIES,
                ("unordered",),
                rank,
                int(graph.stage[a]),
                f"nothing keeps {later} from starting before {earlier} is done: they are on different queues",
                f"wait for {earlier} on the queue of {later} before it",
                held.parameter.name,
                (a, b),
            )
