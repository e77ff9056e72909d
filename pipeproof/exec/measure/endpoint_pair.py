"""Two processes of this machine connected by a backend: the world of the doctor's probes."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from pipeproof.exec.launch.rendezvous import rank_environment, reserved_ports
from pipeproof.testing.endpoint_protocol import Body, Outcome

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
    """Yield one answer of each rank as it arrives, None for a rank that died; stop early when the time is up."""
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
    """Wait until every rank has answered ``word``."""
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
    """Wait until the store of this rank listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if rank.process.poll() is not None:
            raise BackendStartError(f"rank {rank.number} ended before its store listened: {rank.end()}")
        with socket.socket() as visitor:
            if visitor.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise BackendStartError(f"the store of rank {rank.number} does not listen after {START_TIMEOUT_S:.0f} s")
