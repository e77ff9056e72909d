"""Doctor of a machine for plans: versions, devices, measured backend behaviour compared with its table, links."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import pipeproof
from pipeproof.comm.backend_rows import BackendTable, Row, RowValue
from pipeproof.comm.backends import backend_table
from pipeproof.diagnostics.install_command import install_extra
from pipeproof.exec.installed_backends import INSTALLED_BY, installed_version
from pipeproof.exec.measure.endpoint_pair import BackendStartError, backend_pair
from pipeproof.exec.measure.link_curve import SIZES, Curve, device_facts, failure_text, measure_curve
from pipeproof.exec.measure.nvidia_smi import GpuLink, gpu_links, gpu_properties
from pipeproof.exit_status import ExitStatus
from pipeproof.system_calls import CAN_START_RANKS, num_cores
from pipeproof.testing.conformance import RowResult, check_backend
from pipeproof.testing.endpoint_protocol import World

PROBE_TIMEOUT_S = 5.0
"""Ten times the slowest probe's time on an idle machine: a loaded machine must not look like a hang."""
_FACTS_TIMEOUT_S = 60.0
"""The first product on a GPU loads a library."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Report of the doctor.

    ``rows`` are the measured rows of the backend's table, empty if the backend is missing; ``not_measured`` are rows
    that rely on their source. ``problems`` are sentences with the meaning or the next step; ``notes`` are remarks that
    contradict nothing. ``facts`` describe each rank's device by the framework, ``devices`` and ``links`` the machine's
    GPUs by ``nvidia-smi``, ``curve`` the times of messages.
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
        """0 if every measured row matches, 1 if one differs or kernels do nothing, 2 without a backend to measure."""
        if not self.rows:
            return ExitStatus.BAD_INPUT
        return ExitStatus.FAILED if self.problems else ExitStatus.OK

    @property
    def network(self) -> dict[str, Any] | None:
        """``cost.network`` of a plan on this machine; None if no link was measured."""
        if self.curve is None or not self.curve.points or self.shares_a_gpu:
            return None
        link, num_gpus = self.curve.one_way, max((int(facts.get("gpus", 0)) for facts in self.facts), default=0)
        num_ranks = num_gpus if self.device == "gpu" else num_cores()
        node = {"latency_us": link.latency_us, "bandwidth": link.bandwidth}
        return {"ranks_per_node": max(2, num_ranks), "node": node}

    @property
    def shares_a_gpu(self) -> bool:
        """True if both ranks shared one GPU, so that no link was between them."""
        return self.device == "gpu" and any(facts.get("gpus") == "1" for facts in self.facts)


@dataclass(slots=True)
class _Measured:
    """Measurements and problems of a backend's processes so far."""

    rows: list[RowResult] = field(default_factory=list)
    facts: list[Mapping[str, str]] = field(default_factory=list)
    curve: Curve | None = None
    problems: list[str] = field(default_factory=list)


def run_doctor(
    keys: Collection[str] | None = None,
    backend: str = "paddle",
    device: str = "cpu",
    sizes: Sequence[int] = SIZES,
) -> DoctorReport:
    """Collect versions and measure a framework's transports on this machine; takes half a minute on two cores.

    Args:
        keys: the rows to measure; by default all that two ranks can observe.
        backend: ``paddle`` or ``torch``.
        device: ``cpu`` for gloo, ``gpu`` for NCCL.
        sizes: bytes of the timed messages; no messages are timed if it is empty.
    """
    table = backend_table(backend, device)
    measured = _Measured()
    name, extra = INSTALLED_BY[backend].name, INSTALLED_BY[backend].extra
    if importlib.util.find_spec(backend) is None:
        fix = install_extra(extra)
        measured.problems.append(f"{name} is not installed, so plans cannot be run on it: {fix}")
    elif not CAN_START_RANKS:
        measured.problems.append(f"Transports are measured on Linux, and this system is {sys.platform}: nothing was.")
    else:
        try:
            _measure(measured, table, lambda: backend_pair(backend, device), keys, sizes)
        except BackendStartError as error:
            fix = "" if device == "cpu" else f" Use --on cpu, or a machine with a GPU and a build of {name} for it."
            measured.problems.append(f"Two processes could not be connected by {table.name}: {error}.{fix}")
    report = DoctorReport(
        backend=table.name,
        versions=_versions(measured.facts),
        rows=measured.rows,
        not_measured=[row for row in table.rows() if not row.probed],
        problems=measured.problems,
        device=device,
        devices=gpu_properties() if device == "gpu" else (),
        links=gpu_links() if device == "gpu" else (),
        facts=measured.facts,
        curve=measured.curve,
    )
    return _with_notes(report, name)


def _measure(
    measured: _Measured,
    table: BackendTable,
    make_world: Callable[[], AbstractContextManager[World]],
    keys: Collection[str] | None,
    sizes: Sequence[int],
) -> None:
    """Measure facts and message times in one world, and the rows of the table in others."""
    if sizes:
        with make_world() as world:
            outcomes = world.run(device_facts, _FACTS_TIMEOUT_S)
            measured.facts = [outcome.value for outcome in outcomes if outcome.kind == "returned"]
            measured.problems += sorted({facts["kernels"] for facts in measured.facts if facts.get("kernels")})
            if failure := failure_text(outcomes):
                measured.problems.append(f"A process did not report its device: {failure}.")
            else:
                measured.curve = measure_curve(world, sizes)
                if measured.curve.is_broken:
                    measured.problems.append(f"{measured.curve.ended[0].upper()}{measured.curve.ended[1:]}.")
    measured.rows = check_backend(table, make_world, keys=keys, timeout_s=PROBE_TIMEOUT_S)
    measured.problems += [_difference(table, row) for row in measured.rows if not row.ok]


def _with_notes(report: DoctorReport, name: str) -> DoctorReport:
    notes = []
    if report.shares_a_gpu:
        notes.append(
            f"{name} sees one GPU, which both processes shared: NCCL connected them by sockets, so its behaviour was "
            "measured, but no link"
        )
    if report.device == "gpu" and not report.devices:
        notes.append(
            "nvidia-smi is missing or prints nothing: the driver, clocks, power limits and links are not shown"
        )
    if report.curve is not None and report.curve.ended and not report.curve.is_broken:
        notes.append(report.curve.ended)
    notes += [
        f"{row.key}: the table has {value_text(row.expected)}, this machine {value_text(row.observed)}; plans are "
        "valid with both"
        for row in report.rows
        if row.ok and row.observed != row.expected
    ]
    return replace(report, notes=notes)


def _difference(table: BackendTable, result: RowResult) -> str:
    row = next(row for row in table.rows() if row.key == result.key)
    expected, observed = value_text(result.expected), value_text(result.observed)
    return f"{result.key}: the table has {expected}, this machine {observed}. {row.if_different}"


def _versions(facts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    versions = {
        "pipeproof": pipeproof.__version__,
        "python": platform.python_version(),
        "paddle": installed_version("paddle") or "not installed",
        "torch": installed_version("torch") or "not installed",
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cores": str(num_cores()),
    }
    return versions | {key: facts[0][key] for key in ("cuda", "nccl") if facts and key in facts[0]}


def value_text(value: RowValue) -> str:
    """Readable form of a row's value."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
