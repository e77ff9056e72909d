"""Boxes of pipeproof's tensors as matrices and vectors, and other tensors that are put together of them.

A matrix is seen as pipeproof multiplies with it, [in, out]; an expert of a
tensor [experts, in, out] is a matrix, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeproof.state.boxes import Box, whole_box
from pipeproof.state.mapping import Slab, TensorMap


@dataclass(frozen=True, slots=True)
class View:
    """A box of the tensor ``source``; ``dims`` are those of its dims that are seen, the others have one element."""

    source: str
    box: Box
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dims that are seen."""
        return tuple(self.box.extents[dim] for dim in self.dims)

    def cut(self, dim: int, start: int, stop: int) -> View:
        """From ``start`` to ``stop`` of a dim that is seen."""
        at = self.dims[dim]
        offsets, extents = list(self.box.offsets), list(self.box.extents)
        offsets[at], extents[at] = offsets[at] + start, stop - start
        return View(self.source, Box(tuple(offsets), tuple(extents)), self.dims)


def view_of(source: str, shape: Sequence[int]) -> View:
    """All of a vector or a matrix."""
    return View(source, whole_box(shape), tuple(range(len(shape))))


def expert_of(source: str, shape: Sequence[int], expert: int) -> View:
    """The matrix of one expert of [experts, in, out]."""
    return View(source, Box((expert, 0, 0), (1, *shape[1:])), (1, 2))


def put_together(views: Sequence[View], along: int, dtype: str, *, turned: bool) -> TensorMap:
    """The tensor in which views of equal dims stand one behind the other along ``along``; ``turned``, its transpose."""
    dims = views[0].dims
    seen = tuple(reversed(dims)) if turned else dims
    place = seen.index(dims[along])
    before, after = (0,) * place, (0,) * (len(seen) - place - 1)
    permutation = None if seen == tuple(range(len(views[0].box.extents))) else seen
    at, slabs = 0, []
    for view in views:  # of latent attention there are thousands, of one column each
        extents = tuple([view.box.extents[dim] for dim in seen])
        slabs.append(Slab(Box((*before, at, *after), extents), view.source, view.box, permutation))
        at += extents[place]
    shape = (*slabs[0].box.extents[:place], at, *slabs[0].box.extents[place + 1 :])
    return TensorMap(dtype, shape, tuple(slabs))
