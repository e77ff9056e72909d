"""Doctor of a machine for plans: versions, devices, and measured backend behaviour compared with its table."""

from __future__ import annotations

import importlib.util
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import numpy as np

import pipeproof
from pipeproof.comm.backend_rows import BackendTable, Row, RowValue
from pipeproof.comm.backends import backend_table
from pipeproof.diagnostics.install_command import install_extra
from pipeproof.exec.measure.installed_backends import (
    INSTALLED_BY,
    installed_version,
    untested_versions,
)
from pipeproof.exec.store.rendezvous import rank_environment, reserved_ports
from pipeproof.exit_status import ExitStatus
from pipeproof.system_calls import CAN_START_RANKS, num_cores
from pipeproof.testing.endpoint_protocol import Body, Endpoint, Outcome, World
from pipeproof.testing.probes import RowResult, check_backend

if TYPE_CHECKING:
    from rich.console import Console

# --- Two processes of this machine connected by a backend: the world of the doctor's probes ---


WORKERS = {"paddle": "pipeproof.exec.rank.paddle.endpoint", "torch": "pipeproof.exec.rank.torch.endpoint"}
"""Module that both processes run, by framework."""
START_TIMEOUT_S = 60.0
_REAP_S = 5.0
"""Longest time from the end of a process's connection to its exit."""


class BackendStartError(RuntimeError):
    """The two processes did not start; the message names the phase that failed."""


@dataclass(slots=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    connection: Connection

    def end(self) -> str:
        """Text on the end of the process, once its connection has closed."""
        try:
            status = self.process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"


class BackendPair:
    """Two connected ranks in two processes; see ``pipeproof.testing.endpoint_protocol.World``."""

    def __init__(self, ranks: list[_Rank]) -> None:
        self._ranks = ranks

    def run(self, body: Body, timeout_s: float) -> tuple[Outcome, Outcome]:
        """Run ``body``, a module-level function, in both processes."""
        for rank in self._ranks:
            rank.connection.send(body)
        outcomes = {rank.number: Outcome("blocked") for rank in self._ranks}
        for rank, answer in _answers(self._ranks, timeout_s):
            outcomes[rank.number] = Outcome("died", detail=rank.end()) if answer is None else answer
        return outcomes[0], outcomes[1]


@contextmanager
def backend_pair(backend: str, device: str = "cpu") -> Iterator[BackendPair]:
    """Start two processes, connect them by ``paddle`` or ``torch``, and always kill and reap them at the end.

    On ``gpu`` each takes its own GPU; if there is only one, they share it.

    Raises:
        BackendStartError: the framework cannot be imported, its device is missing, or the processes do not connect
            within a minute.
    """
    with ExitStack() as stack:
        ports = stack.enter_context(reserved_ports(3))
        ranks = [_start(backend, device, number, ports, stack) for number in (0, 1)]
        for rank in ranks:
            _expect("imported", [rank])
        # A rank that connects before rank 0's store listens sleeps for three seconds.
        _let_join(ranks[0])
        _await_store(ranks[0], ports[0])
        _let_join(ranks[1])
        _expect("ready", ranks)
        yield BackendPair(ranks)


def _start(backend: str, device: str, number: int, ports: list[int], stack: ExitStack) -> _Rank:
    parent_end, child_end = socket.socketpair()
    connection = stack.enter_context(Connection(parent_end.detach()))
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKERS[backend], str(child_end.fileno()), device],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(child_end.fileno(),),
            env=rank_environment(backend, number, 2, ports, device),
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the two
        )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return _Rank(number, process, connection)


def _answers(ranks: list[_Rank], timeout_s: float) -> Iterator[tuple[_Rank, Any]]:
    """Yield one answer of each rank as it arrives, None for a rank that died; stop when the time is up."""
    deadline = time.monotonic() + timeout_s
    waiting = {rank.connection: rank for rank in ranks}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for rank in [waiting.pop(connection) for connection in list(waiting) if connection in ready]:
            try:
                yield rank, rank.connection.recv()
            except (EOFError, ConnectionResetError):
                yield rank, None


def _expect(word: str, ranks: list[_Rank]) -> None:
    silent = {rank.number for rank in ranks}
    for rank, answer in _answers(ranks, START_TIMEOUT_S):
        if answer is None:
            raise BackendStartError(f"rank {rank.number} ended before it was {word}: {rank.end()}")
        if answer != word:
            raise BackendStartError(f"rank {rank.number} failed before it was {word}: {answer}")
        silent.discard(rank.number)
    if silent:
        names = " and ".join(f"rank {number}" for number in sorted(silent))
        raise BackendStartError(f"{names} not {word} after {START_TIMEOUT_S:.0f} s")


def _let_join(rank: _Rank) -> None:
    try:
        rank.connection.send("join")
    except OSError as error:
        raise BackendStartError(f"rank {rank.number} ended before it could join: {rank.end()}") from error


def _await_store(rank: _Rank, port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if rank.process.poll() is not None:
            raise BackendStartError(f"rank {rank.number} ended before its store listened: {rank.end()}")
        with socket.socket() as visitor:
            if visitor.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise BackendStartError(f"the store of rank {rank.number} does not listen after {START_TIMEOUT_S:.0f} s")


PROBE_TIMEOUT_S = 5.0
"""Ten times the slowest probe's time on an idle machine: a loaded machine must not look like a hang."""
_FACTS_TIMEOUT_S = 60.0
"""The first product on a GPU loads a library."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """Report of the doctor.

    ``rows`` are the measured rows of the backend's table, empty if the backend is missing; ``not_measured`` are rows
    that rely on their source. ``problems`` are sentences with the meaning or the next step; ``notes`` are remarks that
    do not contradict the table. ``facts`` describe each rank's device by the framework.
    """

    backend: str
    versions: Mapping[str, str]
    rows: Sequence[RowResult]
    not_measured: Sequence[Row]
    problems: Sequence[str]
    device: str = "cpu"
    facts: Sequence[Mapping[str, str]] = ()
    notes: Sequence[str] = ()

    @property
    def exit_status(self) -> int:
        """0 if every measured row matches, 1 if one differs or kernels do nothing, 2 without a backend to measure."""
        if not self.rows:
            return ExitStatus.BAD_INPUT
        return ExitStatus.FAILED if self.problems else ExitStatus.OK

    @property
    def shares_a_gpu(self) -> bool:
        """True if both ranks shared one GPU, without a link between them."""
        return self.device == "gpu" and any(facts.get("gpus") == "1" for facts in self.facts)


def run_doctor(
    keys: Collection[str] | None = None,
    backend: str = "paddle",
    device: str = "cpu",
    *,
    asks_devices: bool = True,
) -> DoctorReport:
    """Collect versions and measure a framework's transports on this machine; takes half a minute on two cores.

    Args:
        keys: the rows to measure; by default all that two ranks can observe.
        backend: ``paddle`` or ``torch``.
        device: ``cpu`` for gloo, ``gpu`` for NCCL.
        asks_devices: whether two processes report their device and compute a known product.
    """
    table = backend_table(backend, device)
    rows, facts, problems = list[RowResult](), list[Mapping[str, str]](), list[str]()
    name, extra = INSTALLED_BY[backend].name, INSTALLED_BY[backend].extra
    if importlib.util.find_spec(backend) is None:
        fix = install_extra(extra)
        problems.append(f"{name} is not installed, so plans cannot be run on it: {fix}")
    elif not CAN_START_RANKS:
        problems.append(f"Transports are measured on Linux, and this system is {sys.platform}: nothing was.")
    else:
        try:
            make_world = partial(backend_pair, backend, device)
            if asks_devices:
                problems += _ask_devices(make_world, facts)
            rows += check_backend(table, make_world, keys=keys, timeout_s=PROBE_TIMEOUT_S)
            problems += [_difference(table, row) for row in rows if not row.ok]
        except BackendStartError as error:
            fix = "" if device == "cpu" else f" Use --on cpu, or a machine with a GPU and a build of {name} for it."
            problems.append(f"Two processes could not be connected by {table.name}: {error}.{fix}")
    report = DoctorReport(
        backend=table.name,
        versions=_versions(facts),
        rows=rows,
        not_measured=[row for row in table.rows() if not row.probed],
        problems=problems,
        device=device,
        facts=facts,
    )
    return _with_notes(report, name)


def device_facts(end: Endpoint) -> Any:
    """Return a rank's facts about its framework and device; a body of a probe."""
    return end.facts()  # type: ignore[attr-defined]  # endpoints built on the adapter have it


def _ask_devices(make_world: Callable[[], AbstractContextManager[World]], facts: list[Mapping[str, str]]) -> list[str]:
    """Add the facts of two ranks about their devices, and return the problems with them."""
    with make_world() as world:
        outcomes = world.run(device_facts, _FACTS_TIMEOUT_S)
    facts += [outcome.value for outcome in outcomes if outcome.kind == "returned"]
    silent = "; ".join(
        f"rank {rank} {outcome.kind}{f': {outcome.detail}' if outcome.detail else ''}"
        for rank, outcome in enumerate(outcomes)
        if outcome.kind != "returned"
    )
    problems = sorted({each["kernels"] for each in facts if each.get("kernels")})
    return [*problems, f"A process did not report its device: {silent}."] if silent else problems


def _with_notes(report: DoctorReport, name: str) -> DoctorReport:
    notes = untested_versions(report.versions)
    if report.shares_a_gpu:
        notes.append(
            f"{name} sees one GPU, which both processes shared: NCCL connected them by sockets, so its behaviour was "
            "measured"
        )
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
        **{name: installed_version(name) or "not installed" for name in ("paddle", "torch", "transformers")},
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cores": str(num_cores()),
    }
    return versions | {key: facts[0][key] for key in ("cuda", "nccl") if facts and key in facts[0]}


def value_text(value: RowValue) -> str:
    """Readable form of a row's value."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


# --- Doctor's report for the terminal and as JSON ---


def doctor_to_json(report: DoctorReport) -> dict[str, Any]:
    """Return the report as JSON data; see ``docs/schemas/doctor.schema.json``."""
    return {
        "backend": report.backend,
        "device": report.device,
        "exit_status": report.exit_status,
        "versions": dict(report.versions),
        "ranks": [dict(facts) for facts in report.facts],
        "rows": [asdict(row) for row in report.rows],
        "not_measured": [
            {"key": row.key, "value": row.value, "meaning": row.meaning, "source": row.source}
            for row in report.not_measured
        ],
        "problems": list(report.problems),
        "notes": list(report.notes),
    }


def render_doctor(report: DoctorReport, console: Console) -> None:
    """Print the report: versions, devices, the table of rows, then notes and problems."""
    from rich.text import Text

    for name, value in report.versions.items():
        console.print(Text(f"{name:<12} {value}"))
    for rank, facts in enumerate(report.facts):
        if "device" in facts:
            console.print(Text(f"{f'rank {rank}':<12} {facts['device']}"))
    if report.rows:
        _render_rows(report, console)
    console.print()
    for note in report.notes:
        console.print(Text(f"note: {note}"))
    for problem in report.problems:
        console.print(Text.assemble(("problem: ", "bold red"), problem))
    if not report.problems:
        console.print(Text(f"{report.backend} behaves as plans assume.", style="green"))


def _render_rows(report: DoctorReport, console: Console) -> None:
    from rich.text import Text

    from pipeproof.views.tables import print_table

    console.print()
    console.print(Text(f"{report.backend}, measured with two processes of this machine", style="bold"))
    marks = {True: Text("ok", style="green"), False: Text("DIFFERS", style="bold red")}
    rows = [(marks[row.ok], row.key, value_text(row.expected), value_text(row.observed)) for row in report.rows]
    print_table(("", "behaviour", "table", "measured"), rows, console)
    console.print()
    for cited in report.not_measured:
        console.print(Text(f"not measured: {cited.key} = {value_text(cited.value)} ({cited.source})"))
