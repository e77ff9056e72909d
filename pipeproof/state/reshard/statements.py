"""The map that a file of AOA statements says, between a checkpoint and what a plan saves of it."""

from __future__ import annotations

from pathlib import Path

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.state.aoa.engine import map_of
from pipeproof.state.aoa.meta import metas_of_checkpoint, metas_of_plan
from pipeproof.state.aoa.read import read_file
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.layout import whole_state
from pipeproof.state.mapping import StateMap
from pipeproof.state.reshard.goals import of_weights


def map_of_statements(file: Path, source: Checkpoint, plan: LoweredPlan | None, *, weights_only: bool) -> StateMap:
    """A plan's tensors of a source's, or without a plan whatever the statements make.

    Raises:
        AoaError: the file or a statement cannot be read, or a statement does not fit.
    """
    before, after = metas_of_checkpoint(source), None if plan is None else metas_of_plan(plan)
    if weights_only:
        before = {name: before[name] for name in of_weights(source.tensors)}
    if weights_only and plan is not None and after is not None:
        after = {name: after[name] for name in of_weights(whole_state(plan))}
    return map_of(read_file(file), before, after)
