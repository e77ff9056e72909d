"""A measurement of a training, and the plan that predicts it."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_args

from pipeproof.analysis.tune.layouts import near_even_blocks
from pipeproof.specs.cost import DeviceName

Row = TypeVar("Row")
GIB = 2**30
_IGNORED = re.compile(r",(?=\d{3}\b)|\[\^[^\]]*\]", re.ASCII)
"""Thousands separators, and footnotes such as ``[^note]``."""
EXPERTS_OVER_TP = (
    "experts over {ep} ranks, {tp} of them tensor-parallel, are experts over {rest} ranks, sharded over tp"
)
"""Note on experts that a training distributes over tensor-parallel ranks as well."""


class Quantity(StrEnum):
    """Quantity that is measured and predicted; the value is its name with the unit."""

    STEP = "step, s"
    COMPUTE = "forwards and backwards of a step, s"
    TOKENS = "tokens/s per GPU"
    ALLOCATED = "peak memory of the last rank, GiB"
    ALLOCATED_ANY = "largest peak memory, GiB"
    PAIR = "overlapped pair, ms"


@dataclass(frozen=True)
class Measurement:
    """One measured value, with the plan that predicts it or the reason why no plan can.

    ``plan`` has the keys of a plan file. ``notes`` name each setting of the
    training that the plan has only approximately. ``system`` and ``model``
    name the machines and what was trained on them: constants that a row is
    predicted with are fitted to rows of other ones.
    """

    group: str
    name: str
    quantity: Quantity
    measured: float
    plan: Mapping[str, Any] | None = field(repr=False)
    reason: str = ""
    notes: tuple[str, ...] = ()
    system: str = ""
    model: str = ""

    def __post_init__(self) -> None:
        assert (self.plan is None) == bool(self.reason), "a plan, or the reason why there is none"


class MeasurementFileError(ValueError):
    """A file of measurements that cannot be read; the message has the file, the position and the remedy."""


class NoPlanError(Exception):
    """A training that no plan can describe; the message is the reason."""


def measured_with_plan(
    group: str,
    name: str,
    quantity: Quantity,
    measured: float,
    make_plan: Callable[[], Mapping[str, Any]],
    *,
    system: str,
    model: str,
) -> Measurement:
    """Return a measurement with its plan, or with the reason of the ``NoPlanError`` that ``make_plan`` raises."""
    of = {"system": system, "model": model}
    try:
        return Measurement(group, name, quantity, measured, make_plan(), **of)
    except NoPlanError as error:
        return Measurement(group, name, quantity, measured, None, str(error), **of)


@dataclass(frozen=True)
class Cells:
    """The cells of a row with their location, for typed access."""

    path: Path
    line: int
    by_column: Mapping[str, str]

    def text(self, column: str) -> str:
        """Return a cell as it is."""
        return self.by_column[column]

    def number(self, column: str) -> float:
        """Return a cell as a positive number; thousands separators and footnotes of Markdown are ignored.

        Raises:
            MeasurementFileError: it is none.
        """
        text = self.by_column[column]
        try:
            value = float(_IGNORED.sub("", text))
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            message = f"{self.path}:{self.line}: `{column}` is `{text}`"
            raise MeasurementFileError(f"{message}; write a number greater than 0")
        return value

    def count(self, column: str, default: int | None = None) -> int:
        """Return a cell as a positive integer; ``default`` for an empty cell or ``n/a``.

        Raises:
            MeasurementFileError: it is none.
        """
        if default is not None and self.by_column[column] in ("", "n/a"):
            return default
        value = self.number(column)
        if value != int(value):
            message = f"{self.path}:{self.line}: `{column}` is `{self.by_column[column]}`"
            raise MeasurementFileError(f"{message}; write an integer")
        return int(value)


def rows_of_table(path: Path, columns: frozenset[str], unread: list[str]) -> Iterator[Cells]:
    """Yield the cells of each row of a CSV file; ``unread`` gets a line for one with another number of cells.

    Raises:
        MeasurementFileError: a column is missing.
    """
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        missing = sorted(columns - set(header))
        if missing:
            raise MeasurementFileError(f"{path}:1: the column `{missing[0]}` is missing; add it")
        for cells in filter(None, reader):
            if len(cells) == len(header):
                yield Cells(path, reader.line_num, dict(zip(header, map(str.strip, cells), strict=True)))
            else:
                message = f"{path}:{reader.line_num}: {len(cells)} cells, and the header has {len(header)}"
                unread.append(f"{message}; give each column a value")


def readable(
    rows: Iterable[Row], measure: Callable[[Row], Sequence[Measurement]], unread: list[str]
) -> Iterator[Measurement]:
    """Yield the measurements of rows; ``unread`` gets a line for each row that cannot be read."""
    for row in rows:
        try:
            yield from measure(row)
        except MeasurementFileError as error:
            unread.append(str(error))


def known_device(name: str) -> DeviceName:
    """Return the name of a device in plans for a name such as ``DGX-H100`` or ``dev_dgx_a100_2nd``.

    Raises:
        NoPlanError: pipeproof has no data sheet of it.
    """
    parts = name.lower().replace("-", "_").replace("dgxa", "dgx_a").replace("dgxh", "dgx_h").split("_")
    devices: tuple[DeviceName, ...] = get_args(DeviceName)
    known = [device for device in devices if device in parts]
    if not known:
        raise NoPlanError(f"pipeproof has no data sheet of {name}")
    return known[0]


def divided(total: int, parts: int, what: str) -> int:
    """Return ``total / parts``.

    Raises:
        NoPlanError: the quotient is not an integer.
    """
    if total % parts:
        raise NoPlanError(f"{what}: {total} does not divide by {parts}")
    return total // parts


def megatron_schedule(num_chunks: int, batch: int, replicas: int, micro_batch_size: int) -> dict[str, Any]:
    """Return ``schedule`` of a training by Megatron-LM; ``batch`` are the sequences of a step.

    Raises:
        NoPlanError: the micro-batches of all replicas do not divide the batch.
    """
    order = {"kind": "interleaved", "variant": "megatron", "num_chunks": num_chunks}
    return {
        **(order if num_chunks > 1 else {"kind": "1f1b"}),
        "num_micro_batches": divided(batch, replicas * micro_batch_size, "the batch over micro-batches"),
        "micro_batch_size": micro_batch_size,
        "reduce_gradients": "when_ready",
    }


def partition(num_layers: int, num_stages: int, num_modules: int = 0) -> list[list[str]]:
    """Return the layers of each stage as Megatron-LM partitions them.

    Equal stages where the blocks divide; where they divide only with the
    embedding and the head counted as a layer each, that partition; else as many
    blocks as fit, rounded up, on each stage but the last.

    Raises:
        NoPlanError: a stage would be empty.
    """
    if num_layers % num_stages == 0:
        blocks: list[int] | None = [num_layers // num_stages] * num_stages
    else:
        blocks = near_even_blocks(num_layers, num_stages)
    if blocks is None:
        raise NoPlanError(f"{num_layers} blocks leave one of {num_stages} stages empty")
    starts = [sum(blocks[:stage]) for stage in range(num_stages)]
    stages = [[f"layer.{start + i}" for i in range(number)] for start, number in zip(starts, blocks, strict=True)]
    stages[0].insert(0, "embed")
    stages[-1] += [*(f"mtp.{i}" for i in range(num_modules)), "norm", "head"]
    return stages
