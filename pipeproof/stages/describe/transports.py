"""Transports: how a tensor crosses a stage boundary, and which layouts survive it.

``full`` sends each rank's local tensor to its counterpart. ``partial`` is
Paddle Fleet's ``enable_partial_send_recv`` (Megatron-LM calls it
scatter-gather, arXiv:2104.04473, section 4.1): TP rank k sends the k-th 1/n of
its flattened tensor and the receivers all-gather over TP, which presumes that
all n ranks hold the same tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from pipeproof.specs.axis_layout import PlacementKind


class Transport(StrEnum):
    """The two transports of a boundary tensor."""

    FULL = "full"
    PARTIAL = "partial"


PRESERVES: Mapping[Transport, frozenset[PlacementKind]] = MappingProxyType(
    {
        Transport.FULL: frozenset(PlacementKind),
        Transport.PARTIAL: frozenset({PlacementKind.REPLICATED, PlacementKind.INVARIANT}),
    }
)
"""The placements over TP that each transport preserves, for all values."""


def effective_transport(declared: str, numel: int, num_tp_ranks: int) -> Transport:
    """The effective transport of a tensor of ``numel`` local elements.

    Fleet decides per tensor: without tensor parallelism, or when ``numel`` does
    not divide by the TP degree, ``partial`` silently becomes a full send
    (``_is_valid_send_recv_partial`` in Paddle's pp_utils/p2p_communication.py).
    """
    if declared == Transport.PARTIAL and num_tp_ranks > 1 and numel % num_tp_ranks == 0:
        return Transport.PARTIAL
    return Transport.FULL


def slice_range(numel: int, num_tp_ranks: int, tp_rank: int) -> tuple[int, int]:
    """The half-open range of flattened elements that ``partial`` sends from one TP rank."""
    share = numel // num_tp_ranks
    return tp_rank * share, (tp_rank + 1) * share
