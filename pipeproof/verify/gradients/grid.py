"""Where the graph's ranks stand on the mesh, and along which axis a group of them runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.comm.mesh import Mesh
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.optable import Group, IntColumn, OpGraph
from pipeproof.verify.gradients.coefficient import Coefficient


@dataclass(frozen=True, eq=False)
class Grid:
    """Coordinates of the ranks of a graph on the axes that have more than one rank.

    ``coords`` has shape [ranks, axes]. Over a *folded* axis every rank of the
    graph stands for all; its coordinate says nothing. A size is not a number
    where the graph does not tell how many ranks there are.
    """

    axes: tuple[str, ...]
    sizes: Mapping[str, Coefficient]
    coords: IntColumn
    folded: frozenset[str]

    def size(self, axis: str) -> Coefficient:
        """Ranks along ``axis``; 1 where the mesh does not have it."""
        return self.sizes.get(axis, Coefficient.of(1))

    def along(self, group: Group) -> str | None:
        """The axis of which ``group`` holds exactly the ranks of one line, None if there is none."""
        if len(group.ranks) == 1:
            whole = self.size(group.axis).number
            alone = whole == group.copies and (group.axis in self.folded or group.copies == 1)
            return group.axis if alone else None
        lines = self.coords[list(group.ranks)]
        varying = np.flatnonzero((lines != lines[0]).any(axis=0))
        if len(varying) != 1 or group.copies != 1:
            return None
        axis = self.axes[varying[0]]
        places = np.sort(lines[:, varying[0]])
        is_line = len(places) == self.size(axis).number and np.array_equal(places, np.arange(len(places)))
        return axis if is_line else None

    def line(self, rank: int, axis: str) -> list[int]:
        """The ranks of the graph that differ from ``rank`` in their coordinate on ``axis`` only, with itself."""
        keys, lines = self._lines_along(axis)
        return lines[int(keys[rank])]

    def place(self, rank: int, axis: str) -> int:
        """The coordinate of ``rank``; 0 on an axis with one rank."""
        return int(self.coords[rank, self.axes.index(axis)]) if axis in self.axes else 0

    def same(self, rank: IntColumn, axis: str, place: int) -> BoolColumn:
        """Which of the ranks have a coordinate on an axis; all of them on an axis with one rank."""
        if axis not in self.axes:
            return np.ones(len(rank), dtype=bool)
        return np.asarray(self.coords[rank, self.axes.index(axis)] == place)

    @cached_property
    def _lines(self) -> dict[str, tuple[IntColumn, dict[int, list[int]]]]:
        return {}

    def _lines_along(self, axis: str) -> tuple[IntColumn, dict[int, list[int]]]:
        """(the line of each rank, the ranks of each line), found when an axis is first asked for."""
        if axis not in self._lines:
            others = [self.coords[:, i] for i, name in enumerate(self.axes) if name != axis]
            keys = packed(*others) if others else np.zeros(len(self.coords), dtype=np.int64)
            lines: dict[int, list[int]] = {}
            for rank, key in enumerate(keys.tolist()):
                lines.setdefault(key, []).append(rank)
            self._lines[axis] = keys, lines
        return self._lines[axis]


def mesh_grid(graph: OpGraph, mesh: Mesh) -> Grid:
    """The grid of a graph whose ranks are, or stand for, ranks of ``mesh``."""
    axes = tuple(axis for axis in mesh.axes if mesh.size(axis) > 1)
    places = [[mesh.coords(rank)[axis] for axis in axes] for rank in graph.global_rank]
    folded = frozenset(axes) - {"pp"} if graph.num_ranks < mesh.num_ranks else frozenset[str]()
    return Grid(
        axes,
        {axis: Coefficient.of(mesh.size(axis)) for axis in axes},
        np.array(places, dtype=np.int64).reshape(graph.num_ranks, len(axes)),
        folded,
    )


def guessed_grid(graph: OpGraph, stages: Mapping[int, tuple[int, ...]], needed: frozenset[str]) -> Grid:
    """The grid that the groups of a graph tell of; ranks with the same stages share their ``pp`` coordinate.

    An axis of ``needed`` that no group has is folded, its size a name.
    """
    held: dict[int, list[int]] = {}
    for stage, ranks in stages.items():
        for rank in ranks:
            held.setdefault(rank, []).append(stage)
    codes = {key: code for code, key in enumerate(sorted({tuple(v) for v in held.values()}))}
    columns = {"pp": [codes.get(tuple(held.get(rank, ())), len(codes)) for rank in range(graph.num_ranks)]}
    sizes = {"pp": Coefficient.of(len(codes))}
    folded = set[str]()
    for axis in sorted({group.axis for group in graph.groups if group.axis != "pp"}):
        groups = [group for group in graph.groups if group.axis == axis]
        places = [0] * graph.num_ranks
        for group in reversed(groups):
            for place, rank in enumerate(group.ranks):
                places[rank] = place
        largest = max(groups, key=lambda group: group.size)
        if largest.size > 1:
            columns[axis], sizes[axis] = places, Coefficient.of(largest.size)
            folded |= {axis} if largest.copies > 1 else set()
    for axis in sorted(needed - set(columns)):
        columns[axis], sizes[axis] = [0] * graph.num_ranks, Coefficient.named(axis)
        folded.add(axis)
    return Grid(tuple(columns), sizes, np.array(list(columns.values()), dtype=np.int64).T, frozenset(folded))
