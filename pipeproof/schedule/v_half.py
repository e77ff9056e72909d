"""V-Half."""

from __future__ import annotations

from pipeproof.schedule.building_block import BuildingBlock, repeated
from pipeproof.schedule.programs import Schedule


def v_half(num_ranks: int, num_micro_batches: int) -> Schedule:
    """x."""
    return repeated(BuildingBlock(num_ranks, num_ranks // 2 + 1, hop=2, turn=2), num_micro_batches)
