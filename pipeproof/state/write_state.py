"""Writing a state that appears whole or not at all.

Every rank writes its file, and its entry of the index, into one directory next to the final one. When all are done, one
rank writes the index and renames the directory. If a run is killed before the rename, the states that existed are
untouched.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.foreign_text import read_foreign
from pipeproof.specs.custom_layers import CustomModelSpec
from pipeproof.specs.model import model_content
from pipeproof.specs.plan import PlanSpec
from pipeproof.state.byte_ranges import ByteArray, write_file
from pipeproof.state.state_index import (
    INDEX_FILE,
    MAX_BYTES,
    DataPosition,
    Shard,
    ShardFile,
    StateIndex,
    TensorEntry,
    index_text,
)
from pipeproof.state.state_layout import file_name, whole_state
from pipeproof.system_calls import sync
from pipeproof.version import __version__

_NOT_VALUES = ("steps", "replay", "device", "backend", "compiler", "deterministic")
"""Keys of ``run`` that may differ when a run is resumed: the framework is compared separately."""
_OF_SCHEDULE = {
    "num_micro_batches", "micro_batch_size", "last_micro_batch_size", "seq_lengths", "num_sequence_splits"
}  # fmt: skip


def step_directory(root: Path, steps_done: int) -> Path:
    """Return the directory of the state after so many steps."""
    return root / f"step-{steps_done:08d}"


def partial_directory(root: Path, steps_done: int, job: str) -> Path:
    """Return the directory that it is written to; ``job`` distinguishes runs that save below one root."""
    return root / f".step-{steps_done:08d}.{job}.part"


def write_rank_state(root: Path, steps_done: int, job: str, rank: int, arrays: Mapping[Shard, ByteArray]) -> None:
    """Write one rank's file of a state; ``arrays`` has the shards that this rank writes."""
    directory, name = partial_directory(root, steps_done, job), file_name(rank)
    directory.mkdir(parents=True, exist_ok=True)
    size, sha256 = write_file(directory / name, {shard.tensor: array for shard, array in arrays.items()})
    file = ShardFile(name=name, rank=rank, size_bytes=size, sha256=sha256, shards=tuple(arrays))
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
    data_before: DataPosition | None = None,
) -> Path:
    """Write the index when every rank has written its file, and give the state its name; return the directory.

    ``from_beginning`` is True if runs of this plan alone made the state; for ``data_before`` see ``StateIndex``.

    Raises:
        OSError: A state of that name exists, or the disk refuses.
    """
    directory, final = partial_directory(root, steps_done, job), step_directory(root, steps_done)
    entries = [directory / f"rank{rank}.json" for rank in range(plan.mesh.num_ranks)]
    files = tuple(ShardFile.model_validate_json(read_foreign(entry, MAX_BYTES)) for entry in entries)
    index = index_of_plan(
        plan,
        steps_done,
        digest=digest,
        from_beginning=from_beginning,
        data_before=data_before,
        versions={"pipeproof": __version__, plan.spec.run.backend: framework_version},
        tensors=whole_state(plan),
        files=files,
    )
    (directory / INDEX_FILE).write_text(index_text(index))
    sync(directory / INDEX_FILE)
    for entry in entries:
        entry.unlink()
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
    data_before: DataPosition | None = None,
    versions: Mapping[str, str] = MappingProxyType({}),
    tensors: Mapping[str, TensorEntry] = MappingProxyType({}),
    files: tuple[ShardFile, ...] = (),
) -> StateIndex:
    """Return the index of a state of a plan, with the versions of the running software added to ``versions``."""
    return StateIndex(
        pipeproof_state=1,
        steps_done=steps_done,
        digest=digest,
        from_beginning=from_beginning,
        data_before=data_before,
        framework=plan.spec.run.backend,
        versions={**versions, **running_versions()},
        mesh=dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
        values=values_of(plan.spec),
        tensors=dict(tensors),
        files=files,
    )


def running_versions() -> dict[str, str]:
    """Return the versions of the running software."""
    return {"pipeproof": __version__, "numpy": np.__version__, "python": platform.python_version()}


def remove_partial_states(root: Path, job: str) -> None:
    """Remove the unfinished states of a job."""
    for directory in root.glob(f".step-*.{job}.part"):
        shutil.rmtree(directory, ignore_errors=True)


def values_of(spec: PlanSpec) -> dict[str, Any]:
    """Return the plan's keys that the values of training depend on in addition to its graph, dotted."""
    run = {key: value for key, value in spec.run.model_dump(mode="json").items() if key not in _NOT_VALUES}
    model = _custom_layer_values(spec.custom) if spec.is_custom else model_content(spec.model)
    sections = {"model": model, "loss": spec.loss.model_dump(mode="json"), "run": run}
    sections["schedule"] = spec.schedule.model_dump(mode="json", include=_OF_SCHEDULE)
    sections["memory"] = {"shard_optimizer": spec.memory.shard_optimizer}
    return dict(_dotted("", sections))


def _custom_layer_values(model: CustomModelSpec) -> dict[str, Any]:
    layers: dict[str, Any] = {str(index): layer.name for index, layer in enumerate(model.layers)}
    for layer in model.layers:  # whose names begin with no digit
        values = layer.model_dump(mode="json", include={"kind", "out", "borrows"}, exclude_none=True)
        parameters = {weight.name: list(weight.shape) for weight in layer.parameters}
        layers[layer.name] = {**values, "parameters": parameters}
    return {"kind": model.kind, "layers": layers}


def _dotted(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    return [pair for key, inner in value.items() for pair in _dotted(f"{prefix}.{key}".lstrip("."), inner)]
