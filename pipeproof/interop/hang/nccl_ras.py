"""Status of a running NCCL job from its RAS server: the client protocol, and the output as JSON or text.

NCCL 2.24 and later answer on TCP port 28028 of every host of a job. A client
sends lines: ``CLIENT PROTOCOL 2``, ``TIMEOUT seconds``, ``SET FORMAT JSON``
(2.28.7 and later; older servers answer with ``ERROR``), and ``VERBOSE STATUS``;
then the server sends the status and closes the connection. JSON has every rank
of every communicator. The text has only the ranks that differ, so the others
are taken to have the value that most ranks have. Source: the RAS chapter of
NCCL's user guide.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
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

_TITLE: Final = re.compile(r"#(\d+)-\d+ \(([0-9a-f]+)\) (MISMATCH|INCOMPLETE|ERROR)", re.ASCII)
_ROW: Final = re.compile(r"\s*(\d+)\s+\d+\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+[A-Z,]+\s+\S+", re.ASCII)
_OPERATION: Final = re.compile(r"Communicator ranks have different (?:(\w+) )?operation counts", re.ASCII)
_GROUP: Final = re.compile(
    r"\d+ ranks have (?:launched up to operation (\d+)|(not launched any operations)|status (\w+))", re.ASCII
)
_RANK: Final = re.compile(
    r"Rank (\d+) (?:has (?:launched up to operation (\d+)|(not launched any operations)|status (\w+)) )?"
    r"(?:reported (.+?) )?-- (?:GPU (\S+) managed by process (\d+) on node (\S+)|\[.*\])", re.ASCII,
)  # fmt: skip
_MISSING: Final = re.compile(r"The missing ranks?: (.+)", re.ASCII)
_PROCESS: Final = re.compile(r"Process (\d+) on node (\S+) managing GPUs? (\S.*)", re.ASCII)


@dataclass
class RasRank:
    """A rank of a communicator: its process, the number of collectives that it launched by kind, and its trouble.

    ``error`` is an error that NCCL reported; ``is_silent`` and ``is_dead`` are of a process that does not answer.
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


@dataclass(frozen=True)
class RasStatus:
    """Communicators of a job; of the text only those with a difference or an error."""

    communicators: Mapping[str, RasCommunicator]


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
            is_json = _command(stream, "SET FORMAT JSON").startswith("OK")
            stream.write(b"VERBOSE STATUS\n")
            stream.flush()
            output = stream.read(_MOST_BYTES).decode(errors="replace")
    except OSError as error:
        raise _refused(address, str(error)) from error
    return status_from_json(output, address) if is_json else status_from_text(output, address)


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
    return RasStatus(communicators)


def _json_rank(data: Mapping[str, Any]) -> RasRank:
    counts = {str(op): int(count) for op, count in data.get("collective_counts", {}).items()}
    return RasRank(int(data["rank"]), str(data["host"]), int(data["pid"]), str(data["cuda_dev"]), counts)


@dataclass
class _Block:
    """A communicator of the text while it is read: ranks by number, and for each kind the count of most ranks."""

    size: int
    ranks: dict[int, RasRank] = field(default_factory=dict)
    usual: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By kind: the number of ranks of the largest set, and its count."""

    def finish(self, name: str) -> RasCommunicator:
        for op, (_, count) in self.usual.items():
            for number in range(self.size):
                self.ranks.setdefault(number, RasRank(number)).counts.setdefault(op, count)
        for rank in self.ranks.values():
            if rank.is_silent:
                rank.counts.clear()
        return RasCommunicator(name, self.size, self.ranks)


def status_from_text(output: str, address: str) -> RasStatus:
    """Return the status of RAS's text output; the count of a kind that is not listed is the same on all ranks.

    Raises:
        PlanFileError: PP956, it is not understood.
    """
    if "Communicators..." not in output and "communicator data collected" not in output:
        raise _refused(address, "its text output has no communicators")
    sizes: dict[str, int] = {}
    blocks: dict[str, _Block] = {}
    troubled: dict[tuple[int, str], bool] = {}
    block: _Block | None = None
    section = op = ""
    count: int | None = None
    for line in _lines(output):
        row, title = _ROW.fullmatch(line), _TITLE.match(line)
        if row is not None:
            sizes[row[1]] = int(row[2])
        elif title is not None:
            section, op, count = title[3], "", None
            block = blocks.setdefault(f"0x{title[2]}", _Block(sizes.get(title[1], 0)))
        elif line in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            section, block = line, None
        elif (process := _PROCESS.match(line)) is not None:
            key = int(process[1]), process[2]
            troubled[key] = troubled.get(key, False) or section == "DEAD"
        elif block is not None:
            if (kind := _OPERATION.match(line)) is not None:
                op, count = kind[1] or "collective", None
            elif (group := _GROUP.match(line)) is not None:
                count = _count(group[1], group[2])
                if op and count is not None:
                    block.usual[op] = max(block.usual.get(op, (0, 0)), (int(line.split()[0]), count))
            elif (missing := _MISSING.match(line)) is not None:
                for number in map(int, re.findall(r"\d+", missing[1])):
                    block.ranks.setdefault(number, RasRank(number)).is_silent = True
            elif (match := _RANK.match(line)) is not None:
                rank = block.ranks.setdefault(int(match[1]), RasRank(int(match[1])))
                rank.gpu, rank.pid, rank.host = match[6] or rank.gpu, int(match[7] or rank.pid), match[8] or rank.host
                launched = _count(match[2], match[3])
                launched = count if launched is None else launched
                if section == "INCOMPLETE":
                    rank.is_silent = True
                elif section == "ERROR":
                    rank.error = match[5] or "an error"
                elif op and launched is not None:
                    rank.counts[op] = launched
    for block in blocks.values():
        for rank in block.ranks.values():
            rank.is_dead = troubled.get((rank.pid, rank.host), False)
    return RasStatus({name: block.finish(name) for name, block in blocks.items()})


def _lines(output: str) -> Iterator[str]:
    return (line.strip() for line in output.splitlines())


def _count(number: str | None, none: str | None) -> int | None:
    return int(number) if number else 0 if none else None


def _refused(address: str, why: str) -> PlanFileError:
    return PlanFileError(
        UNREADABLE_STATUS.finding(
            f"NCCL's RAS server at {address} cannot be asked: {why}", None,
            "name a host of the running job, which has NCCL 2.24 or later without NCCL_RAS_ENABLE=0; the port is that "
            "of NCCL_RAS_ADDR, 28028 by default",
        )
    )  # fmt: skip
