"""What the launcher and its workers say to each other: the job's files and the stream of events.

A job has a directory of its own, removed at its end. The launcher writes the
plan there; workers write each step's loss and gradients, then their op log.
Events go as JSON lines over a pipe, so that the launcher always knows what
each rank is at; the worker's standard input is its lifeline: when it closes,
the launcher is gone and the worker ends.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from pipeproof.comm.loaded import absolute_build, from_here, schedule_path
from pipeproof.exec.kept import KeptState
from pipeproof.specs.load import LoadedPlan, plan_from_dict


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted failure, to rehearse what happens: ``action`` is ``raise``, ``die`` or ``hang``."""

    rank: int
    op: str
    action: str


@dataclass(frozen=True)
class Job:
    """One run: its plan, the digest it must have, and where its files are.

    ``profile`` asks for times: bare messages before the first step, and the reference only after the ranks.
    ``layers`` asks for what crosses the borders between layers. With ``share_gpus`` there may be fewer GPUs than ranks.
    ``kept`` says what state to go on from, and to save.
    """

    directory: Path
    plan: dict[str, Any]
    digest: str
    fault: Fault | None = None
    profile: bool = False
    layers: bool = False
    share_gpus: bool = False
    kept: KeptState = field(default_factory=KeptState)

    def save(self) -> None:
        """Write the job's description for its workers."""
        content = {
            "plan": self.plan,
            "digest": self.digest,
            "fault": asdict(self.fault) if self.fault else None,
            "profile": self.profile,
            "layers": self.layers,
            "share_gpus": self.share_gpus,
            "kept": self.kept.to_json(),
        }
        (self.directory / "job.json").write_text(json.dumps(content))

    @classmethod
    def load(cls, directory: Path) -> Job:
        """Read what ``save`` wrote."""
        content = json.loads((directory / "job.json").read_text())
        fault = Fault(**content["fault"]) if content["fault"] else None
        asked = {key: content[key] for key in ("profile", "layers", "share_gpus")}
        kept = KeptState.from_json(content["kept"])
        return cls(directory, content["plan"], content["digest"], fault, **asked, kept=kept)

    def loaded_plan(self) -> LoadedPlan:
        """The job's plan, validated again."""
        return plan_from_dict(self.plan)

    def step_file(self, who: str, step: int) -> Path:
        """Where ``who`` (``rank0``, ``uncut``, ``ordered``) leaves a step's loss and gradients."""
        return self.directory / f"{who}.step{step}.npz"

    def layers_file(self, who: str, step: int) -> Path:
        """Where ``who`` (``rank0``, ``reference``) leaves what crossed the borders between layers in a step."""
        return self.directory / f"{who}.layers{step}.npz"

    def weights_file(self, rank: int, step: int) -> Path:
        """Where a rank leaves the weights that it begins a step with, where the reference takes them."""
        return self.directory / f"rank{rank}.weights{step}.npz"

    def log_file(self, rank: int) -> Path:
        """Where a rank leaves its op log."""
        return self.directory / f"rank{rank}.log.json"

    @property
    def own_file(self) -> Path:
        """Where it stands what was found when own layers were tried."""
        return self.directory / "own_layers.json"

    def timing_file(self, rank: int) -> Path:
        """Where a rank leaves what its times are of."""
        return self.directory / f"rank{rank}.timing.json"

    def bare_file(self, rank: int) -> Path:
        """Where a rank leaves the times of its bare messages."""
        return self.directory / f"rank{rank}.bare.json"


def dump_plan(loaded: LoadedPlan) -> dict[str, Any]:
    """A plan as JSON data that loads to an equal plan, wherever the process that loads it is."""
    content = loaded.spec.model_dump(mode="json")
    if loaded.spec.schedule.path is not None:
        content["schedule"]["path"] = str(schedule_path(loaded).resolve())
    if loaded.spec.cost.profile is not None:
        content["cost"]["profile"] = str(Path(str(from_here(loaded).spec.cost.profile)).resolve())
    if loaded.spec.own_layers is not None:
        content["model"]["build"] = absolute_build(loaded)
    return content


Loss: TypeAlias = "np.floating[Any]"
"""A loss as a scalar of the run's dtype, so that its bits can be compared; of several losses a vector (``losses``)."""

LOSS_KEY = "/loss"
"""The loss beside the gradients in a step file; no parameter's name begins with a slash."""

NOT_FINITE_KEY = "/not_finite"
"""The first operation whose loss is no number, in a step file."""

ROUTERS_KEY = "/routers/"
"""With what the name of each thing that routers have to show begins in a step file."""


def save_step(
    path: Path,
    loss: Loss | None,
    gradients: Mapping[str, np.ndarray],
    routers: Mapping[str, np.ndarray] = MappingProxyType({}),
    not_finite: str = "",
) -> None:
    """Write a step's loss (None where this rank has none), gradients, and what its routers have to show.

    ``not_finite`` is the first operation whose loss is no number.

    The file appears whole or not at all.
    """
    arrays: dict[str, Any] = {**gradients, **{f"{ROUTERS_KEY}{name}": array for name, array in routers.items()}}
    if loss is not None:
        arrays[LOSS_KEY] = np.asarray(loss)
    if not_finite:
        arrays[NOT_FINITE_KEY] = np.asarray(not_finite)
    save_arrays(path, arrays)


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name; the file appears whole or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as stream:
        np.savez(stream, **arrays)
    part.rename(path)


def load_step(path: Path) -> tuple[Loss | None, dict[str, np.ndarray]]:
    """Read the loss and the gradients that ``save_step`` wrote."""
    with np.load(path) as arrays:
        gradients = {name: arrays[name] for name in arrays.files if not name.startswith("/")}
        loss = arrays[LOSS_KEY][()] if LOSS_KEY in arrays.files else None
    return loss, gradients


def load_not_finite(path: Path) -> str:
    """Read the operation that ``save_step`` wrote; nothing where every loss is a number."""
    with np.load(path) as arrays:
        return str(arrays[NOT_FINITE_KEY]) if NOT_FINITE_KEY in arrays.files else ""


def load_routers(path: Path) -> dict[str, np.ndarray]:
    """Read what ``save_step`` wrote of routers."""
    with np.load(path) as arrays:
        return {name.removeprefix(ROUTERS_KEY): arrays[name] for name in arrays.files if name.startswith(ROUTERS_KEY)}


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what ``save_arrays`` wrote."""
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


class EventSink:
    """Where a worker tells what it is at. Events may come from several threads."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, kind: str, **content: Any) -> None:
        """Write one event as a line."""
        line = json.dumps({"kind": kind, **content}, separators=(",", ":")) + "\n"
        with self._lock:
            os.write(self._fd, line.encode())
