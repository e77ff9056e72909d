"""The kind of link between two ranks, from the facts of their places; an unknown link is called unknown."""

from __future__ import annotations

from enum import StrEnum
from itertools import takewhile

from pipeproof.exec.placement.rank_placement import GpuPlace, RankPlacement


class LinkKind(StrEnum):
    """Kinds of links, from the fastest on; the text is that of tables."""

    SAME_GPU = "one GPU"
    NVLINK = "NVLink"
    PCIE = "PCIe of one host"
    HOST = "one host"
    """Between processes without GPUs, or whose GPUs' links are unknown."""
    SWITCH = "one switch"
    HIGHER_SWITCH = "several switches"
    BEYOND = "no common switch"
    BETWEEN_HOSTS = "between hosts"
    """Nothing is known about the network between them."""
    UNKNOWN = "unknown"
    """Not even the host of one of them is known to be, or not to be, that of the other."""


BETWEEN = frozenset(
    {LinkKind.SWITCH, LinkKind.HIGHER_SWITCH, LinkKind.BEYOND, LinkKind.BETWEEN_HOSTS, LinkKind.UNKNOWN}
)
"""Kinds that are not inside a host or an NVLink domain."""


def shared_depth(first: RankPlacement, second: RankPlacement) -> int:
    """Number of levels of the network, from its top on, that two places share."""
    pairs = zip(first.switches, second.switches, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def link_kind(first: RankPlacement, second: RankPlacement) -> LinkKind:
    """Kind of the link between two processes."""
    gpus = first.gpu, second.gpu
    if gpus[0] is not None and gpus[1] is not None:
        if gpus[0].uuid and gpus[0].uuid == gpus[1].uuid:
            return LinkKind.SAME_GPU
        if gpus[0].domain and gpus[0].domain == gpus[1].domain:
            return LinkKind.NVLINK
    if bool(first.boot_id) != bool(second.boot_id):
        return LinkKind.UNKNOWN
    if first.host_key == second.host_key:
        return _inside_host(*gpus)
    if not (first.switches and second.switches):
        return LinkKind.BETWEEN_HOSTS
    depth = shared_depth(first, second)
    if depth == len(first.switches) == len(second.switches):
        return LinkKind.SWITCH
    return LinkKind.HIGHER_SWITCH if depth else LinkKind.BEYOND


def _inside_host(first: GpuPlace | None, second: GpuPlace | None) -> LinkKind:
    if first is None or second is None:
        return LinkKind.HOST
    if second.uuid in first.nvlinks or first.uuid in second.nvlinks:
        return LinkKind.NVLINK
    return LinkKind.PCIE if second.uuid in first.pcie or first.uuid in second.pcie else LinkKind.HOST
