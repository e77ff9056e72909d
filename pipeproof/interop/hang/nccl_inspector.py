"""Logs of NCCL's Inspector plugin: the finished operations of each rank on each communicator, as JSON lines.

Versions 4.x of the format. Up to 4.2 each line has the communicator and the
process; from 4.3 on a line with ``dump_stats`` has them for the lines behind
it. An operation that is not finished is in no log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeproof.foreign_text import decode_json
from pipeproof.interop.hang.flight_recorder import unreadable_dump

_VERSION: Final = re.compile(r"v?4\.\d+", re.ASCII)
_VERSION_KEY: Final = "inspector_output_format_version"
_HEAD_BYTES: Final = 4096
_MOST_LINE: Final = 2**22
_SUFFIXES: Final = (".log", ".json", ".jsonl")
_DROPPED: Final = ("coll_dropped_total", "p2p_dropped_total")


_MOST_RANKS: Final = 2**20
_MOST_US: Final = 2**53
_Context = tuple[Mapping[str, Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a host."""

    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class FinishedOp:
    """A finished operation of a rank.

    ``number`` counts the operations of its kind on the communicator. ``exec_us``
    is the time from its start on this rank to its end, in microseconds, so the
    rank that comes last has the shortest. ``logged_us`` is when the log was
    written, or with verbose logs when the operation started, in microseconds
    since the epoch. ``is_on_device`` is False for times of the host.
    """

    communicator: str
    name: str
    num_ranks: int
    rank: int
    process: Process
    op: str
    number: int
    peer: int | None
    num_bytes: int
    exec_us: int
    logged_us: int
    is_on_device: bool

    @property
    def text(self) -> str:
        """``AllReduce #7``, or ``Send #3 with rank 1``."""
        return f"{self.op} #{self.number}" + ("" if self.peer is None else f" with rank {self.peer}")


@dataclass(frozen=True)
class InspectorLogs:
    """The finished operations of all logs, in the order of each log, and the number of those that were lost."""

    ops: tuple[FinishedOp, ...]
    num_lost: int


def inspector_files(directory: Path) -> list[Path]:
    """Return the files in a directory that begin as logs of the Inspector; empty if it cannot be read."""
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix in _SUFFIXES and path.is_file())
        return [path for path in paths if _VERSION_KEY.encode() in _head(path)]
    except OSError:
        return []


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def read_inspector(files: list[Path]) -> InspectorLogs:
    """Read logs.

    Raises:
        PlanFileError: PP930, a log cannot be read, has another version, or a line that is not understood. The end of a
            last line that is still being written is left out.
    """
    ops: list[FinishedOp] = []
    lost: dict[tuple[str, int, Process], int] = {}
    for path in files:
        try:
            with path.open(encoding="utf-8", newline="\n") as file:
                _read(path, file, ops, lost)
        except OSError as error:
            raise unreadable_dump(f"cannot read `{path}`: {error.strerror}", str(path)) from error
        except UnicodeDecodeError as error:
            raise unreadable_dump(f"`{path}` is no text", str(path)) from error
    return InspectorLogs(tuple(ops), sum(lost.values()))


def _read(path: Path, file: Any, ops: list[FinishedOp], lost: dict[tuple[str, int, Process], int]) -> None:
    context: _Context | None = None
    for number, line in enumerate(_lines(path, file), start=1):
        try:
            record = decode_json(line)
            context = header, metadata = _context(path, record, context)
            if "dump_stats" in record:
                key = str(header["id"]), int(header["rank"]), Process(str(metadata["hostname"]), int(metadata["pid"]))
                lost[key] = sum(int(record["dump_stats"].get(name, 0)) for name in _DROPPED)
            kinds = (kind for kind in ("coll", "p2p") if f"{kind}_perf" in record)
            ops.extend(_op(kind, record[f"{kind}_perf"], header, metadata) for kind in kinds)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            if not line.endswith("\n"):  # the rank is writing it
                return
            why = f"line {number} is not understood: {type(error).__name__}: {error}"
            raise unreadable_dump(
                f"`{path}`: {why}", str(path), help="NCCL's Inspector writes 4.x as JSON lines"
            ) from error


def _context(path: Path, record: Mapping[str, Any], before: _Context | None) -> _Context:
    """Return the header and the metadata of a record: its own, or those of the record that began its batch."""
    if "header" not in record:
        if before is None:
            raise ValueError("no line before it has a header")
        return before
    header, metadata = record["header"], record["metadata"]
    version = str(metadata[_VERSION_KEY])
    if not _VERSION.fullmatch(version):
        raise unreadable_dump(f"`{path}` has version {version} of the format; 4.x is read", str(path))
    return header, metadata


def _lines(path: Path, file: Any) -> Iterator[str]:
    while line := file.readline(_MOST_LINE):
        if len(line) == _MOST_LINE:
            raise unreadable_dump(f"`{path}` has a line of more than {_MOST_LINE} characters", str(path))
        if line.strip():
            yield line


def _op(kind: str, data: Mapping[str, Any], header: Mapping[str, Any], metadata: Mapping[str, Any]) -> FinishedOp:
    source = str(data.get(f"{kind}_timing_source", "kernel_gpu"))
    times = data.get("event_trace_ts")
    op = FinishedOp(
        str(header["id"]), str(header.get("comm_name", "")), int(header["n_ranks"]), int(header["rank"]),
        Process(str(metadata["hostname"]), int(metadata["pid"])), str(data[kind]), int(data[f"{kind}_sn"]),
        int(data["p2p_peer"]) if kind == "p2p" else None, int(data[f"{kind}_msg_size_bytes"]),
        int(data[f"{kind}_exec_time_us"]),
        int(metadata["dump_timestamp_us"] if times is None else times[f"{kind}_start_ts"]), source == "kernel_gpu",
    )  # fmt: skip
    is_time = 0 <= op.exec_us < _MOST_US and 0 <= op.logged_us < _MOST_US
    if not 0 <= op.rank < op.num_ranks <= _MOST_RANKS or not is_time or op.number < 0:
        raise ValueError(f"rank {op.rank} of {op.num_ranks}, {op.text}, {op.exec_us} us")
    return op
