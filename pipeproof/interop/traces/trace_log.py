"""Log of a rank as data, and its reader."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final, NoReturn

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.foreign_text import MALFORMED, MOST_RANKS, decode_json, open_foreign
from pipeproof.interop.traces.recorder import VERSION
from pipeproof.interop.traces.trace_codes import UNREADABLE_LOG


@dataclass(frozen=True, slots=True)
class LoggedTensor:
    """A tensor of a call; ``start`` and ``stop`` are its first address and the one after its last, in bytes.

    ``strides`` are in elements.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """A process group: its name, and its global ranks in the order of group ranks.

    ``opened`` is True if its communicator was created with the group: single
    messages use it, too.
    """

    name: str
    ranks: tuple[int, ...]
    backend: str
    opened: bool

    @property
    def title(self) -> str:
        """Name of the group in messages."""
        return f"group {self.name}"


@dataclass(frozen=True, slots=True)
class Mark:
    """Meaning of a message, as far as it is known: F or B, the stage on this rank, the micro-batch."""

    kind: str | None = None
    stage: int | None = None
    micro_batch: int | None = None

    def __str__(self) -> str:
        micro_batch = "" if self.micro_batch is None else f" {self.micro_batch}"
        stage = "" if self.stage is None else f" of stage {self.stage}"
        return f"{self.kind}{micro_batch}{stage}"


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """An operation that a rank issued. ``line`` is its location in the log, ``at`` in the user's code."""

    rank: int
    seq: int
    op: str
    group: LoggedGroup
    peer: int | None
    tag: int
    reduction: str
    inputs: tuple[LoggedTensor, ...]
    outputs: tuple[LoggedTensor, ...]
    sent_splits: tuple[int, ...]
    received_splits: tuple[int, ...]
    batch: int | None
    blocks: bool
    mark: Mark | None
    at: str
    line: Location

    @property
    def is_message(self) -> bool:
        """True for a send or a receive."""
        return self.op in ("send", "recv")

    @property
    def tensor(self) -> LoggedTensor | None:
        """Tensor of a message, or the first one of a collective."""
        return next(iter((*self.inputs, *self.outputs)), None)

    @property
    def tensors_text(self) -> str:
        """Types and shapes of its tensors, for messages."""
        shown = self.inputs or self.outputs
        return ", ".join(map(str, shown[:3])) + (", .." if len(shown) > 3 else "")


@dataclass(frozen=True, slots=True)
class LoggedWait:
    """A wait of the host for the operations ``of``; the memory of those in ``changed`` was written before."""

    of: tuple[int, ...]
    changed: tuple[int, ...]
    at: str
    line: Location


@dataclass(frozen=True)
class RankLog:
    """The log of one rank: calls and waits in their order, which of the calls are done, and how the recording ended.

    ``created`` lists the members of groups that were created meanwhile. Without
    ``ended`` the rank was killed, or is still running.
    """

    rank: int
    num_ranks: int
    framework: str
    file: str
    events: tuple[LoggedCall | LoggedWait, ...]
    done: frozenset[int]
    created: tuple[tuple[int, ...], ...]
    groups: Mapping[str, LoggedGroup]
    ended: bool
    error: str | None
    error_line: Location | None

    @property
    def calls(self) -> tuple[LoggedCall, ...]:
        """All operations, in the order of issue."""
        return tuple(event for event in self.events if isinstance(event, LoggedCall))

    @property
    def waiting_for(self) -> tuple[int, ...]:
        """Operations that the host was waiting for when the log ended, or when that wait raised an error."""
        if not self.events or (self.ended and self.error is None):
            return ()
        last = self.events[-1]
        of = last.of if isinstance(last, LoggedWait) else (last.seq,) if last.blocks else ()
        return tuple(seq for seq in of if seq not in self.done)


_NAME: Final = re.compile(r"rank_(0|[1-9]\d*)\.jsonl", re.ASCII)
_OPS: Final = frozenset(
    {
        "send", "recv", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
        "scatter", "barrier",
    }
)  # fmt: skip
_FRAMEWORKS: Final = ("torch", "paddle")
"""First words of the framework of a log, before its version."""
MAX_BYTES: Final = 2**29
"""Largest log of a rank."""


def read_logs(directory: Path) -> tuple[RankLog, ...]:
    """Read the logs ``rank_N.jsonl`` in a directory, ordered by rank.

    Raises:
        PlanFileError: PP940, there is no log, or one cannot be read.
    """
    if not directory.is_dir():
        _raise_unreadable(f"`{directory}` is not a directory", Location(str(directory)))
    files = {int(match[1]): path for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    if not files:
        suggested_fix = (
            "record with `pipeproof.interop.traces.record_torch` or `record_paddle`, and name their directory"
        )
        _raise_unreadable(f"`{directory}` has no `rank_N.jsonl`", Location(str(directory)), suggested_fix)
    logs = tuple(_Reader(rank, files[rank]).read() for rank in sorted(files))
    first = logs[0]
    for log in logs:
        location = Location(log.file)
        if (log.num_ranks, log.framework) != (first.num_ranks, first.framework):
            size = f"{log.num_ranks} ranks on {log.framework}"
            _raise_unreadable(
                f"this log is of {size}, rank {first.rank}'s of {first.num_ranks} on {first.framework}", location
            )
        if log.rank >= log.num_ranks:
            _raise_unreadable(f"rank {log.rank} of {log.num_ranks} ranks", location)
    return logs


class _Reader:
    def __init__(self, rank: int, path: Path) -> None:
        self._rank, self._path, self._line = rank, path, 0
        self._start: dict[str, Any] | None = None
        self._groups: dict[str, LoggedGroup] = {}
        self._events: list[LoggedCall | LoggedWait] = []
        self._event_indices: dict[int, int] = {}
        self._done: set[int] = set()
        self._created: list[tuple[int, ...]] = []
        self._ended = False
        self._error: tuple[str, Location] | None = None

    def read(self) -> RankLog:
        for text in self._lines():
            self._line += 1
            try:
                data = decode_json(text)
                self._take(data["event"], data)
            except MALFORMED as error:
                problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
                _raise_unreadable(f"this is not a line of a log: {problem}", self._here)
        if self._start is None:
            _raise_unreadable("this log is empty: its rank ended before it wrote anything", Location(str(self._path)))
        error_text, location = self._error or (None, None)
        return RankLog(
            self._rank, self._start["num_ranks"], self._start["framework"], str(self._path), tuple(self._events),
            frozenset(self._done), tuple(self._created), self._groups, self._ended, error_text, location,
        )  # fmt: skip

    def _lines(self) -> Iterator[str]:
        try:
            with open_foreign(self._path, MAX_BYTES) as stream:
                for line in stream:
                    if line.endswith(b"\n"):  # text after the last line break is a truncated line
                        yield line[:-1].decode("utf-8", errors="replace")
        except OSError as error:
            _raise_unreadable(f"this log cannot be read: {error.strerror}", self._here)

    @property
    def _here(self) -> Location:
        return Location(str(self._path), max(self._line, 1), 1)

    def _take(self, event: str, data: Mapping[str, Any]) -> None:
        if (event == "start") != (self._start is None):
            raise ValueError("`start` must be the first line, and only the first")
        if self._ended:
            raise ValueError("there is a line after `end`")
        match event:
            case "start":
                if data["version"] != VERSION:
                    raise ValueError(f"it has version {data['version']} of the format; {VERSION} is read")
                if data["rank"] != self._rank:
                    raise ValueError(f"it is of rank {data['rank']}, and the file's name has {self._rank}")
                if str(data["framework"]).partition(" ")[0] not in _FRAMEWORKS:
                    raise ValueError(f"`framework` is {data['framework']!r}, not one of {', '.join(_FRAMEWORKS)}")
                if not 1 <= int(data["num_ranks"]) <= MOST_RANKS:
                    raise ValueError(f"`num_ranks` is {data['num_ranks']}, and a job has 1 to {MOST_RANKS:,} ranks")
                self._start = {"num_ranks": int(data["num_ranks"]), "framework": str(data["framework"])}
            case "group":
                ranks = tuple(map(int, data["ranks"]))
                opened = data.get("about") == "eager"
                self._groups[data["group"]] = LoggedGroup(data["group"], ranks, str(data["backend"]), opened)
            case "create":
                self._created.append(tuple(map(int, data["ranks"])))
            case "call":
                self._event_indices[int(data["seq"])] = len(self._events)
                self._events.append(self._call(data))
            case "wait":
                of, changed = self._numbers(data.get("of", ())), self._numbers(data.get("changed", ()))
                self._events.append(LoggedWait(of, changed, str(data.get("at", "")), self._here))
            case "done":
                self._finish(self._numbers(data["of"]), data.get("source"))
            case "failed":
                self._error = self._error or (f"raised {data['error']}", self._here)
            case "unread":
                text = f"issued a call of `{data['call']}` that could not be recorded ({data['error']})"
                self._error = self._error or (text, self._here)
            case "end":
                self._ended = True
                if data.get("error"):
                    self._error = f"raised {data['error']}", self._here
            case _:
                raise ValueError(f"unknown event {event!r}")

    def _finish(self, of: Sequence[int], source: int | None) -> None:
        self._done.update(of)
        for seq in of if source is not None else ():
            index = self._event_indices[seq]
            call = self._events[index]
            if isinstance(call, LoggedCall) and call.peer is None:
                self._events[index] = replace(call, peer=int(source or 0))

    def _numbers(self, value: Sequence[Any]) -> tuple[int, ...]:
        numbers = tuple(map(int, value))
        unknown = [seq for seq in numbers if seq not in self._event_indices]
        if unknown:
            raise ValueError(f"no earlier call has the number {unknown[0]}")
        return numbers

    def _call(self, data: Mapping[str, Any]) -> LoggedCall:
        op, group = str(data["op"]), self._groups.get(data["group"])
        if op not in _OPS:
            raise ValueError(f"unknown operation {op!r}")
        if group is None:
            raise ValueError(f"no earlier line describes group {data['group']!r}")
        mark, batch, peer = data.get("mark"), data.get("batch"), data.get("peer")
        if peer is not None and int(peer) not in group.ranks:
            raise ValueError(f"rank {peer} is not in {group.title}")
        return LoggedCall(
            self._rank, int(data["seq"]), op, group, None if peer is None else int(peer), int(data.get("tag", 0)),
            str(data.get("reduction", "")), _tensors(data.get("inputs", ())), _tensors(data.get("outputs", ())),
            tuple(map(int, data.get("sent_splits", ()))), tuple(map(int, data.get("received_splits", ()))),
            None if batch is None else int(batch), bool(data.get("blocks", False)),
            None if mark is None else Mark(mark.get("kind"), mark.get("stage"), mark.get("micro_batch")),
            str(data.get("at", "")), self._here,
        )  # fmt: skip


def _tensors(values: Sequence[Mapping[str, Any]]) -> tuple[LoggedTensor, ...]:
    return tuple(map(_tensor, values))


def _tensor(value: Mapping[str, Any]) -> LoggedTensor:
    shape, strides = tuple(map(int, value["shape"])), tuple(map(int, value["strides"]))
    if len(shape) != len(strides):
        raise ValueError(f"a tensor of shape {list(shape)} has {len(strides)} strides")
    return LoggedTensor(shape, str(value["dtype"]), strides, int(value["start"]), int(value["stop"]))


def _raise_unreadable(message: str, location: Location, help: str | None = None) -> NoReturn:
    raise PlanFileError(UNREADABLE_LOG.finding(message, location, help))
