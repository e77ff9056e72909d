"""Which map goes with what was asked: AOA statements, a convention of names, both or neither."""

from __future__ import annotations

import json
from pathlib import Path

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.specs.finding import Finding
from pipeproof.specs.model import ModelSpec
from pipeproof.state.aoa.engine import map_of
from pipeproof.state.aoa.meta import TensorMeta
from pipeproof.state.aoa.read import read_statements
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.mapping import StateMap
from pipeproof.state.names.config import CONFIG_FILE, config_of
from pipeproof.state.names.convention import model_of, written_names
from pipeproof.state.names.read import read_names
from pipeproof.state.reshard.goals import require_index
from pipeproof.state.reshard.meaning import prove_meaning
from pipeproof.state.reshard.sides import Side


def map_of_names(convention: str, source: Checkpoint, plan: LoweredPlan | None) -> StateMap:
    """A plan's tensors of a source's that are named by the convention, or without a plan the convention's tensors.

    Raises:
        PipeproofError: the convention has no names for the model, copies differ, or the source does not tell its model.
    """
    if plan is not None:
        return read_names(convention, source, plan.spec)
    return written_names(convention, source.tensors, _model(source, None), _dtype(source))


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


def map_of_statements(file: Path, source: dict[str, TensorMeta], target: dict[str, TensorMeta] | None) -> StateMap:
    """The map that AOA statements in a file say.

    Raises:
        PipeproofError: a statement cannot be read, or does not fit.
        OSError: the file cannot be read.
    """
    return map_of(read_statements(file.read_text(), str(file)), source, target)


def _dtype(source: Checkpoint) -> str:
    return next((entry.dtype for entry in source.tensors.values() if entry.kind == "weight"), "float32")


def _model(source: Checkpoint, plan: LoweredPlan | None) -> ModelSpec:
    if plan is not None:
        return plan.spec.model
    return model_of(require_index(source, "names are given by the model").values)
