"""Reader of the traces of PyTorch's profiler (Kineto): Chrome trace JSON, plain or compressed by gzip.

The file is one object. ``traceEvents`` is the list of events; before it or after it are ``distributedInfo`` with the
rank, ``deviceProperties`` with the GPUs, ``host_name`` and ``baseTimeNanoseconds``, to which the microseconds of all
times (``ts``, ``dur``) are relative. Of the complete events (``ph`` is X) the reader uses, by ``cat``:

- ``user_annotation``: a range of ``record_function``; gloo's transfers are such ranges, too, from post to end;
- ``kernel``, ``gpu_memcpy``, ``gpu_memset``: work of a GPU, with the ``args.correlation`` of its launch;
- ``cuda_runtime``, ``cuda_driver``: calls of the host, with ``args.correlation``;
- ``cpu_op``: operators. In a run without GPU they are its work.

Events are decoded one by one from a window of the text: memory depends only on the kept events.
"""

from __future__ import annotations

import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any

from pipeproof.foreign_text import MALFORMED, open_foreign_text
from pipeproof.interop.json_stream import JsonStream
from pipeproof.interop.profiles.profile_codes import unreadable
from pipeproof.interop.profiles.rank_trace import NamedRange, RankTrace, Work, by_start, rank_of_name

MAX_TEXT = 2**34
"""Largest trace: bytes of its JSON text, decompressed."""
MAX_KEPT = 20_000_000
"""Largest number of kept events of one trace: at about 200 bytes each, they fit into memory."""
_MAX_NS = 2**63
"""Limit of a time: the profiler's integers."""

_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_AGAIN = "export the trace again, and let the program end before the file is copied"


def read_kineto(path: Path) -> RankTrace:
    """Read one trace.

    Raises:
        BadPlanError: PP163, it is not one, is cut off, or is too large.
    """
    try:
        with open_foreign_text(path) as stream:
            return _Collected(path).read(JsonStream(stream, partial(unreadable, str(path), remedy=_AGAIN), MAX_TEXT))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise unreadable(str(path), f"the trace cannot be read: {error}", _AGAIN) from error


class _Collected:
    """Kept parts of the events."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header: dict[str, Any] = {}
        self._ranges: list[NamedRange] = []
        self._operators: list[Work] = []
        self._kernels: list[tuple[int, int, str, Any]] = []
        self._launches: dict[Any, int] = {}

    def read(self, stream: JsonStream) -> RankTrace:
        has_events = False
        for key in stream.members():
            if key == "traceEvents" and stream.peek() == "[":
                has_events = True
                for event in stream.items():
                    self._add(stream, event)
            else:
                self._header[key] = stream.value()
        if not has_events:
            raise unreadable(
                str(self._path), "the file is JSON without `traceEvents`", "export it by `export_chrome_trace`"
            )
        return self._trace()

    def _add(self, stream: JsonStream, event: Any) -> None:
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        kind, name = event.get("cat"), event.get("name")
        if not isinstance(kind, str) or kind not in _KEPT or not isinstance(name, str):
            return
        try:
            start = nanoseconds(event["ts"])
            end = start + nanoseconds(event.get("dur", 0))
        except MALFORMED as error:
            raise stream.error(f"the event `{name}` has no time") from error
        if kind == "user_annotation":
            self._ranges.append(NamedRange(name, start, end))
        elif kind == "cpu_op":
            if not self._kernels:
                self._operators.append(Work(start, start, end, sys.intern(name)))
        else:
            arguments = event.get("args")
            correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
            if not isinstance(correlation, int | str):
                correlation = None
            if kind in _LAUNCHES:
                self._launches[correlation] = start
            else:
                self._kernels.append((start, end, sys.intern(name), correlation))
                self._operators.clear()
        if len(self._ranges) + len(self._operators) + len(self._kernels) + len(self._launches) > MAX_KEPT:
            raise unreadable(str(self._path), f"the trace has more than {MAX_KEPT} events", "profile fewer steps")

    def _trace(self) -> RankTrace:
        try:
            base = int(self._header.get("baseTimeNanoseconds", 0))
        except MALFORMED as error:
            raise unreadable(str(self._path), "`baseTimeNanoseconds` is not a number", _AGAIN) from error
        info, devices = self._header.get("distributedInfo"), self._header.get("deviceProperties")
        rank = info.get("rank") if isinstance(info, dict) else None
        launches = [self._launches.get(correlation) for *_, correlation in self._kernels]
        work = self._operators
        if self._kernels:
            work = [
                Work(start if launch is None else launch, start, end, name)
                for (start, end, name, _), launch in zip(self._kernels, launches, strict=True)
            ]
        first = devices[0] if isinstance(devices, list) and devices else None
        named = first.get("name") if isinstance(first, dict) else None
        return RankTrace(
            str(self._path),
            rank if isinstance(rank, int) else rank_of_name(self._path.name),
            sorted((NamedRange(name, base + start, base + end) for name, start, end in self._ranges), key=by_start),
            sorted(Work(base + w.launched_ns, base + w.start_ns, base + w.end_ns, w.name) for w in work),
            str(self._header.get("host_name", "")),
            str(named or "GPU") if self._kernels else "",
            launches.count(None),
        )


_KEPT = _WORK | _LAUNCHES | {"user_annotation", "cpu_op"}


def nanoseconds(us: object) -> int:
    """Return the nanoseconds of microseconds that are an integer, or the text of a decimal number.

    Raises:
        ValueError: the text is not a number, or it is negative or too large.
        TypeError: it is neither.
    """
    if isinstance(us, bool) or not isinstance(us, int | str):
        raise TypeError(us)
    whole, _, part = str(us).partition(".")
    digits = whole + part
    if not (digits.isascii() and digits.isdigit() and whole and len(whole) < len(str(_MAX_NS)) - 3):
        return _rounded(str(us))
    return int(whole) * 1000 + int((part + "000")[:3]) + (part[3:4] >= "5")


def _rounded(text: str) -> int:
    """Return the nanoseconds of a number in another notation, such as 1e6."""
    time = float(text) * 1000
    if not 0 <= time < _MAX_NS:
        raise ValueError(text)
    return round(time)
