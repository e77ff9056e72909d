"""Which map goes with a convention of names, and what a person's own statements are held against."""

from __future__ import annotations

import json
from pathlib import Path

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.specs.finding import Finding
from pipeproof.specs.model import ModelSpec
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.mapping import StateMap
from pipeproof.state.names.config import CONFIG_FILE, config_of
from pipeproof.state.names.convention import model_of, written_names
from pipeproof.state.names.read import read_names
from pipeproof.state.names.tables import OURS
from pipeproof.state.reshard.goals import require_index
from pipeproof.state.reshard.meaning import prove_meaning
from pipeproof.state.reshard.refused import NOT_MADE_OF_IT, RefusedError
from pipeproof.state.reshard.sides import Side


def map_of_names(convention: str, source: Checkpoint, plan: LoweredPlan | None) -> StateMap:
    """A plan's tensors of a source's that are named by the convention, or without a plan the convention's tensors.

    Raises:
        PipeproofError: the convention has no names for the model, copies differ, or the source does not tell its model.
    """
    if plan is not None:
        return read_names(convention, source, plan.spec)
    return written_names(convention, source.tensors, _model(source, None), _dtype(source))


def require_other_names(convention: str, place: Path) -> None:
    """Refuse to read what pipeproof wrote under the names of others.

    Raises:
        RefusedError: the convention is another one than pipeproof's own.
    """
    if convention != OURS:
        message = f"the tensors of {place} have pipeproof's own names, and not those of `{convention}`"
        raise RefusedError(NOT_MADE_OF_IT, message, "leave `--names` out")


def files_beside(source: Checkpoint) -> dict[str, str]:
    """What Hugging Face's directories have beside the weights of a state: the model's configuration.

    Raises:
        PipeproofError: the source does not tell its model.
    """
    config = config_of(_model(source, None), _dtype(source))
    return {CONFIG_FILE: json.dumps(config, indent=2) + "\n"}


def findings_of_meaning(
    convention: str, claimed: StateMap, source: Checkpoint, plan: LoweredPlan | None, target: Side
) -> tuple[Finding, ...]:
    """Where a map of somebody's statements brings elements to others than those that mean the same.

    Raises:
        PipeproofError: as ``map_of_names``.
    """
    return prove_meaning(claimed, map_of_names(convention, source, plan), _model(source, plan), target)


def _dtype(source: Checkpoint) -> str:
    return next((entry.dtype for entry in source.tensors.values() if entry.kind == "weight"), "float32")


def _model(source: Checkpoint, plan: LoweredPlan | None) -> ModelSpec:
    if plan is not None:
        return plan.spec.model
    return model_of(require_index(source, "names are given by the model").values)
