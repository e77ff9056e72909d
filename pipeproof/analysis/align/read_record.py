"""Reads a record step by step: never more than one step is held."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from pipeproof.analysis.align.align_errors import AlignmentError
from pipeproof.analysis.align.record_format import FORMAT, RECORD_FILE, Header, OtherRecorded, Recorded, RecordedStep
from pipeproof.foreign_text import MALFORMED, ForeignTextError, decode_json, open_foreign_text

MAX_LINE = 2**24
"""Longest line of a record or of a training log, in characters."""


class RecordFile:
    """A record on disk; ``steps`` reads it from the beginning each time.

    Raises:
        AlignmentError: the file cannot be read or its first line is no header of a record of this format.
    """

    def __init__(self, path: Path) -> None:
        self.file = path / RECORD_FILE if path.is_dir() else path
        self.directory = self.file.parent
        with _opened(self.file) as stream:
            self.header = self._header(stream.readline(MAX_LINE + 1))

    def steps(self) -> Iterator[RecordedStep]:
        """Each finished step, in order.

        Raises:
            AlignmentError: a line is not of the schema, steps do not count up, or the file ends in the midst of a step.
        """
        with _opened(self.file) as stream:
            stream.readline(MAX_LINE + 1)
            tensors: list[Recorded] = []
            last = -1
            for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE + 1), ""), start=2):
                content = self._parsed(line, number)
                try:
                    if content["kind"] == "step":
                        step = _step(content, tuple(tensors))
                        _require(step.step > last, f"step {step.step} after step {last}")
                        last, tensors = step.step, []
                        yield step
                    else:
                        _require(content["kind"] in ("tensor", "gradient"), f"kind {content['kind']!r}")
                        tensors.append(Recorded.from_json(content))
                except MALFORMED as error:
                    raise AlignmentError(f"{self.file}:{number}: no line of a record: {_reason(error)}") from error
            if tensors:
                raise AlignmentError(
                    f"{self.file}: the file ends in the midst of step {tensors[-1].step}; "
                    "it was cut off: copy it again, or take the lines after the last finished step away"
                )

    def _header(self, line: str) -> Header:
        content = self._parsed(line, 1)
        try:
            _require(content["kind"] == "record", f"kind {content['kind']!r}")
            _require(
                content["format"] == FORMAT,
                f"format {content['format']!r}, this pipeproof reads format {FORMAT}: record both with one version",
            )
            return Header(**{field.name: content[field.name] for field in fields(Header)})
        except MALFORMED as error:
            raise AlignmentError(f"{self.file}:1: no header of a record: {_reason(error)}") from error

    def _parsed(self, line: str, number: int) -> dict[str, Any]:
        if len(line) > MAX_LINE:
            raise AlignmentError(f"{self.file}:{number}: the line has more than {MAX_LINE:,} characters")
        if not line.endswith("\n"):
            raise AlignmentError(f"{self.file}:{number}: the last line is cut off; copy the file again")
        try:
            content = decode_json(line)
        except ForeignTextError as error:
            raise AlignmentError(f"{self.file}:{number}: no JSON: {error}; copy the file again") from error
        if not isinstance(content, dict):
            raise AlignmentError(f"{self.file}:{number}: a line of a record is an object")
        return content


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _step(content: dict[str, Any], tensors: tuple[Recorded, ...]) -> RecordedStep:
    others = tuple(map(OtherRecorded.from_json, content.get("others", ())))
    step = RecordedStep(int(content["step"]), str(content["loss"]), str(content["loss_md5"]), tensors, others)
    math.copysign(1.0, float(step.loss))  # a number, or a ValueError
    counted = (content["tensors"], content["gradients"])
    found = (sum(not t.parameter for t in tensors), sum(bool(t.parameter) for t in tensors))
    _require(
        counted == found,
        f"the end of step {step.step} counts {counted[0]} tensors and {counted[1]} gradients, before it are "
        f"{found[0]} and {found[1]}",
    )
    _require(all(t.step == step.step for t in tensors), f"lines of another step precede the end of {step.step}")
    _require(len({one.name for one in others}) == len(others), f"step {step.step} names another loss twice")
    _require(len({t.key for t in tensors}) == len(tensors), f"step {step.step} names a tensor twice")
    return step


@contextmanager
def _opened(file: Path) -> Iterator[IO[str]]:
    try:
        with open_foreign_text(file) as stream:
            yield stream
    except OSError as error:
        raise AlignmentError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise AlignmentError(f"{file}: not UTF-8 text: {error.reason}") from error


def _reason(error: Exception) -> str:
    return f"key {error} is missing" if isinstance(error, KeyError) else str(error)
