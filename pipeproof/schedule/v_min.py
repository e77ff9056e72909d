"""V-Min."""

from __future__ import annotations

from pipeproof.schedule.building_block import BuildingBlock, repeated
from pipeproof.schedule.programs import Schedule


def v_min(num_ranks: int, num_micro_batches: int) -> Schedule:
    """x."""
    return repeated(BuildingBlock(num_ranks, (num_ranks + 4) // 3, hop=1, turn=1), num_micro_batches)
