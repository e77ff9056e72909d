"""The same layers trained by Fleet's own pipeline and by ``pipeproof.paddle.Pipeline``, and the comparison of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.exec.store.rendezvous import rank_environment, reserved_ports
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.subject import Subject, make_subject
from validation.fleet.fleet_codes import NOT_AS_TRAINED
from validation.fleet.fleet_order import RankEvents, count_messages, order_findings

ROOT = Path(__file__).resolve().parents[2]
_EVENTS = TypeAdapter(list[RankEvents])


@dataclass(frozen=True, slots=True)
class Settings:
    """A training: a module of ``validation.fleet.models``, the ranks, and the sizes by which Fleet picks its schedule.

    Fleet's calls are recorded below ``log``, if it is given.
    """

    model: str
    pp: int
    micro_batches: int
    replicas: int = 1
    chunks: int = 1
    balanced: bool = False
    steps: int = 5
    log: str | None = None

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return self.pp * self.replicas

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs of ranks with messages, by their global numbers: a ring for each replica with chunks, else a line."""
        edges = set[tuple[int, int]]()
        for first in range(0, self.num_ranks, self.pp):
            for stage in range(self.pp if self.chunks > 1 else self.pp - 1):
                pair = first + stage, first + (stage + 1) % self.pp
                edges |= {pair, pair[::-1]}
        return sorted(edges)


@dataclass(frozen=True)
class FleetReport:
    """The results of every rank of both trainings, in the order of ranks."""

    settings: Settings
    ranks: list[dict[str, Any]]

    @cached_property
    def subject(self) -> Subject:
        """The plan of ``Pipeline``."""
        return make_subject(plan_from_dict(self.ranks[0]["plan"]))

    @cached_property
    def events(self) -> list[list[RankEvents]]:
        """Fleet's operations by rank and step; peers are numbered within their replica."""
        found = [_EVENTS.validate_python(rank["events"]) for rank in self.ranks]
        for steps in found:
            for step in steps:
                step.messages = [replace(message, peer=message.peer % self.settings.pp) for message in step.messages]
        return found

    @cached_property
    def order_findings(self) -> tuple[Finding, ...]:
        """Differences between Fleet's operations and the plan's, of all replicas and steps."""
        pp = self.settings.pp
        return tuple(
            finding
            for first in range(0, self.settings.num_ranks, pp)
            for step, ranks in enumerate(zip(*self.events[first : first + pp], strict=True))
            for finding in order_findings(self.subject, step, ranks)
        )

    @property
    def gradients(self) -> list[dict[str, Any]]:
        """The differences of all gradients."""
        return [gradient for rank in self.ranks for step in rank["gradients"] for gradient in step]

    @property
    def losses(self) -> list[tuple[float, float]]:
        """Fleet's loss and ours of each step: means over the micro-batches of the first replica."""
        theirs, ours = self.ranks[0]["losses"]
        return list(zip(theirs, ours, strict=True))

    @property
    def num_messages(self) -> int:
        """Number of activations and gradients that Fleet sent in one step."""
        return count_messages([steps[0] for steps in self.events])

    @property
    def num_computed(self) -> int:
        """Number of forwards and backwards of all ranks in one step."""
        return sum(len(steps[0].computed) for steps in self.events)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """PP918 and PP919."""
        found = []
        different = [each for each in self.gradients if not each["is_equal"]]
        if different:
            worst = max(different, key=lambda each: float(each["distance"]))
            found.append(
                NOT_AS_TRAINED.finding(
                    f"{len(different)} of {len(self.gradients)} gradients differ, most of all {worst['name']} in step "
                    f"{worst['step']} by {worst['distance']:.2g}"
                )
            )
        for rank, content in enumerate(self.ranks):
            for step, (theirs, ours) in enumerate(zip(*content["losses"], strict=True)):
                if theirs != ours:
                    found.append(
                        NOT_AS_TRAINED.finding(f"step {step}, rank {rank}: the loss is {ours!r}, Fleet's {theirs!r}")
                    )
        return (*found, *self.order_findings)

    def to_json(self) -> dict[str, Any]:
        """Return the form that ``--report`` writes."""
        return {
            "matches": not self.findings,
            "scheduler": self.ranks[0]["scheduler"],
            "messages_per_step": self.num_messages,
            "computed_per_step": self.num_computed,
            "num_gradients": len(self.gradients),
            "num_bitwise": sum(each["is_equal"] for each in self.gradients),
            "losses": [{"fleet_loss": theirs, "loss": ours} for theirs, ours in self.losses],
            "findings": [finding_to_json(finding) for finding in self.findings],
        }


def run_fleet(settings: Settings, timeout_s: float = 300.0) -> FleetReport:
    """Train both in the processes of all ranks.

    Raises:
        RuntimeError: a process failed, or did not end in time; with its output.
    """
    with tempfile.TemporaryDirectory() as folder, reserved_ports(settings.num_ranks + 1) as ports:
        files = [Path(folder) / f"rank{rank}.json" for rank in range(settings.num_ranks)]
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "validation.fleet.fleet_rank", json.dumps(asdict(settings)), str(file)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={
                    **os.environ, **rank_environment("paddle", rank, settings.num_ranks, ports), "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
                },
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=timeout_s)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        failed = [output for process, output in zip(started, outputs, strict=True) if process.returncode]
        if failed:
            raise RuntimeError(failed[0])
        return FleetReport(settings, [json.loads(file.read_text()) for file in files])
