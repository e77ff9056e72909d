"""The job that a job file starts: hosts, ranks, the two steps, and placeholders for values that no plan has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal, Self

from pipeproof.specs.load_plan import LoadedPlan

DEFAULT_RANKS_PER_HOST = 8
"""For a plan with more ranks than this; a smaller plan is on one host."""

HOST_0_PORT = 29500
"""Port where hosts meet for the rehearsal; the training uses the next one, so that no rank meets the old store."""


class Placeholder(str):
    """Text ``FILL_IN_<name>`` that the user replaces; ``meaning`` is a noun phrase for the user."""

    __slots__ = ("meaning",)
    meaning: str

    def __new__(cls, name: str, meaning: str) -> Self:
        """Make the text of the placeholder."""
        text = super().__new__(cls, f"FILL_IN_{name}")
        text.meaning = meaning
        return text


IMAGE = Placeholder("IMAGE", "container image with pipeproof and the framework of the plan")
WORK_DIR = Placeholder("WORK_DIR", "directory on every host (or in the image) that the paths in this file start from")


@dataclass(frozen=True, slots=True)
class JobFile:
    """Text of a job file, and its placeholders in the order of the file."""

    text: str
    placeholders: tuple[Placeholder, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """A plan on hosts with ``ranks_per_host`` processes each; ``script`` trains in the place of ``pipeproof run``."""

    plan: str
    backend: Literal["paddle", "torch"]
    on_gpus: bool
    num_ranks: int
    ranks_per_host: int
    script: str | None = None
    options: tuple[str, ...] = ()
    """Options with which the plan is read, as words of a command."""
    backend_position: str = "the plan"
    """Position of ``run.backend``, for messages."""

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.num_ranks // self.ranks_per_host

    @property
    def name(self) -> str:
        """Name of the job: a DNS label made from the name of the plan file, short enough for the names of pods."""
        label = re.sub(r"[^a-z0-9]+", "-", PurePath(self.plan).stem.lower()).strip("-")
        return (label if label[:1].isalpha() else f"plan-{label}")[:40].strip("-")

    @property
    def rehearsal(self) -> tuple[str, ...]:
        """Words of the rehearsal's command."""
        return ("pipeproof", "rehearse", self.plan, *self.options)

    @property
    def training(self) -> tuple[str, ...]:
        """Words of the training's command: a script alone, or ``pipeproof`` with arguments."""
        return ("pipeproof", "run", self.plan, *self.options) if self.script is None else (self.script,)


def python_words(words: Sequence[str]) -> tuple[str, ...]:
    """Words for a Python interpreter that run a script, or ``pipeproof`` as a module."""
    return ("-m", *words) if words[0] == "pipeproof" else tuple(words)


def job_of_plan(
    loaded: LoadedPlan,
    plan: str,
    ranks_per_host: int | None,
    script: str | None,
    options: Sequence[str] = (),
) -> Job:
    """Return the job of a plan file that is read with ``options``; without ``ranks_per_host``, the default or one host.

    Raises:
        ValueError: the hosts would not have the same number of ranks; the message has the position and a remedy.
    """
    num_ranks, run = loaded.spec.topology.num_ranks, loaded.spec.run
    chosen = min(DEFAULT_RANKS_PER_HOST, num_ranks) if ranks_per_host is None else ranks_per_host
    if num_ranks % chosen:
        fitting = max(count for count in range(1, min(chosen, num_ranks) + 1) if num_ranks % count == 0)
        position = _position(loaded, "topology")
        raise ValueError(
            f"{chosen} per host do not divide the plan's {num_ranks} ranks ({position}): use {fitting}, on "
            f"{_hosts(num_ranks // fitting)}, or change the topology"
        )
    return Job(
        plan, run.backend, run.device == "gpu", num_ranks, chosen, script, tuple(options),
        _position(loaded, "run", "backend"),
    )  # fmt: skip


def header(job: Job, start: str, placeholders: Sequence[Placeholder]) -> str:
    """Comment lines at the top of a job file; ``start`` is the command that submits or starts it."""
    trains = "`pipeproof run`" if job.script is None else "the script"
    lines = [
        f"Job {job.name}, by `pipeproof job file`: {job.num_ranks} ranks on {_hosts(job.num_hosts)}, one process each.",
        f"Start: {start}",
        f"The rehearsal runs first. If it fails, the job ends, and {trains} does not start.",
    ]
    if placeholders:
        lines += ["", "Fill in, once, below:", *(f"  {name}: {name.meaning}" for name in placeholders)]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _position(loaded: LoadedPlan, *path: str) -> str:
    return "the plan" if loaded.source is None else str(loaded.source.locate(path))


def _hosts(count: int) -> str:
    return "1 host" if count == 1 else f"{count} hosts"
