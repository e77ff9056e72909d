"""Reading the logs of all ranks. Strict: a line that says something else than it must is refused with its place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from pipeproof.interop.record.codes import UNREADABLE_LOG
from pipeproof.interop.record.log import LoggedCall, LoggedGroup, LoggedTensor, LoggedWait, Mark, RankLog
from pipeproof.interop.record.recorder import VERSION
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.load import PlanFileError

_NAME: Final = re.compile(r"rank_(0|[1-9]\d*)\.jsonl", re.ASCII)
_OPS: Final = frozenset(
    {
        "send", "recv", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
        "scatter", "barrier",
    }
)  # fmt: skip
MAX_BYTES: Final = 2**29
"""Largest log of a rank."""


def read_logs(directory: Path) -> tuple[RankLog, ...]:
    """The logs ``rank_N.jsonl`` in a directory, by rank.

    Raises:
        PlanFileError: PP940, there is none, or one cannot be read.
    """
    if not directory.is_dir():
        _refuse(f"`{directory}` is no directory", Location(str(directory), 1, 1))
    files = {int(match[1]): path for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    if not files:
        mend = "record with `pipeproof.interop.record.record_torch` or `record_paddle`, and name their directory"
        _refuse(f"`{directory}` has no `rank_N.jsonl`", Location(str(directory), 1, 1), mend)
    logs = tuple(_Reader(rank, files[rank]).read() for rank in sorted(files))
    first = logs[0]
    for log in logs:
        here = Location(log.file, 1, 1)
        if (log.num_ranks, log.framework) != (first.num_ranks, first.framework):
            theirs = f"{log.num_ranks} ranks on {log.framework}"
            _refuse(
                f"this log is of {theirs}, that of rank {first.rank} of {first.num_ranks} on {first.framework}", here
            )
        if log.rank >= log.num_ranks:
            _refuse(f"rank {log.rank} of {log.num_ranks} ranks", here)
    return logs


class _Reader:
    def __init__(self, rank: int, path: Path) -> None:
        self._rank, self._path, self._line = rank, path, 0
        self._start: dict[str, Any] | None = None
        self._groups: dict[str, LoggedGroup] = {}
        self._events: list[LoggedCall | LoggedWait] = []
        self._places: dict[int, int] = {}
        self._done: set[int] = set()
        self._created: list[tuple[int, ...]] = []
        self._ended = False
        self._error: tuple[str, Location] | None = None

    def read(self) -> RankLog:
        for text in self._lines():
            self._line += 1
            try:
                data = json.loads(text)
                self._take(data["event"], data)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                about = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
                _refuse(f"this line is no line of a log: {about}", self._here)
        if self._start is None:
            _refuse("this log is empty: its rank ended before it wrote anything", Location(str(self._path), 1, 1))
        raised, place = self._error or (None, None)
        return RankLog(
            self._rank, self._start["num_ranks"], self._start["framework"], str(self._path), tuple(self._events),
            frozenset(self._done), tuple(self._created), self._groups, self._ended, raised, place,
        )  # fmt: skip

    def _lines(self) -> Sequence[str]:
        try:
            if self._path.stat().st_size > MAX_BYTES:
                _refuse(f"this log is larger than {MAX_BYTES // 2**20} MiB: record fewer steps", self._here)
            lines = self._path.read_bytes().decode("utf-8", errors="replace").split("\n")
        except OSError as error:
            _refuse(f"this log cannot be read: {error.strerror}", self._here)
        return lines[:-1]  # what follows the last line break is a line that was cut short

    @property
    def _here(self) -> Location:
        return Location(str(self._path), max(self._line, 1), 1)

    def _take(self, event: str, data: Mapping[str, Any]) -> None:
        if (event == "start") != (self._start is None):
            raise ValueError("`start` is the first line, and only that")
        if self._ended:
            raise ValueError("something follows `end`")
        match event:
            case "start":
                if data["version"] != VERSION:
                    raise ValueError(f"it has version {data['version']} of the format; {VERSION} is read")
                if data["rank"] != self._rank:
                    raise ValueError(f"it is of rank {data['rank']}, and the file's name says {self._rank}")
                self._start = {"num_ranks": int(data["num_ranks"]), "framework": str(data["framework"])}
            case "group":
                ranks = tuple(map(int, data["ranks"]))
                opened = data.get("about") == "eager"
                self._groups[data["group"]] = LoggedGroup(data["group"], ranks, str(data["backend"]), opened)
            case "create":
                self._created.append(tuple(map(int, data["ranks"])))
            case "call":
                self._places[int(data["seq"])] = len(self._events)
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
                raise ValueError(f"no event is called {event!r}")

    def _finish(self, of: Sequence[int], source: int | None) -> None:
        self._done.update(of)
        for seq in of if source is not None else ():
            place = self._places[seq]
            call = self._events[place]
            if isinstance(call, LoggedCall) and call.peer is None:
                self._events[place] = replace(call, peer=int(source or 0))

    def _numbers(self, value: Sequence[Any]) -> tuple[int, ...]:
        numbers = tuple(map(int, value))
        unknown = [seq for seq in numbers if seq not in self._places]
        if unknown:
            raise ValueError(f"no call before it has the number {unknown[0]}")
        return numbers

    def _call(self, data: Mapping[str, Any]) -> LoggedCall:
        op, group = str(data["op"]), self._groups.get(data["group"])
        if op not in _OPS:
            raise ValueError(f"no operation is called {op!r}")
        if group is None:
            raise ValueError(f"no group {data['group']!r} was told of before")
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
    return tuple(
        LoggedTensor(tuple(map(int, value["shape"])), str(value["dtype"]), int(value["start"]), int(value["stop"]))
        for value in values
    )


def _refuse(message: str, place: Location, help: str | None = None) -> NoReturn:
    raise PlanFileError(Finding(UNREADABLE_LOG.code, Severity.ERROR, message, place, help))
