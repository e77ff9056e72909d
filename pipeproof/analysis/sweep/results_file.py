"""The results file of a sweep: JSON lines, appended point by point, from which a sweep resumes.

Its first line names the sweep by digest, and the version of the rules by which
points were checked. A line that was cut short, because
the machine went down while it was written, is taken away and its point is
computed again; any other damage is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pipeproof.analysis.sweep.evaluate_point import PointResult
from pipeproof.analysis.sweep.sweep_points import Sweep
from pipeproof.foreign_text import MALFORMED, decode_json
from pipeproof.system_calls import lock_file
from pipeproof.verify.certificate import RULE_SET_VERSION

_FORMAT = 1


class ResultsFileError(ValueError):
    """A results file that cannot be resumed; the message has its path and the remedy."""


class ResultsFile:
    """An open results file: what it had, and room for more."""

    def __init__(self, stream: IO[bytes], done: dict[str, PointResult], note: str | None) -> None:
        self._stream = stream
        self.done = done
        """Results by the id of their point, as they were found; appended ones are not added."""
        self.note = note
        """Repair of the file, to be reported to the user; None without one."""

    def append(self, result: PointResult) -> None:
        """Add a line, so that it is there even if this process is killed next."""
        self._stream.write(_line(result.to_json()))
        self._stream.flush()


@contextmanager
def open_results(path: Path, sweep: Sweep) -> Iterator[ResultsFile]:
    """Open the results file of a sweep, making it if it is not there; nobody else writes to it meanwhile.

    Raises:
        ResultsFileError: another sweep writes to it or wrote it, or it is no results file.
        OSError: it cannot be opened.
    """
    with path.open("a+b") as stream:
        if not lock_file(stream.fileno()):
            raise ResultsFileError(f"{path}: another process writes to it; wait for it to end")
        stream.seek(0)
        content = stream.read()
        lines = content.split(b"\n")
        cut = lines.pop()  # nothing, if the last line is whole
        note = None
        if cut:
            _require_ours(path, lines or [cut], sweep, whole=bool(lines))
            os.truncate(stream.fileno(), len(content) - len(cut))
            note = f"{path}: the last line was cut short; it is removed"
        elif lines:
            _require_ours(path, lines, sweep, whole=True)
        if not lines:
            stream.write(_line(_head(sweep)))
            stream.flush()
        yield ResultsFile(stream, _results(path, lines, sweep), note)


def _head(sweep: Sweep) -> dict[str, Any]:
    return {
        "pipeproof_sweep": _FORMAT,
        "digest": sweep.digest,
        "plan": Path(sweep.plan_file).name,
        "rule_set_version": RULE_SET_VERSION,
    }


def _require_ours(path: Path, lines: list[bytes], sweep: Sweep, *, whole: bool) -> None:
    """Refuse what another sweep, or something else, wrote; of a first line that was cut short only its beginning."""
    if not whole:
        if not _line(_head(sweep)).startswith(lines[0]):
            raise ResultsFileError(f"{path}: it is no results file of a sweep; name another one")
        return
    head = _json(lines[0])
    if head is None or head.get("pipeproof_sweep") != _FORMAT:
        raise ResultsFileError(f"{path}:1: it is no results file of a sweep; name another one")
    found = str(head.get("digest"))
    if found != sweep.digest:
        raise ResultsFileError(
            f"{path}: it has the results of another sweep, digest {found[:12]}, and this one has {sweep.digest[:12]} "
            "(the points, the plan, a file that it names or pipeproof's version are not the same); name another file, "
            "or remove this one"
        )
    if head.get("rule_set_version") != RULE_SET_VERSION:
        raise ResultsFileError(
            f"{path}: its points were checked by rule set version {head.get('rule_set_version')}, and this pipeproof "
            f"has {RULE_SET_VERSION}: verdicts may differ; name another file, or remove this one"
        )


def _results(path: Path, lines: list[bytes], sweep: Sweep) -> dict[str, PointResult]:
    known = {point.id for point in sweep.points}
    results = {}
    for number, line in enumerate(lines[1:], start=2):
        content = _json(line)
        try:
            result = PointResult.from_json(content or {})
        except MALFORMED as error:
            raise ResultsFileError(f"{path}:{number}: the line is no result; remove it, or the file") from error
        if result.id not in known:
            raise ResultsFileError(f"{path}:{number}: the sweep has no point {result.id}; remove the line, or the file")
        results[result.id] = result
    return results


def _json(line: bytes) -> dict[str, Any] | None:
    try:
        content = decode_json(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"
