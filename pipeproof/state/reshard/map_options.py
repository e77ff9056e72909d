"""Maps that options of a reshard request: of a convention of names, or of a file of AOA statements."""

from __future__ import annotations

import json
from pathlib import Path

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import Finding
from pipeproof.specs.model import ModelSpec
from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.aoa.read_statements import read_file
from pipeproof.state.aoa.tensor_families import metas_of_checkpoint, metas_of_plan
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.names.convention import OWN_NAMES
from pipeproof.state.names.convention_maps import map_from_convention, map_to_convention, model_of
from pipeproof.state.names.hf_config import CONFIG_FILE, config_of
from pipeproof.state.reshard.meaning_proof import prove_meaning
from pipeproof.state.reshard.reshard_codes import NOT_CONVERTIBLE, RefusedError
from pipeproof.state.reshard.reshard_targets import require_index, without_optimizer_state
from pipeproof.state.reshard.shard_layout import ShardLayout
from pipeproof.state.state_layout import whole_state
from pipeproof.state.tensor_map import StateMap


def map_of_names(convention: str, source: Checkpoint, plan: LoweredPlan | None) -> StateMap:
    """Return the map from a source under the convention's names to a plan's tensors.

    Without a plan, to the convention's.

    Raises:
        PipeproofError: The convention has no names for the model, tied copies differ, or the source does not describe
            its model.
    """
    if plan is not None:
        return map_from_convention(convention, source, plan.spec)
    return map_to_convention(convention, source.tensors, _model(source, None), _dtype(source))


def require_other_names(convention: str, place: Path) -> None:
    """Refuse to read pipeproof's own output under the names of other tools.

    Raises:
        RefusedError: The convention is not pipeproof's own.
    """
    if convention != OWN_NAMES:
        message = f"the tensors of {place} have pipeproof's own names, and not those of `{convention}`"
        raise RefusedError(NOT_CONVERTIBLE, message, "leave `--names` out")


def config_files(source: Checkpoint) -> dict[str, str]:
    """Return the files that Hugging Face directories have next to a model's weights: the model's configuration.

    Raises:
        PipeproofError: The source does not describe its model.
    """
    config = config_of(_model(source, None), _dtype(source))
    return {CONFIG_FILE: json.dumps(config, indent=2) + "\n"}


def meaning_findings(
    convention: str, claimed: StateMap, source: Checkpoint, plan: LoweredPlan | None, target: ShardLayout
) -> tuple[Finding, ...]:
    """Return where a map of user-written statements moves elements to ones of another meaning.

    Raises:
        PipeproofError: As ``map_of_names``.
    """
    return prove_meaning(claimed, map_of_names(convention, source, plan), _model(source, plan), target)


def _dtype(source: Checkpoint) -> str:
    return next((entry.dtype for entry in source.tensors.values() if entry.kind == "weight"), "float32")


def _model(source: Checkpoint, plan: LoweredPlan | None) -> ModelSpec:
    if plan is not None:
        return plan.spec.gpt
    return model_of(require_index(source, "names depend on the model").values)


def map_of_statements(file: Path, source: Checkpoint, plan: LoweredPlan | None, *, weights_only: bool) -> StateMap:
    """Return the map to a plan's tensors, or without a plan to all tensors that the statements make.

    Raises:
        AoaError: The file or a statement cannot be read, or a statement does not match the tensors.
    """
    before, after = metas_of_checkpoint(source), None if plan is None else metas_of_plan(plan)
    if weights_only:
        before = {name: before[name] for name in without_optimizer_state(source.tensors)}
    if weights_only and plan is not None and after is not None:
        after = {name: after[name] for name in without_optimizer_state(whole_state(plan))}
    return program_map(read_file(file), before, after)
