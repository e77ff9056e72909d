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
from typing import Any

import numpy as np

from pipeproof import __version__
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.specs.plan import PlanSpec
from pipeproof.state.files import ByteArray, sync, write_file
from pipeproof.state.index import INDEX_FILE, ShardFile, StateIndex, index_text
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
    backend = plan.spec.run.backend
    index = StateIndex(
        pipeproof_state=1,
        steps_done=steps_done,
        digest=digest,
        from_beginning=from_beginning,
        framework=backend,
        versions={
            "pipeproof": __version__,
            backend: framework_version,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        mesh=dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
        values=values_of(plan.spec),
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


def remove_parts(root: Path, job: str) -> None:
    """Remove what a run of that name left unfinished."""
    for directory in root.glob(f".step-*.{job}.part"):
        shutil.rmtree(directory, ignore_errors=True)


def values_of(spec: PlanSpec) -> dict[str, Any]:
    """The plan's keys on which the values of training depend beside its graph, dotted."""
    run = {key: value for key, value in spec.run.model_dump(mode="json").items() if key not in _NOT_VALUES}
    sections = {"model": spec.model.model_dump(mode="json"), "loss": spec.loss.model_dump(mode="json"), "run": run}
    sections["schedule"] = spec.schedule.model_dump(mode="json", include=_OF_SCHEDULE)
    sections["memory"] = {"shard_optimizer": spec.memory.shard_optimizer}
    return dict(_dotted("", sections))


def _dotted(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, inner in value.items() for pair in _dotted(f"{prefix}.{key}".lstrip("."), inner)]
