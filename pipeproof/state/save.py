"""Writing a state so that it appears whole or not at all.

Every rank writes its file, and what the index has to say of it, into one
directory beside the final one. When all have, one of them writes the index and
renames the directory. Whoever is killed before leaves the states that were
there as they were.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeproof import __version__
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.specs.own_layers import LayersSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.state.files import ByteArray, sync, write_file
from pipeproof.state.index import INDEX_FILE, ShardFile, StateIndex, TensorEntry, index_text
from pipeproof.state.layout import file_name, pieces_of, whole_state

_NOT_VALUES = ("steps", "replay", "device", "backend")
"""Keys of ``run`` that a run may have others of when it goes on: the framework is compared by itself."""
_OF_SCHEDULE = {
    "num_micro_batches", "micro_batch_size", "last_micro_batch_size", "seq_lengths", "num_sequence_splits"
}  # fmt: skip


def step_directory(root: Path, steps_done: int) -> Path:
    """Where the state after so many steps is."""
    return root / f"step-{steps_done:08d}"


def part_directory(root: Path, steps_done: int, job: str) -> Path:
    """Where it is written; ``job`` tells runs apart that save in one place."""
    return root / f".step-{steps_done:08d}.{job}.part"


def write_part(
    root: Path, steps_done: int, job: str, plan: LoweredPlan, rank: int, arrays: Mapping[tuple[str, str], ByteArray]
) -> None:
    """Write what one rank has to write of a state; ``arrays`` has all that it holds, by weight and slot."""
    mine = [piece for piece in pieces_of(plan, rank) if piece.writer == rank]
    directory, name = part_directory(root, steps_done, job), file_name(rank)
    directory.mkdir(parents=True, exist_ok=True)
    content = {}
    for piece in mine:
        array = arrays[piece.weight, piece.slot]
        assert array.dtype == piece.tensor.dtype, (piece.shard.tensor, array.dtype)
        content[piece.shard.tensor] = ByteArray(array.dtype, piece.shape, array.content)
    size, sha256 = write_file(directory / name, content)
    file = ShardFile(name=name, rank=rank, size_bytes=size, sha256=sha256, shards=tuple(piece.shard for piece in mine))
    (directory / f"rank{rank}.json").write_text(file.model_dump_json(exclude_none=True))


def finish_state(
    root: Path,
    steps_done: int,
    job: str,
    plan: LoweredPlan,
    digest: str,
    framework_version: str,
    *,
    from_beginning: bool = True,
) -> Path:
    """When every rank has written its part: write the index, and give the state its name; the directory.

    ``from_beginning`` says whether runs of this plan alone made it.

    Raises:
        OSError: a state of that name is there already, or the disk refuses.
    """
    directory, final = part_directory(root, steps_done, job), step_directory(root, steps_done)
    notes = [directory / f"rank{rank}.json" for rank in range(plan.mesh.num_ranks)]
    files = tuple(ShardFile.model_validate_json(note.read_bytes()) for note in notes)
    index = index_of_plan(
        plan,
        steps_done,
        digest=digest,
        from_beginning=from_beginning,
        versions={"pipeproof": __version__, plan.spec.run.backend: framework_version},
        tensors=whole_state(plan),
        files=files,
    )
    (directory / INDEX_FILE).write_text(index_text(index))
    sync(directory / INDEX_FILE)
    for note in notes:
        note.unlink()
    sync(directory)
    directory.rename(final)
    sync(root)
    return final


def index_of_plan(
    plan: LoweredPlan,
    steps_done: int,
    *,
    digest: str = "",
    from_beginning: bool = True,
    versions: Mapping[str, str] = MappingProxyType({}),
    tensors: Mapping[str, TensorEntry] = MappingProxyType({}),
    files: tuple[ShardFile, ...] = (),
) -> StateIndex:
    """The index of a state of a plan; to ``versions`` it adds those of what is running."""
    running = {"pipeproof": __version__, "numpy": np.__version__, "python": platform.python_version()}
    return StateIndex(
        pipeproof_state=1,
        steps_done=steps_done,
        digest=digest,
        from_beginning=from_beginning,
        framework=plan.spec.run.backend,
        versions={**versions, **running},
        mesh=dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
        values=values_of(plan.spec),
        tensors=dict(tensors),
        files=files,
    )


def remove_parts(root: Path, job: str) -> None:
    """Remove what a run of that name left unfinished."""
    for directory in root.glob(f".step-*.{job}.part"):
        shutil.rmtree(directory, ignore_errors=True)


def values_of(spec: PlanSpec) -> dict[str, Any]:
    """The plan's keys on which the values of training depend beside its graph, dotted."""
    run = {key: value for key, value in spec.run.model_dump(mode="json").items() if key not in _NOT_VALUES}
    own = spec.own_layers
    model = spec.model.model_dump(mode="json") if own is None else _of_own_layers(own)
    sections = {"model": model, "loss": spec.loss.model_dump(mode="json"), "run": run}
    sections["schedule"] = spec.schedule.model_dump(mode="json", include=_OF_SCHEDULE)
    sections["memory"] = {"shard_optimizer": spec.memory.shard_optimizer}
    return dict(_dotted("", sections))


def _of_own_layers(model: LayersSpec) -> dict[str, Any]:
    """What is declared of layers, by their places and names; where their file stands is no value."""
    layers: dict[str, Any] = {str(place): layer.name for place, layer in enumerate(model.layers)}
    for layer in model.layers:  # whose names begin with no digit
        about = layer.model_dump(mode="json", include={"kind", "out", "borrows"}, exclude_none=True)
        parameters = {weight.name: list(weight.shape) for weight in layer.parameters}
        buffers = {buffer.name: buffer.model_dump(mode="json", exclude={"name"}) for buffer in layer.buffers}
        layers[layer.name] = {**about, "parameters": parameters, "buffers": buffers}
    return {"kind": model.kind, "layers": layers}


def _dotted(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, inner in value.items() for pair in _dotted(f"{prefix}.{key}".lstrip("."), inner)]
