"""What a reshard is to make of a checkpoint: the files, what is in them, and of what that is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.specs.finding import Finding
from pipeproof.state.boxes import whole_box
from pipeproof.state.checkpoint import INDEX_KEY, Checkpoint
from pipeproof.state.codes import StateError
from pipeproof.state.index import Shard, StateIndex, TensorEntry, index_text
from pipeproof.state.layout import buffer_of_copies, files_of, whole_state, words_of_copies
from pipeproof.state.mapping import StateMap, identity_map
from pipeproof.state.reshard.move import Target
from pipeproof.state.reshard.padding import as_if_padded, padded_map
from pipeproof.state.reshard.refused import NOT_MADE_OF_IT, RefusedError
from pipeproof.state.reshard.sides import Side, side_of_files
from pipeproof.state.save import index_of_plan
from pipeproof.state.seal import SEAL_KEY, UNSEALED
from pipeproof.state.training import require_same_training

_OF_OPTIMIZER = ("moment", "counter")
_ONE_FILE = "model.safetensors"
"""What a file with everything is called until it gets its own name, which may be any."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is to be made: the target, how it is made of the source, and the target as the proof looks at it.

    ``index`` is that of a state, still without files; a merged file has none beside it, and is ``one_file``.
    ``beside`` are further files of a directory, by name.
    """

    target: Target
    state_map: StateMap
    side: Side
    index: StateIndex | None = None
    one_file: str | None = None
    beside: Mapping[str, str | bytes] = field(default_factory=lambda: MappingProxyType({}))


def has_steps(source: Checkpoint) -> bool:
    """Whether a checkpoint is of a training, and not of weights alone."""
    return source.index is not None and source.index.steps_done > 0


def goal_of_plan(
    source: Checkpoint, plan: LoweredPlan, name: str, digest: str, named: StateMap | None, *, weights_only: bool
) -> Goal:
    """A state as runs of a plan save it.

    ``named`` makes the plan's tensors of those of the source, where these have other names; ``digest`` is the plan's.

    Raises:
        StateError: the source is of another training.
        RefusedError: copies of a stage change buffers of own layers.
        PipeproofError: vocabularies differ in more than their padding.
    """
    require_one_of_each(plan)
    index = source.index
    if index is not None:
        padded = _as_if_padded(index, plan)
        require_same_training(_without_steps(padded) if weights_only else padded, plan, digest)
    tensors = of_weights(whole_state(plan)) if weights_only else whole_state(plan)
    if named is None:
        kept = of_weights(source.tensors) if weights_only else source.tensors
        named = padded_map(kept, {} if index is None else index.values, plan.spec.model)
    if weights_only:
        named = replace(named, removed=named.removed | (source.tensors.keys() - of_weights(source.tensors).keys()))
    files = {
        file: tuple(shard for shard in shards if shard.tensor in tensors) for file, shards in files_of(plan).items()
    }
    ranks = {file: rank for rank, file in enumerate(files)}
    made = index_of_plan(
        plan,
        0 if weights_only or index is None else index.steps_done,
        digest=digest,
        from_beginning=index is not None and not weights_only and index.from_beginning and index.digest == digest,
        versions={} if index is None else index.versions,
        tensors=tensors,
    )
    return Goal(Target(files, tensors, ranks), named, side_of_files(name, tensors, files, ranks, plan), made)


def training_faults(plan: LoweredPlan, other: LoweredPlan, *, weights_only: bool) -> tuple[Finding, ...]:
    """Why training by the plan ``other`` does not go on from states that runs of ``plan`` save; nothing if it does."""
    saved = index_of_plan(plan, 0 if weights_only else 1)
    try:
        require_same_training(_as_if_padded(saved, other), other)
    except StateError as error:
        return error.findings
    return ()


def goal_of_file(source: Checkpoint, out: Path, named: StateMap | None, *, weights_only: bool) -> Goal:
    """One file with every tensor whole; under the source's names, of a state, it can be made a state again.

    ``named`` makes the file's tensors of those of the source, where they are to have other names.
    """
    metadata = {"format": "pt", SEAL_KEY: UNSEALED}
    kept = of_weights(source.tensors) if weights_only else dict(source.tensors)
    if named is None:
        entries = {name: entry.model_copy(update={"cut": None}) for name, entry in kept.items()}
        state_map = identity_map(entries)
        if source.index is not None:
            index = _without_steps(source.index) if weights_only else source.index
            index = index.model_copy(update={"tensors": entries, "files": ()})
            metadata[INDEX_KEY] = index_text(index, indent=None)
    else:
        state_map = named
        entries = {
            name: TensorEntry(kind="weight", dtype=one.dtype, shape=one.shape) for name, one in named.tensors.items()
        }
    state_map = replace(state_map, removed=state_map.removed | (source.tensors.keys() - kept.keys()))
    shards = tuple(_whole(name, entry) for name, entry in sorted(entries.items()))
    target = Target({_ONE_FILE: shards}, entries, {_ONE_FILE: 0}, MappingProxyType(metadata))
    return Goal(target, state_map, side_of_files(str(out), entries, {out.name: shards}, {}), one_file=_ONE_FILE)


def require_one_of_each(plan: LoweredPlan) -> None:
    """Refuse a plan of whose state there are several: each copy of a stage changes the buffers of its layers.

    Raises:
        RefusedError: it is one.
    """
    buffer = buffer_of_copies(plan)
    if buffer is not None:
        raise RefusedError(NOT_MADE_OF_IT, *words_of_copies(buffer, plan.spec.schedule.kind))


def require_index(source: Checkpoint, what: str, mend: str = "give the plan of the model: `--to PLAN`") -> StateIndex:
    """The index of a checkpoint that needs one.

    Raises:
        RefusedError: it has none.
    """
    if source.index is None:
        raise RefusedError(NOT_MADE_OF_IT, f"{source.place} does not say of which model it is, and {what}", mend)
    return source.index


def _as_if_padded(index: StateIndex, plan: LoweredPlan) -> StateIndex:
    return index.model_copy(update={"values": as_if_padded(index.values, plan.spec.model)})


def _without_steps(index: StateIndex) -> StateIndex:
    return index.model_copy(update={"steps_done": 0, "from_beginning": False, "tensors": of_weights(index.tensors)})


def weights_of_side(side: Side) -> Side:
    """A side without what the optimizer keeps."""
    tensors = of_weights(side.tensors)
    return replace(side, tensors=tensors, parts={name: side.parts[name] for name in tensors})


def of_weights(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Without what the optimizer keeps."""
    return {name: entry for name, entry in tensors.items() if entry.kind not in _OF_OPTIMIZER}


def _whole(name: str, entry: TensorEntry) -> Shard:
    offsets, extents = whole_box(entry.shape)
    return Shard(tensor=name, offsets=offsets, extents=extents)
