"""What a reshard is to make, as a checkpoint of Paddle's: the same parts under Paddle's names, and its metadata."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from pipeproof.specs.finding import Finding, PipeproofError, Severity
from pipeproof.state.flex.codes import NOT_AS_FLEX
from pipeproof.state.flex.metadata import FlexPart, metadata_of
from pipeproof.state.flex.names import key_of, stored_shape
from pipeproof.state.index import Shard, TensorEntry
from pipeproof.state.reshard.goals import Goal

METADATA_FILE = "0.metadata"


def as_flex(goal: Goal) -> Goal:
    """A goal of a plan's state, with files that Paddle's ranks would write.

    Raises:
        PipeproofError: the plan runs on another framework.
    """
    assert goal.index is not None, "asked for states of plans alone"
    if goal.index.framework != "paddle":
        raise PipeproofError(
            Finding(
                NOT_AS_FLEX.code,
                Severity.ERROR,
                f"the plan runs on {goal.index.framework}, whose optimizers keep other numbers than Paddle's",
                help="leave out `--save-format flex`: a state's files are safetensors, too",
            )
        )
    target = goal.target
    keys = {name: key_of(name, entry) for name, entry in target.tensors.items()}
    names = {name: f"{target.ranks[name]}_0.safetensors" for name in target.files}
    files = {names[name]: shards for name, shards in target.files.items()}
    parts = [
        _part(keys[shard.tensor], target.tensors[shard.tensor], shard, file)
        for file, shards in files.items()
        for shard in shards
    ]
    ranks = {names[name]: rank for name, rank in target.ranks.items()}
    beside = {**goal.beside, METADATA_FILE: metadata_of(parts)}
    return replace(goal, target=replace(target, files=files, ranks=ranks, keys=keys), beside=MappingProxyType(beside))


def _part(key: str, entry: TensorEntry, shard: Shard, file: str) -> FlexPart:
    extents = stored_shape(entry, shard.extents)
    offsets = shard.offsets if shard.extents else (0,) * len(extents)
    return FlexPart(key, offsets, extents, shard.flat, entry.dtype, stored_shape(entry, entry.shape), file)
