"""Files and events that the launcher and its workers exchange.

A job has a directory of its own, which is removed at its end. The launcher writes the plan there; workers write each
step's loss and gradients, then their op log. Events are JSON lines over a pipe: the launcher always knows the operation
of each rank. The worker's standard input is its lifeline: when it closes, the launcher is gone and the worker ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import numpy as np
from pydantic import TypeAdapter

from pipeproof.atomic_write import atomic_write
from pipeproof.comm.lower import from_here, schedule_path
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.foreign_text import open_foreign, read_foreign
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.verify.certificate import Certificate

_Value = TypeVar("_Value")
RankContent = Literal["log", "timing", "bare", "graphs", "checks", "edges"]
"""The op log; the clock of its times; idle messages; stages that do not run as graphs, with the reason; of a rehearsal,
checks with faults, and times of messages sent.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """Injected failure: ``rank`` fails at the operation ``op``; ``action`` is ``raise``, ``die`` or ``hang``."""

    rank: int
    op: str
    action: str


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options of checkpoints: states are saved below ``root`` after every ``every`` steps (None: only after the last).

    ``resume`` is the state to resume from, and ``first_step`` the step that follows it. With
    ``reference_from_state`` training from step 0 does not lead to that state's bits, so the reference starts from it.
    With ``by_paddle`` states are saved as Paddle's own checkpoints. ``data_before`` has the steps, sequences and tokens
    before the micro-batches of a step changed, if they did.
    """

    root: Path | None = None
    every: int | None = None
    resume: Path | None = None
    first_step: int = 0
    reference_from_state: bool = False
    by_paddle: bool = False
    data_before: Mapping[str, int | None] | None = None

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return True if the state after this step is to be saved."""
        if self.root is None:
            return False
        return step + 1 == num_steps or (self.every is not None and (step + 1) % self.every == 0)


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """Directory of the records (``run`` and ``reference`` below it), and whether they have layers and values."""

    directory: Path
    layers: bool = False
    values: bool = False


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run: the watchdog's seconds, the directory for worker output, an injected failure, profiling.

    With ``profile`` times are measured: idle messages before the first step, and the reference runs after the ranks.
    ``record`` has the directory and the detail of a record, None for no record. ``share_gpus`` allows fewer GPUs than
    ranks. ``checkpoint`` has the state to resume from, as the user named it, and the directory to save to. With
    ``rehearses`` only the communication is executed. Without ``timeline`` the report of a run without an external
    launcher has none: it would take memory for each step. ``watch`` is the directory of the rings for ``job hang``,
    None for none.
    """

    timeout_s: float = 60.0
    logs: Path | None = None
    fault: Fault | None = None
    unsafe: bool = False
    profile: bool = False
    record: RecordOptions | None = None
    share_gpus: bool = False
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    rehearses: bool = False
    timeline: bool = True
    watch: Path | None = None


@dataclass(frozen=True)
class Job:
    """One run: its plan, the certificate that each worker compares, and its files.

    ``options.checkpoint`` has the resolved state to resume from.
    """

    directory: Path
    plan: dict[str, Any]
    certificate: Certificate
    options: RunOptions = field(default_factory=RunOptions)

    @property
    def name(self) -> str:
        """Name of the run, equal on all hosts: a host's directory may have its own suffix."""
        return self.directory.name.partition(".")[0]

    @property
    def digest(self) -> str:
        """The graph digest of the plan."""
        return self.certificate.graph_digest

    @property
    def checkpoint(self) -> CheckpointOptions:
        """The state to resume from and the states to save."""
        return self.options.checkpoint

    @property
    def layers(self) -> bool:
        """True if the tensors between layers are recorded."""
        return self.options.record is not None and self.options.record.layers

    def save(self) -> None:
        """Write the job's description for its workers."""
        save_json(self.directory / "job.json", self, Job)

    @classmethod
    def load(cls, directory: Path) -> Job:
        """Read what ``save`` wrote."""
        return load_json(directory / "job.json", Job)

    def loaded_plan(self) -> LoadedPlan:
        """The job's plan, validated again."""
        return plan_from_dict(self.plan)

    def step_file(self, who: str, step: int) -> Path:
        """File of a step's loss and gradients of ``who``: ``rank0``, ``unpartitioned`` or ``ordered``."""
        return self.directory / f"{who}.step{step}.npz"

    def layers_file(self, who: str, step: int) -> Path:
        """File of the tensors between layers in a step, of ``rank0`` or ``reference``."""
        return self.directory / f"{who}.layers{step}.npz"

    def weights_file(self, rank: int, step: int) -> Path:
        """File of the weights with which a rank begins a step, if the reference starts from them."""
        return self.directory / f"rank{rank}.weights{step}.npz"

    def rank_file(self, rank: int, content: RankContent) -> Path:
        """File that a rank writes once, after its steps or before them."""
        return self.directory / f"rank{rank}.{content}.json"

    def logs(self, num_ranks: int) -> dict[int, list[LogEntry]]:
        """Read the op logs of all ranks."""
        return {rank: [*LogFile(self.rank_file(rank, "log"))] for rank in range(num_ranks)}


def save_json(path: Path, value: object, form: Any) -> None:
    """Write a dataclass, or a list or mapping of such, for ``load_json`` with the same type.

    The file appears whole or not at all: the first rank of a host reads the logs of the others once they exist.
    """
    with atomic_write(path) as new:
        new.write_bytes(TypeAdapter(form).dump_json(value))


_MOST_BYTES = 2**30


def load_json(path: Path, form: type[_Value]) -> _Value:
    """Read what ``save_json`` wrote."""
    return TypeAdapter(form).validate_json(read_foreign(path, _MOST_BYTES))


class LogWriter:
    """Writer of a rank's op log without memory for earlier steps; the file appears when it is whole.

    The file is a JSON list of entries, with a line for each step: ``LogFile`` reads step by step.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._new = path, path.with_name(f"{path.name}.part")
        self._stream = self._new.open("wb")
        self._stream.write(b"[\n")
        self._separator = b""

    def write(self, entries: list[LogEntry]) -> None:
        """Write the entries of a step."""
        if entries:
            self._stream.write(self._separator + _ENTRIES.dump_json(entries)[1:-1] + b"\n")
            self._separator = b","

    def finish(self) -> None:
        """End the file."""
        self._stream.write(b"]\n")
        self._stream.close()
        self._new.replace(self._path)


@dataclass(frozen=True, slots=True)
class LogFile:
    """Op log of a rank in its file; each iteration reads it again, a line at a time."""

    path: Path

    def __iter__(self) -> Iterator[LogEntry]:
        """Yield the entries in the order of the log."""
        with open_foreign(self.path) as lines:
            for line in lines:
                yield from _ENTRIES.validate_json(b"[" + line.strip(b"[],\n") + b"]")


_ENTRIES = TypeAdapter(list[LogEntry])


def end_process(status: int, message: str = "") -> NoReturn:
    """Write the pending output and a message on standard error if possible, then end this process.

    A framework's threads would block a normal exit when a peer is gone.
    """
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        sys.stderr.write(message)
        sys.stderr.flush()
    os._exit(status)


def dump_plan(loaded: LoadedPlan) -> dict[str, Any]:
    """Return a plan as JSON data that loads to an equal plan in a process with any working directory."""
    content = loaded.spec.model_dump(mode="json")
    if loaded.spec.schedule.path is not None:
        content["schedule"]["path"] = str(schedule_path(loaded).resolve())
    local_spec = from_here(loaded).spec
    if local_spec.cost.profile is not None:
        content["cost"]["profile"] = str(Path(str(local_spec.cost.profile)).resolve())
    if local_spec.model.moe is not None and local_spec.model.moe.hash_tables is not None:
        content["model"]["moe"]["hash_tables"]["path"] = str(Path(local_spec.model.moe.hash_tables.path).resolve())
    return content


Loss: TypeAlias = "np.floating[Any]"
"""A loss as a scalar of the run's dtype, whose bits can be compared; several losses are a vector."""

_LOSS, _NOT_FINITE, _ROUTERS = "/loss", "/not_finite", "/routers/"
"""Keys of a step file, the last one a prefix; no parameter's name begins with a slash."""


@dataclass(slots=True)
class StepOutcome:
    """Result of a step on one rank or of a reference: its loss, its gradients (or shards of them), its router values.

    Only the last stage has a loss. ``not_finite`` is the first operation whose loss is not finite, if there is one.
    """

    loss: Loss | None = None
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)
    routers: Mapping[str, np.ndarray] = field(default_factory=dict)
    not_finite: str = ""

    def save(self, path: Path) -> None:
        """Write a step file, which appears whole or not at all."""
        arrays: dict[str, Any] = {
            **self.gradients,
            **{f"{_ROUTERS}{key}": value for key, value in self.routers.items()},
        }
        if self.loss is not None:
            arrays[_LOSS] = np.asarray(self.loss)
        if self.not_finite:
            arrays[_NOT_FINITE] = np.asarray(self.not_finite)
        save_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path) -> StepOutcome:
        """Read what ``save`` wrote."""
        arrays: Mapping[str, Any] = load_arrays(path)
        return cls(
            arrays[_LOSS][()] if _LOSS in arrays else None,
            {name: array for name, array in arrays.items() if not name.startswith("/")},
            {name.removeprefix(_ROUTERS): array for name, array in arrays.items() if name.startswith(_ROUTERS)},
            str(arrays.get(_NOT_FINITE, "")),
        )


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name; the file appears whole or not at all."""
    with atomic_write(path) as new, new.open("wb") as stream:
        np.savez(stream, **arrays)


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what ``save_arrays`` wrote."""
    with open_foreign(path) as stream, np.load(stream) as arrays:
        return {name: arrays[name] for name in arrays.files}


class EventSink:
    """Sink of a worker's events, to which several threads may send."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, kind: str, **content: Any) -> None:
        """Write one event as a line."""
        if kind == "at":  # before every operation: the JSON encoder is ten times as slow
            line = f'{{"kind":"at","step":{content["step"]},"op":{content["op"]}}}\n'
        else:
            line = json.dumps({"kind": kind, **content}, separators=(",", ":")) + "\n"
        with self._lock:
            os.write(self._fd, line.encode())
