"""Says whether this machine can run plans: versions, devices, what a backend does beside its table, and its links."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pipeproof
from pipeproof.comm.backends import backend_table
from pipeproof.comm.capabilities import BackendTable, Row, RowValue
from pipeproof.exec.curve import SIZES, Curve, facts, measure_curve, what_befell
from pipeproof.exec.nvidia import GpuLink, described_gpus, gpu_links
from pipeproof.exec.pair import BackendStartError, backend_pair
from pipeproof.exit_status import ExitStatus
from pipeproof.testing.conformance import RowResult, check_backend
from pipeproof.testing.endpoint import World

PROBE_TIMEOUT_S = 5.0
"""Ten times what the slowest probe takes on an idle machine: a loaded one must not look like a hang."""
_FACTS_TIMEOUT_S = 60.0
"""A product on a GPU loads a library first."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What the doctor found.

    ``rows`` is what was measured, empty where the backend is missing;
    ``not_measured`` are the table's rows that rest on their source;
    ``problems`` are sentences, each with what to do or what it means;
    ``notes`` are others, which contradict nothing. ``facts`` is what the
    framework says of each rank's device, ``devices`` and ``links`` what the
    machine says of its GPUs, ``curve`` what messages take.
    """

    backend: str
    versions: Mapping[str, str]
    rows: Sequence[RowResult]
    not_measured: Sequence[Row]
    problems: Sequence[str]
    device: str = "cpu"
    devices: Sequence[Mapping[str, str]] = ()
    links: Sequence[GpuLink] = ()
    facts: Sequence[Mapping[str, str]] = ()
    curve: Curve | None = None
    notes: Sequence[str] = ()

    @property
    def exit_status(self) -> int:
        """0 if every measured row holds, 1 if one differs or kernels do nothing, 2 without a backend to measure."""
        if not self.rows:
            return ExitStatus.BAD_INPUT
        return ExitStatus.FAILED if self.problems else ExitStatus.OK

    @property
    def network(self) -> dict[str, Any] | None:
        """``cost.network`` of a plan on this machine; None where no link was measured."""
        if self.curve is None or not self.curve.points or self.shares_a_gpu:
            return None
        link, num_gpus = self.curve.one_way, max((int(one.get("gpus", 0)) for one in self.facts), default=0)
        together = num_gpus if self.device == "gpu" else len(os.sched_getaffinity(0))
        node = {"latency_us": link.latency_us, "bandwidth": link.bandwidth}
        return {"ranks_per_node": max(2, together), "node": node}

    @property
    def shares_a_gpu(self) -> bool:
        """Whether both ranks had one GPU, so that what joined them was no link."""
        return self.device == "gpu" and any(one.get("gpus") == "1" for one in self.facts)


@dataclass(slots=True)
class _Found:
    """What the processes of a backend have shown so far."""

    rows: list[RowResult] = field(default_factory=list)
    facts: list[Mapping[str, str]] = field(default_factory=list)
    curve: Curve | None = None
    problems: list[str] = field(default_factory=list)


_INSTALLED_BY = {"paddle": ("Paddle", "cpu"), "torch": ("PyTorch", "torch")}
"""By framework its name, and our extra that installs it."""


def run_doctor(
    keys: Collection[str] | None = None,
    backend: str = "paddle",
    device: str = "cpu",
    sizes: Sequence[int] = SIZES,
) -> DoctorReport:
    """Collect versions and measure a framework's transports on this machine; half a minute on two cores.

    Args:
        keys: the rows to measure; all that two ranks can observe by default.
        backend: ``paddle`` or ``torch``.
        device: ``cpu`` for gloo, ``gpu`` for NCCL.
        sizes: bytes of the messages that are timed; none where it is empty.
    """
    table = backend_table(backend, device)
    found = _Found()
    name, extra = _INSTALLED_BY[backend]
    if importlib.util.find_spec(backend) is None:
        mend = f"pip install 'pipeproof[{extra}]'"
        found.problems.append(f"{name} is not installed, so plans cannot be run on it: {mend}")
    else:
        try:
            _measure(found, table, lambda: backend_pair(backend, device), keys, sizes)
        except BackendStartError as error:
            mend = (
                "" if device == "cpu" else f" Use --device cpu, or a machine with a GPU and a build of {name} for it."
            )
            found.problems.append(f"Two processes could not be connected by {table.name}: {error}.{mend}")
    report = DoctorReport(
        backend=table.name,
        versions=_versions(found.facts),
        rows=found.rows,
        not_measured=[row for row in table.rows() if not row.probed],
        problems=found.problems,
        device=device,
        devices=described_gpus() if device == "gpu" else (),
        links=gpu_links() if device == "gpu" else (),
        facts=found.facts,
        curve=found.curve,
    )
    return _with_notes(report, name)


def _measure(
    found: _Found,
    table: BackendTable,
    make_world: Callable[[], AbstractContextManager[World]],
    keys: Collection[str] | None,
    sizes: Sequence[int],
) -> None:
    """In worlds of their own: what the framework says and messages take, and the rows of the table."""
    if sizes:
        with make_world() as world:
            said = world.run(facts, _FACTS_TIMEOUT_S)
            found.facts = [one.value for one in said if one.kind == "returned"]
            found.problems += sorted({one["kernels"] for one in found.facts if one.get("kernels")})
            if odd := what_befell(said):
                found.problems.append(f"A process did not say what it runs on: {odd}.")
            else:
                found.curve = measure_curve(world, sizes)
                if found.curve.is_broken:
                    found.problems.append(f"{found.curve.ended[0].upper()}{found.curve.ended[1:]}.")
    found.rows = check_backend(table, make_world, keys=keys, timeout_s=PROBE_TIMEOUT_S)
    found.problems += [_difference(table, row) for row in found.rows if not row.ok]


def _with_notes(report: DoctorReport, name: str) -> DoctorReport:
    notes = []
    if report.shares_a_gpu:
        notes.append(
            f"{name} sees one GPU, which both processes shared: NCCL joined them by sockets, so that its behaviour "
            "shows, and no link"
        )
    if report.device == "gpu" and not report.devices:
        notes.append(
            "nvidia-smi is not here, or says nothing: the driver, clocks, power limits and links are not shown"
        )
    if report.curve is not None and report.curve.ended and not report.curve.is_broken:
        notes.append(report.curve.ended)
    notes += [
        f"{row.key}: the table says {words(row.expected)}, this machine {words(row.observed)}; plans hold either way"
        for row in report.rows
        if row.ok and row.observed != row.expected
    ]
    return replace(report, notes=notes)


def _difference(table: BackendTable, result: RowResult) -> str:
    about = next(row for row in table.rows() if row.key == result.key)
    expected, observed = words(result.expected), words(result.observed)
    return f"{result.key}: the table says {expected}, this machine says {observed}. {about.if_different}"


def _versions(said: Sequence[Mapping[str, str]]) -> dict[str, str]:
    found = {
        "pipeproof": pipeproof.__version__,
        "python": platform.python_version(),
        "paddle": _installed("paddlepaddle", "paddlepaddle-gpu"),
        "torch": _installed("torch"),
        "numpy": _installed("numpy"),
        "platform": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0))),
    }
    return found | {key: said[0][key] for key in ("cuda", "nccl") if said and key in said[0]}


def _installed(*distributions: str) -> str:
    """The version of the first of these that is installed."""
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "not installed"


def words(value: RowValue) -> str:
    """A row's value as people read it."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
