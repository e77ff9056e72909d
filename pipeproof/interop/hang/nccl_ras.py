"""Status of a running NCCL job from its RAS server: the client protocol, and the output as JSON.

NCCL 2.28.7 and later answer on TCP port 28028 of every host of a job. A client
sends lines: ``CLIENT PROTOCOL 2``, ``TIMEOUT seconds``, ``SET FORMAT JSON``
(older servers answer with ``ERROR``), and ``VERBOSE STATUS``; then the server
sends the status, with every rank of every communicator, and closes the
connection. Source: the RAS chapter of NCCL's user guide.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.foreign_text import MALFORMED, decode_json
from pipeproof.interop.hang.hang_codes import UNREADABLE_STATUS

PORT: Final = 28028
_PROTOCOL: Final = 2
_SUCCESS, _IN_PROGRESS = 0, 7
"""``ncclSuccess`` and ``ncclInProgress`` of nccl.h."""
_MOST_BYTES: Final = 1 << 28


@dataclass
class RasRank:
    """A rank of a communicator: its process, its number of launched collectives by kind, and its faults.

    ``error`` is an error that NCCL reported; ``is_silent`` and ``is_dead`` mark a process that does not answer.
    """

    rank: int
    host: str = ""
    pid: int = 0
    gpu: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    error: str = ""
    is_silent: bool = False
    is_dead: bool = False

    @property
    def text(self) -> str:
        """``process 123 on node h, GPU 0``; empty if it is unknown."""
        return f"process {self.pid} on node {self.host}, GPU {self.gpu}" if self.pid else ""


@dataclass(frozen=True)
class RasCommunicator:
    """A communicator: its hash, its number of ranks, and its ranks by their number."""

    name: str
    size: int
    ranks: Mapping[int, RasRank]


RasStatus = Mapping[str, RasCommunicator]
"""The communicators of a job by their names."""


def ask_ras(host: str, port: int = PORT, *, timeout_s: float = 10.0) -> RasStatus:
    """Ask a RAS server for the status of its job.

    Raises:
        PlanFileError: PP956, no server answers there, or its output is not understood.
    """
    address = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout_s) as connection, connection.makefile("rwb") as stream:
            # the server waits that long for the processes of the job
            connection.settimeout(2 * timeout_s)
            greeting = _command(stream, f"CLIENT PROTOCOL {_PROTOCOL}")
            if not greeting.upper().startswith("SERVER PROTOCOL "):
                raise _refused(address, f"it does not answer as a RAS server: {greeting[:80]!r}")
            _command(stream, f"TIMEOUT {max(1, round(timeout_s / 2))}")
            if not _command(stream, "SET FORMAT JSON").startswith("OK"):
                raise _refused(address, "it has no JSON, which NCCL 2.28.7 and later write")
            stream.write(b"VERBOSE STATUS\n")
            stream.flush()
            output = stream.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise _refused(address, str(error)) from error
    return status_from_json(output, address)


def _command(stream: Any, command: str) -> str:
    stream.write(f"{command}\n".encode())
    stream.flush()
    return str(stream.readline(4096).decode(errors="replace").strip())


def status_from_json(output: str, address: str) -> RasStatus:
    """Return the status of RAS's JSON output.

    Raises:
        PlanFileError: PP956, it is not understood.
    """
    try:
        communicators = {}
        for each in decode_json(output)["communicators"]:
            ranks = {}
            for data in (*each["ranks"], *each["missing_ranks"]):
                rank, status = _json_rank(data), data["status"]
                if "unresponsive" in status:
                    rank.is_silent, rank.is_dead = bool(status["unresponsive"]), bool(status["considered_dead"])
                else:
                    codes = [int(status[name]) for name in ("init_state", "async_error")]
                    bad = [code for code in codes if code not in (_SUCCESS, _IN_PROGRESS)]
                    rank.error = f"NCCL error {bad[0]}" if bad else "an abort" if status["abort_flag"] else ""
                ranks[rank.rank] = rank
            name = f"{each['hash']}"
            communicators[name] = RasCommunicator(name, int(each["size"]), ranks)
    except MALFORMED as error:
        raise _refused(address, f"its JSON output is not understood: {error!r}") from error
    return communicators


def _json_rank(data: Mapping[str, Any]) -> RasRank:
    counts = {str(op): int(count) for op, count in data.get("collective_counts", {}).items()}
    return RasRank(int(data["rank"]), str(data["host"]), int(data["pid"]), str(data["cuda_dev"]), counts)


def _refused(address: str, why: str) -> PlanFileError:
    return PlanFileError(
        UNREADABLE_STATUS.finding(
            f"NCCL's RAS server at {address} cannot be asked: {why}", None,
            "name a host of the running job, which has NCCL 2.28.7 or later without NCCL_RAS_ENABLE=0; NCCL_RAS_ADDR "
            "has the port, 28028 by default; for an older NCCL, give dumps of Flight Recorder or py-spy",
        )
    )  # fmt: skip
