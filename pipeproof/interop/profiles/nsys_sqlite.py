"""Reader of SQLite exports of Nsight Systems: ``nsys export --type sqlite report.nsys-rep``.

Tables and columns that are read; times are integers of nanoseconds of one clock for all processes of a report:

- ``StringIds``: ``id``, ``value``, the texts of all names;
- ``NVTX_EVENTS``: ``start``, ``end``, ``eventType`` (59: a range that is pushed and popped, 60: one that is started and
  ended), ``text`` or else ``textId``, ``globalTid``;
- ``CUPTI_ACTIVITY_KIND_RUNTIME``: ``start``, ``globalTid``, ``correlationId`` of each call of the host;
- ``CUPTI_ACTIVITY_KIND_KERNEL``: ``start``, ``end``, ``deviceId``, ``correlationId``, ``globalPid``,
  ``demangledName``;
- ``CUPTI_ACTIVITY_KIND_MEMCPY`` and ``CUPTI_ACTIVITY_KIND_MEMSET``, where they are there: the same without a name;
- ``TARGET_INFO_GPU``, where it is there: ``name``.

Nsight Systems creates a table with the first event of its kind. A ``globalTid`` holds the process in bits 24 to 47 and
the thread in bits 0 to 23, a ``globalPid`` the process in the same bits. Correlation ids are unique in a process. The
columns are those of Nsight Systems 2021.5 and later. The file is opened read-only.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeproof.interop.profiles.profile_codes import not_assigned, unreadable
from pipeproof.interop.profiles.rank_trace import NO_THREAD, NamedRange, RankTrace, Work, by_start, rank_of_name

SQLITE_MAGIC = b"SQLite format 3\0"

_COLUMNS = {
    "StringIds": ("id", "value"),
    "NVTX_EVENTS": ("start", "end", "eventType", "globalTid", "text", "textId"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "globalTid", "correlationId"),
    "CUPTI_ACTIVITY_KIND_KERNEL": ("start", "end", "deviceId", "correlationId", "globalPid", "demangledName"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("start", "end", "deviceId", "correlationId", "globalPid"),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("start", "end", "deviceId", "correlationId", "globalPid"),
}
_TEXTS = frozenset({"value", "text", "textId"})
"""Columns that are not integers, or may be empty."""
_REQUIRED = ("StringIds", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_KERNEL")
_COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_RANGES = (59, 60)
_AGAIN = "record with `nsys profile --trace=cuda,nvtx` and export by `nsys export --type sqlite`"


def read_nsys(path: Path) -> list[RankTrace]:
    """Read the processes of one export that use a GPU.

    The rank is in the name of the file, or, for a file of several processes, it is the device of the process, if each
    process has a device of its own.

    Raises:
        BadPlanError: PP163, it is not an export; PP164, the ranks of its processes are not known.
    """
    try:
        connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True)
        try:
            return _Export(path, connection).traces()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise unreadable(str(path), f"the database cannot be read: {error}", _AGAIN) from error


class _Export:
    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path, self._connection = path, connection
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        self._tables = tables
        if missing := [name for name in _REQUIRED if name not in tables]:
            raise unreadable(str(path), f"the database has no table {missing[0]}", _AGAIN)
        for table in tables & _COLUMNS.keys():
            columns = {row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')}
            if lacking := [name for name in _COLUMNS[table] if name not in columns]:
                raise unreadable(str(path), f"table {table} has no column {lacking[0]}", _AGAIN)
        self._names = {number: str(value) for number, value in self._rows("StringIds")}

    def traces(self) -> list[RankTrace]:
        ranges: dict[int, list[NamedRange]] = defaultdict(list)
        for start, end, kind, thread, text, text_id in self._rows("NVTX_EVENTS"):
            name = text if text is not None else self._names.get(text_id)
            if kind in _RANGES and name:
                ranges[_process(thread)].append(NamedRange(str(name), start, end))
        launches = {
            (_process(thread), correlation): (start, thread & 0xFFFFFF)
            for start, thread, correlation in self._rows("CUPTI_ACTIVITY_KIND_RUNTIME")
        }
        work: dict[int, list[Work]] = defaultdict(list)
        devices: dict[int, set[int]] = defaultdict(set)
        for start, end, device, correlation, process, name in self._device_work():
            number = _process(process)
            launched, thread = launches.get((number, correlation), (start, NO_THREAD))
            work[number].append(Work(launched, start, end, name, thread))
            devices[number].add(device)
        return [
            RankTrace(
                str(self._path),
                rank,
                sorted(ranges[process], key=by_start),
                sorted(work[process]),
                self._path.name,
                self._device_name(),
                sum(each.thread == NO_THREAD for each in work[process]),
            )
            for process, rank in self._ranks(devices).items()
        ]

    def _rows(self, table: str) -> Iterator[Any]:
        """Yield the rows of a table, if it is there, without those that lack an integer: unfinished ranges.

        Raises:
            BadPlanError: PP163, a value is not an integer.
        """
        if table not in self._tables:
            return
        columns = ", ".join(f'"{name}"' for name in _COLUMNS[table])
        integers = [place for place, name in enumerate(_COLUMNS[table]) if name not in _TEXTS]
        for row in self._connection.execute(f'SELECT {columns} FROM "{table}"'):  # noqa: S608 - constant names
            values = [row[place] for place in integers]
            if not all(isinstance(value, int | None) for value in values):
                raise unreadable(str(self._path), f"table {table} has a value that is not an integer", _AGAIN)
            if None not in values:
                yield row

    def _device_work(self) -> Iterator[tuple[int, int, int, int, int, str]]:
        for *values, name in self._rows("CUPTI_ACTIVITY_KIND_KERNEL"):
            yield *values, self._names.get(name, "")
        for table in _COPIES:
            for values in self._rows(table):
                yield *values, table

    def _device_name(self) -> str:
        if "TARGET_INFO_GPU" in self._tables:
            row = self._connection.execute("SELECT name FROM TARGET_INFO_GPU LIMIT 1").fetchone()
            if row is not None and row[0]:
                return str(row[0])
        return "GPU"

    def _ranks(self, devices: dict[int, set[int]]) -> dict[int, int | None]:
        """Return the rank of each process that used a GPU."""
        named = rank_of_name(self._path.name)
        if len(devices) == 1:
            return dict.fromkeys(devices, named)
        used = [min(of_process) for of_process in devices.values() if len(of_process) == 1]
        if named is None and sorted(used) == list(range(len(devices))):
            return {process: min(of_process) for process, of_process in devices.items()}
        raise not_assigned(
            str(self._path),
            f"{len(devices)} processes use GPUs, and their ranks are not known",
            "record each rank in a file of its own, with `rank3` in its name (`nsys profile -o report_rank%q{RANK}`)",
        )


def _process(number: int) -> int:
    return number >> 24 & 0xFFFFFF
