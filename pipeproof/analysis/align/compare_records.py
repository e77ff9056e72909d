"""Comparison of two records, or of two logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path

from pipeproof.analysis.align.array_digests import rounding_bound
from pipeproof.analysis.align.first_difference import TensorAlignment, TensorComparison, paired_steps
from pipeproof.analysis.align.loss_pairs import LossAlignment, Tolerance, align_losses
from pipeproof.analysis.align.read_record import Record, open_record, parts_of, rank_files
from pipeproof.analysis.align.record_format import DECIMALS, RECORD_FILE, AlignmentError, RecordedStep
from pipeproof.analysis.align.record_map import MapFile, RecordMap
from pipeproof.analysis.align.training_logs import LogForm, Observed, log_parts
from pipeproof.foreign_text import open_foreign


@dataclass(frozen=True)
class Alignment:
    """The result. ``tensors`` is None for logs; ``notes`` list everything that could not be compared."""

    losses: LossAlignment
    tensors: TensorAlignment | None
    tolerance: Tolerance
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if everything compared is equal within the tolerance, and nothing lacks a partner."""
        return self.losses.equal and (self.tensors is None or self.tensors.equal)


def align(
    a: Path,
    b: Path,
    tolerance: Tolerance,
    forms: tuple[LogForm, LogForm] = (LogForm(), LogForm()),
    report_step: Callable[[int], None] = lambda _: None,
    names: tuple[str, str] | None = None,
    map_file: MapFile | None = None,
) -> Alignment:
    """Compare ``a`` with ``b``: two records, or two text logs, which ``forms`` describe.

    ``report_step`` is called with the number of each step. ``names`` are the naming conventions of two
    records, ``map_file`` has other partners.

    Raises:
        AlignmentError: a side cannot be read, the two are of different kinds, or they have nothing in common.
        AoaError: a statement of the map cannot be read, or does not fit the tensors.
    """
    records = [record_at(path) for path in (a, b)]
    if records[0] is not None and records[1] is not None:
        partners = RecordMap(records[0], records[1], names, map_file)
        return _align_records(records[0], records[1], tolerance, report_step, partners)
    if records[0] is not None or records[1] is not None:
        record, log = (a, b) if records[0] is not None else (b, a)
        raise AlignmentError(f"{record} is a record and {log} is none: compare two records, or two text logs")
    first, second = (chain.from_iterable(log_parts(*side)) for side in zip((a, b), forms, strict=True))
    losses = align_losses(_reporting(first, report_step), _reporting(second, report_step), tolerance)
    _require_common(losses, a, b)
    notes = ("where a log prints no MD5, the printed decimals were compared",) if losses.by_value else ()
    return Alignment(losses, None, tolerance, notes)


def record_at(path: Path) -> Record | None:
    """The record at a path, or of a training in parts; None for a log.

    Raises:
        AlignmentError: it is neither, or cannot be read.
    """
    parts = [_is_record(part) for part in parts_of(path)]
    if any(parts) and not all(parts):
        raise AlignmentError(f"{path}: some parts are records and others are logs")
    return open_record(path) if all(parts) else None


def _is_record(path: Path) -> bool:
    if path.is_dir():
        if not (path / RECORD_FILE).exists() and not rank_files(path):
            inner = sorted(one.parent.name for one in path.glob(f"*/{RECORD_FILE}"))
            hint = f"name {' or '.join(str(path / one) for one in inner)}" if inner else "name a record or one log file"
            raise AlignmentError(f"{path} is a directory without {RECORD_FILE}: {hint}")
        return True
    try:
        with open_foreign(path) as stream:
            beginning = stream.read(1)
    except OSError as error:
        raise AlignmentError(f"cannot read {path}: {error.strerror or error}") from error
    return path.suffix == ".jsonl" or beginning == b"{"


def _reporting(observations: Iterator[Observed], report_step: Callable[[int], None]) -> Iterator[Observed]:
    last = -1
    for observed in observations:
        if observed.step != last:
            last = observed.step
            report_step(last)
        yield observed


def _align_records(
    a: Record, b: Record, tolerance: Tolerance, report_step: Callable[[int], None], partners: RecordMap
) -> Alignment:
    losses = LossAlignment()
    tensors = TensorComparison(a, b, tolerance, partners)
    bound = rounding_bound(a.header.dtype) if tolerance.rounding else 0.0
    of_losses = replace(tolerance, relative=max(tolerance.relative, bound))
    has_common = False
    for step_a, step_b in paired_steps(a, b, report_step):
        if step_a is not None and step_b is not None:
            has_common = True
            _put_losses(losses, step_a, step_b, of_losses, a.header.dtype, partners.loss_factor())
            tensors.put(step_a, step_b)
        elif step_a is not None:
            losses.miss(0, loss_of(step_a))
        elif step_b is not None:
            losses.miss(1, loss_of(step_b))
    if not has_common:
        counted = " and ".join(
            f"{side} {'none' if one is None else f'{number} from step {one.step} on'}"
            for side, number, one in zip("AB", losses.unpaired, losses.examples, strict=True)
        )
        raise AlignmentError(f"{a.file} and {b.file} have no finished step in common: {counted}")
    if tensors.found.num_compared == 0:
        raise AlignmentError(
            f"{a.file} and {b.file} have no tensor in common: give the names of both (`--names-a`, `--names-b`), or a "
            f"map, which `state align --draft` proposes; {tensors.found.example}"
        )
    return Alignment(losses, tensors.found, tolerance, tuple(_notes(a, b)))


def _put_losses(
    losses: LossAlignment, a: RecordedStep, b: RecordedStep, tolerance: Tolerance, dtype: str, factor: Fraction
) -> None:
    """The main loss and the other losses of a step, paired by name; A's times ``factor``."""
    a = a if factor == 1 else _times(a, factor)
    if a.loss is not None or b.loss is not None:
        losses.put(loss_of(a), loss_of(b), tolerance, dtype)
    have_parts = all(any(one.name.startswith("main/") for one in step.others) for step in (a, b))
    others_a, others_b = (
        {one.name: one for one in step.others if have_parts or not one.name.startswith("main/")} for step in (a, b)
    )  # a record of `Pipeline.record` has none of micro-batches
    for name in dict.fromkeys((*others_a, *others_b)):
        seen = [
            None if one is None else Observed(a.step, one.name, "loss", None, None, one.loss, one.md5 or None)
            for one in (others_a.get(name), others_b.get(name))
        ]
        if seen[0] is not None and seen[1] is not None:
            losses.put(seen[0], seen[1], tolerance, dtype)
        elif seen[0] is not None:
            losses.miss(0, seen[0])
        elif seen[1] is not None:
            losses.miss(1, seen[1])


def _times(step: RecordedStep, factor: Fraction) -> RecordedStep:
    def scaled(loss: str | None) -> str | None:
        return None if loss is None else f"{float(loss) * float(factor):.{DECIMALS}f}"

    others = tuple(replace(one, loss=scaled(one.loss), md5="") for one in step.others)
    return replace(step, loss=scaled(step.loss), loss_md5=None, others=others)


def loss_of(step: RecordedStep) -> Observed:
    """The main loss of a recorded step."""
    return Observed(step.step, "main", "loss", None, None, step.loss, step.loss_md5)


def _require_common(losses: LossAlignment, a: Path, b: Path) -> None:
    if losses.main.steps or losses.mtp.steps:
        return
    if not any(losses.unpaired):
        raise AlignmentError(
            f"neither {a} nor {b} shows a loss: known are lines with `loss:` and `global_step:`, and the anchors "
            "`final_loss:`, `per_token_loss:` and `[MTP_LOSS_PATH_MD5]`"
        )
    shown = " and ".join(
        f"{side} has {'none' if one is None else _described(one)}"
        for side, one in zip("AB", losses.examples, strict=True)
    )
    raise AlignmentError(f"{a} and {b} have no loss in common: {shown}; see --rank-a, --rank-b, --order-a, --order-b")


def _described(observed: Observed) -> str:
    rank = "" if observed.rank is None else f" on rank {observed.rank}"
    return f"`{observed.what}` ({observed.loss}) of step {observed.step}{rank}"


def _notes(a: Record, b: Record) -> Iterator[str]:
    first, second = a.header, b.header
    if first.dtype != second.dtype:
        yield f"A computed in {first.dtype}, B in {second.dtype}"
    if first.digest != second.digest and first.digest and second.digest:
        yield f"the plans differ: digests {first.digest[:12]} and {second.digest[:12]}"
    for side, record, other in (("A", a, b), ("B", b, a)):
        if other.header.layers and not record.header.layers:
            yield f"{side} has no tensors of layers (`run --record-layers`): gradients of weights were compared"
        if not record.header.values:
            how = "`names=` of `record_layers`" if record.header.who == "program" else "`run --record-values`"
            yield f"{side} has no values ({how}): only MD5s and norms were compared"
