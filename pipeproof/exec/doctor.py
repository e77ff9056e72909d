"""Says whether this machine can run plans: versions, and what a backend does beside what its table says."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Collection
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import pipeproof
from pipeproof.comm.backends import backend_table
from pipeproof.comm.capabilities import BackendTable, Row, RowValue
from pipeproof.exec.pair import BackendStartError, backend_pair
from pipeproof.exit_status import ExitStatus
from pipeproof.testing.conformance import RowResult, check_backend

if TYPE_CHECKING:
    from rich.console import Console

PROBE_TIMEOUT_S = 5.0
"""Ten times what the slowest probe takes on an idle machine: a loaded one must not look like a hang."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """What the doctor found.

    ``rows`` is what was measured, empty where the backend is missing;
    ``not_measured`` are the table's rows that rest on their source;
    ``problems`` are sentences, each with what to do or what it means.
    """

    backend: str
    versions: dict[str, str]
    rows: list[RowResult]
    not_measured: list[Row]
    problems: list[str]

    @property
    def exit_status(self) -> int:
        """0 if every measured row holds, 1 if one differs, 2 if there is no backend to measure."""
        if not self.rows:
            return ExitStatus.BAD_INPUT
        return ExitStatus.OK if all(row.ok for row in self.rows) else ExitStatus.FAILED


_INSTALLED_BY = {"paddle": ("Paddle", "cpu"), "torch": ("PyTorch", "torch")}
"""By framework its name, and our extra that installs it."""


def run_doctor(keys: Collection[str] | None = None, backend: str = "paddle") -> DoctorReport:
    """Collect versions and measure a framework's gloo on this machine; a quarter of a minute on two cores.

    Args:
        keys: the rows to measure; all that two ranks can observe by default.
        backend: ``paddle`` or ``torch``.
    """
    table = backend_table(backend, "cpu")
    rows: list[RowResult] = []
    if importlib.util.find_spec(backend) is None:
        name, extra = _INSTALLED_BY[backend]
        problems = [f"{name} is not installed, so plans cannot be run on it: pip install 'pipeproof[{extra}]'"]
    else:
        try:
            rows = check_backend(table, lambda: backend_pair(backend), keys=keys, timeout_s=PROBE_TIMEOUT_S)
            problems = [_difference(table, row) for row in rows if not row.ok]
        except BackendStartError as error:
            problems = [f"Two processes could not be connected by {table.name}: {error}."]
    not_measured = [row for row in table.rows() if not row.probed]
    return DoctorReport(table.name, _versions(), rows, not_measured, problems)


def _difference(table: BackendTable, result: RowResult) -> str:
    about = next(row for row in table.rows() if row.key == result.key)
    expected, observed = _words(result.expected), _words(result.observed)
    return f"{result.key}: the table says {expected}, this machine says {observed}. {about.if_different}"


def _versions() -> dict[str, str]:
    return {
        "pipeproof": pipeproof.__version__,
        "python": platform.python_version(),
        "paddle": _installed("paddlepaddle", "paddlepaddle-gpu"),
        "torch": _installed("torch"),
        "numpy": _installed("numpy"),
        "platform": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0))),
    }


def _installed(*distributions: str) -> str:
    """The version of the first of these that is installed."""
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "not installed"


def _words(value: RowValue) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def doctor_to_json(report: DoctorReport) -> dict[str, Any]:
    """The report as JSON data, keys as in ``DoctorReport`` and ``RowResult``, and ``exit_status``."""
    return {
        "backend": report.backend,
        "exit_status": report.exit_status,
        "versions": report.versions,
        "rows": [asdict(row) for row in report.rows],
        "not_measured": [
            {"key": row.key, "value": row.value, "meaning": row.meaning, "source": row.source}
            for row in report.not_measured
        ],
        "problems": report.problems,
    }


def render_doctor(report: DoctorReport, console: Console) -> None:
    """Print the report: versions, the rows as a table, then the problems or that there are none."""
    from rich.table import Table
    from rich.text import Text

    for name, value in report.versions.items():
        console.print(Text(f"{name:<10} {value}"))
    if report.rows:
        console.print()
        console.print(Text(f"{report.backend}, measured with two processes of this machine", style="bold"))
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("", "behaviour", "table says", "measured"):
            table.add_column(column, no_wrap=column != "measured")
        for row in report.rows:
            mark = Text("ok", style="green") if row.ok else Text("DIFFERS", style="bold red")
            table.add_row(mark, row.key, _words(row.expected), _words(row.observed))
        console.print(table)
        console.print()
        for cited in report.not_measured:
            console.print(Text(f"not measured: {cited.key} = {_words(cited.value)} ({cited.source})"))
    console.print()
    for problem in report.problems:
        console.print(Text.assemble(("problem: ", "bold red"), problem))
    if not report.problems:
        console.print(Text(f"{report.backend} behaves as plans are checked for.", style="green"))
