"""Reads a record step by step: never more than one step is in memory."""

from __future__ import annotations

import math
import re
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from pipeproof.analysis.align.array_digests import Array
from pipeproof.analysis.align.record_format import (
    FORMAT,
    RECORD_FILE,
    AlignmentError,
    Header,
    Index,
    OtherRecorded,
    Recorded,
    RecordedStep,
    Shard,
    rank_values_file,
    value_name,
    values_file,
)
from pipeproof.diagnostics.problems import grouped
from pipeproof.foreign_text import MALFORMED, ForeignTextError, decode_json, open_foreign, open_foreign_text

MAX_LINE = 2**24
"""Longest line of a record or of a training log, in characters."""


@dataclass(frozen=True, slots=True)
class Values:
    """A tensor's whole value, and by rank the values that disagree with it."""

    whole: Array
    others: Mapping[int, Array]


class Record(Protocol):
    """A record on disk, in one file or in one for each rank."""

    header: Header
    file: Path

    def steps(self) -> Iterator[RecordedStep]:
        """Each finished step, in order.

        Raises:
            AlignmentError: a file is damaged.
        """

    def values(self, recorded: Recorded) -> Values | None:
        """The tensor itself; None if it was not kept.

        Raises:
            AlignmentError: a file of values cannot be read, or has another tensor.
        """


_RANK_FILE = re.compile(r"record\.rank(\d+)\.jsonl")


def rank_files(directory: Path) -> dict[int, Path]:
    """Files of a program's record by rank."""
    matches = ((_RANK_FILE.fullmatch(each.name), each) for each in directory.glob("record.rank*.jsonl"))
    return dict(sorted((int(match[1]), each) for match, each in matches if match is not None))


def parts_of(path: Path) -> list[Path]:
    """The parts of a training, in order: ``first,second``, where no file has that name."""
    return [path] if path.exists() else [Path(part) for part in str(path).split(",")]


def open_record(path: Path) -> Record:
    """The record at a directory or file, or of a training in parts.

    Raises:
        AlignmentError: it cannot be read, or is not a record.
    """
    parts = parts_of(path)
    if len(parts) > 1:
        return ContinuedRecord(path, [open_record(part) for part in parts])
    files = rank_files(path) if path.is_dir() and not (path / RECORD_FILE).exists() else {}
    return RankRecords(path, files) if files else RecordFile(path)


class RecordFile:
    """A record on disk; ``steps`` reads it from the beginning each time.

    Raises:
        AlignmentError: the file cannot be read or its first line is not a header of a record of this format.
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

    def values(self, recorded: Recorded) -> Values | None:
        """See ``Record``."""
        if not self.header.values:
            return None
        file = values_file(self.directory, recorded.step)
        with _arrays(file, recorded) as arrays:
            others = {
                int(name.rpartition("@")[2]): arrays[name]
                for name in arrays.files
                if name.rpartition("@")[0] == recorded.key
            }
            whole = arrays[recorded.key]
        if (tuple(whole.shape), whole.dtype.name) != (recorded.shape, recorded.dtype):
            raise AlignmentError(
                f"{file}: {recorded.title} is {whole.dtype} {list(whole.shape)} there, not as in the record"
            )
        return Values(whole, others)

    def _header(self, line: str) -> Header:
        content = self._parsed(line, 1)
        try:
            _require(content["kind"] == "record", f"kind {content['kind']!r}")
            _require(
                content["format"] == FORMAT,
                f"format {content['format']!r}, this pipeproof reads format {FORMAT}: record both with one version",
            )
            return Header(
                **{
                    field.name: content[field.name]
                    for field in fields(Header)
                    if field.name in content or field.default_factory is MISSING
                }
            )
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


class RankRecords:
    """Records of the ranks of one program, joined.

    Tensors of a step are in the order of micro-batches, forward before backward, and of time: clocks of hosts may
    differ by less than a stage takes.

    Raises:
        AlignmentError: a file cannot be read.
    """

    def __init__(self, directory: Path, files: Mapping[int, Path]) -> None:
        self.file, self._directory = directory, directory
        self._records = {rank: RecordFile(file) for rank, file in files.items()}
        headers = [record.header for record in self._records.values()]
        model = next((header.model for header in headers if header.model), {})
        self.header = replace(headers[0], model=model)

    def steps(self) -> Iterator[RecordedStep]:
        """See ``Record``; up to the last step that all ranks finished."""
        for steps in zip(*(record.steps() for record in self._records.values()), strict=False):
            numbers = {step.step for step in steps}
            if len(numbers) > 1:
                raise AlignmentError(f"{self.file}: ranks are at different steps: {sorted(numbers)}")
            by_key = grouped((tensor.key, tensor) for step in steps for tensor in step.tensors)
            tensors = [_joined(parts) for parts in by_key.values()]
            tensors.sort(key=lambda t: (bool(t.parameter), t.micro_batch, t.direction == "backward", t.time))
            with_loss = next((step for step in steps if step.loss is not None), steps[0])
            yield replace(with_loss, tensors=tuple(tensors))

    def values(self, recorded: Recorded) -> Values | None:
        """See ``Record``."""
        parts: dict[tuple[int, Index], Array] = {}
        for shard in recorded.shards:
            part = self._part(recorded, shard)
            if part is None:
                return None
            parts[shard.rank, shard.index] = part
        whole = np.zeros(recorded.shape, dtype=next(iter(parts.values())).dtype)
        for (_, index), part in reversed(parts.items()):
            whole[tuple(slice(*ends) for ends in index)] = part
        first = {shard.index: shard.md5 for shard in reversed(recorded.shards)}
        torn = [shard for shard in recorded.shards if shard.md5 != first[shard.index]]
        return Values(whole, {shard.rank: parts[shard.rank, shard.index] for shard in torn})

    def _part(self, recorded: Recorded, shard: Shard) -> Array | None:
        if not self._records[shard.rank].header.values:
            return None
        name = value_name(shard.md5, recorded.dtype)
        with _arrays(rank_values_file(self._directory, shard.rank, recorded.step), recorded) as arrays:
            if name not in arrays.files:
                return None
            array: Array = arrays[name].reshape([stop - start for start, stop in shard.index])
        return array


class ContinuedRecord:
    """Records of a training in parts; from the first step of a part on, earlier parts do not count.

    Raises:
        AlignmentError: a part has no finished step, or begins before the part that precedes it.
    """

    def __init__(self, path: Path, records: Sequence[Record]) -> None:
        self.file, self._records = path, records
        heads = [record.header for record in records]
        self.header = replace(
            heads[0],
            digest=heads[0].digest if len({head.digest for head in heads}) == 1 else "",
            layers=all(head.layers for head in heads),
            values=all(head.values for head in heads),
        )
        firsts = [next((step.step for step in record.steps()), None) for record in records]
        self._starts = [first for first in firsts if first is not None]
        if len(self._starts) < len(firsts) or sorted(set(self._starts)) != self._starts:
            raise AlignmentError(f"{path}: parts begin at steps {firsts}: name them in the order of training")

    def parts(self) -> Iterator[Iterator[RecordedStep]]:
        """The steps of each part."""
        for record, end in zip(self._records, [*self._starts[1:], math.inf], strict=True):
            yield takewhile(partial(_is_before, end), record.steps())

    def steps(self) -> Iterator[RecordedStep]:
        """See ``Record``."""
        return chain.from_iterable(self.parts())

    def values(self, recorded: Recorded) -> Values | None:
        """See ``Record``."""
        return self._records[bisect_right(self._starts, recorded.step) - 1].values(recorded)


def _is_before(end: float, step: RecordedStep) -> bool:
    return step.step < end


def _joined(parts: list[Recorded]) -> Recorded:
    """One line for the parts of a tensor on all ranks; parts give no digest of the whole."""
    shards = tuple(shard for part in parts for shard in part.shards)
    whole = tuple((0, size) for size in parts[0].shape)
    is_whole = all(shard.index == whole for shard in shards)
    by_index = {tuple(shard.index for shard in part.shards): part.norm for part in reversed(parts)}
    norm = parts[0].norm if is_whole else math.sqrt(sum(norm**2 for norm in by_index.values()))
    return replace(parts[0], md5=parts[0].md5 if is_whole else "", norm=norm, shards=shards)


@contextmanager
def _arrays(file: Path, recorded: Recorded) -> Iterator[Any]:
    try:
        with open_foreign(file) as stream, np.load(stream) as arrays:
            yield arrays
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = str(error) if file.exists() else "the file is not there; copy the whole directory"
        raise AlignmentError(f"{file}: no values of {recorded.title}: {reason}") from error


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _step(content: dict[str, Any], tensors: tuple[Recorded, ...]) -> RecordedStep:
    others = tuple(map(OtherRecorded.from_json, content.get("others", ())))
    loss, md5 = (None if content[key] is None else str(content[key]) for key in ("loss", "loss_md5"))
    step = RecordedStep(int(content["step"]), loss, md5, tensors, others)
    math.copysign(1.0, float(loss or "0"))  # a number, or a ValueError
    counted = (content["tensors"], content["gradients"])
    actual = (sum(not t.parameter for t in tensors), sum(bool(t.parameter) for t in tensors))
    _require(
        counted == actual,
        f"the end of step {step.step} counts {counted[0]} tensors and {counted[1]} gradients, before it are "
        f"{actual[0]} and {actual[1]}",
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
