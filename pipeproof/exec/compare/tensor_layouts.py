"""Layouts of tensors that tensor parallelism splits, from the attributes that Megatron and Fleet give to weights."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pipeproof.analysis.align.record_format import Index, Layout


class Split(NamedTuple):
    """A weight that ``size`` ranks share along ``dim``; each has ``stride`` parts, one from each of ``stride`` tensors.

    Gate and up in one weight are two such tensors.
    """

    dim: int
    rank: int
    size: int
    stride: int = 1


def split_layout(local: tuple[int, ...], split: Split) -> Layout:
    """Layout of a tensor with the part ``local`` on this rank."""
    dim = split.dim % len(local)
    length = local[dim] // split.stride
    starts = [(part * split.size + split.rank) * length for part in range(split.stride)]
    shape = (*local[:dim], local[dim] * split.size, *local[dim + 1 :])
    return shape, tuple(_index(local, dim, start, start + length) for start in starts)


def _index(local: tuple[int, ...], dim: int, start: int, stop: int) -> Index:
    return tuple((start, stop) if d == dim else (0, size) for d, size in enumerate(local))


def layout_at_boundary(
    local: tuple[int, ...], weight: tuple[int, ...], split: Split, side: Literal["input", "output"], out_dim: int = 0
) -> Layout | None:
    """Layout of the split input or output of a linear layer, ``local`` on this rank; None for the whole one.

    ``out_dim`` is the dim of the weight that has a row for each element of the output. If the weight is split along it,
    the output is split along its last dim; otherwise the input is.
    """
    is_split = (split.dim == out_dim) == (side == "output")
    if len(weight) != 2 or not local or not is_split or local[-1] != weight[split.dim]:
        return None
    return split_layout(local, split._replace(dim=-1))
