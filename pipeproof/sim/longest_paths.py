"""Longest paths to every node of an acyclic graph, walked in plain Python or compiled by numba.

The walk is one function. Lists make it fast in Python, arrays let numba
compile it; numba is the ``fast`` extra and takes a second to load and compile,
so it is used only for graphs of more than ``COMPILED_ABOVE`` edges.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import numpy as np

from pipeproof.schedule.columns import IntColumn

COMPILED_ABOVE = 2_000_000
"""Edges that plain Python walks in about the time in which numba is loaded and compiles."""

_Walk = Callable[[Any, Any, Any, Any, Any, Any, Any], bool]


def longest_paths(
    first: IntColumn, source: IntColumn, weight: IntColumn, *, compiled: bool | None = None
) -> IntColumn | None:
    """Length of the longest path that ends at each node, at least 0; None if the graph has a cycle.

    Node n is reached over the edges ``first[n] : first[n + 1]``, each from node ``source[e]`` with the length
    ``weight[e]``, which may be negative. ``compiled`` chooses numba's code or Python's; by default numba's for large
    graphs, if it is installed. Linear in edges.

    Raises:
        ImportError: ``compiled`` is true and numba is not installed.
    """
    num_nodes = len(first) - 1
    if compiled is None:
        compiled = len(source) > COMPILED_ABOVE and find_spec("numba") is not None
    if compiled:
        value, next_edge = np.zeros(num_nodes, dtype=np.int64), first[:-1].copy()
        stack, done = np.zeros(num_nodes, dtype=np.int64), np.zeros(num_nodes, dtype=np.uint8)
        return value if _compiled_walk()(first, source, weight, value, next_edge, done, stack) else None
    edges = first.tolist()
    values = [0] * num_nodes
    ended = _walk(edges, source.tolist(), weight.tolist(), values, edges[:-1], bytearray(num_nodes), [0] * num_nodes)
    return np.array(values, dtype=np.int64) if ended else None


@cache
def _compiled_walk() -> _Walk:
    import numba

    return cast(_Walk, numba.njit(_walk))


def _walk(
    first: Sequence[int],
    source: Sequence[int],
    weight: Sequence[int],
    value: MutableSequence[int],
    next_edge: MutableSequence[int],
    done: MutableSequence[int],
    stack: MutableSequence[int],
) -> bool:
    """Fill ``value`` depth first, each node after its sources; return False if there is a cycle.

    ``next_edge[n]`` is the next edge of node n to visit. A stack deeper than
    the number of nodes means a cycle.
    """
    for root in range(len(value)):
        if done[root]:
            continue
        stack[0] = root
        depth = 1
        while depth:
            node = stack[depth - 1]
            edge, stop, longest = next_edge[node], first[node + 1], value[node]
            while edge < stop:
                before = source[edge]
                if not done[before]:
                    break
                length = value[before] + weight[edge]
                if length > longest:  # faster than max()
                    longest = length
                edge += 1
            next_edge[node], value[node] = edge, longest
            if edge == stop:
                done[node] = 1
                depth -= 1
            elif depth == len(value):
                return False
            else:
                stack[depth] = source[edge]
                depth += 1
    return True
