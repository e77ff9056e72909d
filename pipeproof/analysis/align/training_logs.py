"""Losses in the text logs of trainings, as PaddleFormers, PaddleFleet and Megatron print them.

Three kinds of lines are read, and all others are ignored; in a line of a
kind, every value must be valid. Sources of the formats:

- ``paddleformers/trainer/trainer.py`` and ``trainer_callback.py``: pairs
  ``key: value`` joined by commas, among them ``loss`` (rounded to 8 decimals),
  ``global_step``, ``loss_md5`` on request, and ``mtp_1_loss``, ..;
- ``paddlefleet/models/common/language_loss/language_loss.py``: the anchors
  ``per_token_loss: rank= shape= md5=`` and ``final_loss: rank= val= md5=``, one
  for each micro-batch and loss, also printed by Megatron's side of
  ``scripts/alignment_model_accuracy`` in PaddleFleet, and
  ``[MTP_LOSS_PATH_MD5] rank= mtp1.final_loss= mtp1.final_loss_md5=``.

Anchors carry no step: they are counted, per rank.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeproof.analysis.align.read_record import MAX_LINE, parts_of
from pipeproof.analysis.align.record_format import AlignmentError
from pipeproof.foreign_text import open_foreign_text

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PAIR = re.compile(r"(?<![\w.])([A-Za-z_]\w*): ([^,\s]+)")
_FINAL = re.compile(r"final_loss:\s*rank=(?P<rank>\S+)\s+val=(?P<value>\S+)\s+md5=(?P<md5>\S+)")
_PER_TOKEN = re.compile(r"per_token_loss:\s*rank=(?P<rank>\S+)\s+shape=\[[^\]]*\]\s+md5=(?P<md5>\S+)")
_MTP = re.compile(
    r"\[MTP_LOSS_PATH_MD5\]\s+rank=(?P<rank>\S+)\s+mtp(?P<module>\d+)\.final_loss=(?P<value>\S+)"
    r"\s+mtp\d+\.final_loss_md5=(?P<md5>\S+)"
)
_MTP_KEY = re.compile(r"mtp_(\d+)_loss")
_MD5 = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Observed:
    """One loss that a log, or a record, shows.

    ``loss`` is ``main``, a name that begins with ``mtp``, or in a record a
    router's name; ``what`` is its line. ``rank`` and
    ``micro_batch`` are None for a step's own loss.
    ``value`` is as it was printed, None if there is only an MD5.
    """

    step: int
    loss: str
    what: str
    rank: int | None
    micro_batch: int | None
    value: str | None
    md5: str | None

    @property
    def key(self) -> tuple[int, str, str, int, int]:
        """Key of comparison."""
        return (
            self.step,
            self.loss,
            self.what,
            -1 if self.rank is None else self.rank,
            -1 if self.micro_batch is None else self.micro_batch,
        )


@dataclass(frozen=True, slots=True)
class LogForm:
    """Counting of a log: micro-batches per step, the order of losses within a step, and the rank to read, if any."""

    micro_batches: int = 1
    order: tuple[str, ...] = ("main",)
    rank: int | None = None


def log_parts(path: Path, form: LogForm) -> Iterator[Iterator[Observed]]:
    """The losses of each log of a training in parts, to be read in order; anchors are counted through all of them.

    From the first ``global_step`` of a part on, lines before it do not count.
    """
    counts: Counter[tuple[int, str]] = Counter()
    parts = parts_of(path)
    for position, part in enumerate(parts):
        following = (one for later in parts[position + 1 : position + 2] for one in read_log(later, form))
        end = next((one.step for one in following if one.what == "loss"), math.inf)
        yield (one for one in read_log(part, form, counts) if one.what != "loss" or one.step < end)


def read_log(path: Path, form: LogForm, counts: Counter[tuple[int, str]] | None = None) -> Iterator[Observed]:
    """All losses of a log, in its order; lines end with a newline or, in progress bars, with a carriage return.

    ``counts`` has the anchors that precede it.

    Raises:
        AlignmentError: the file cannot be read, or a line that shows a loss has an invalid value.
    """
    counts = Counter() if counts is None else counts
    try:
        with open_foreign_text(path, errors="replace") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE + 1), ""), start=1):
                if len(line) > MAX_LINE:
                    raise AlignmentError(f"{path}:{number}: the line has more than {MAX_LINE:,} characters")
                if "loss" in line:
                    for observed in _line(_Line(f"{path}:{number}", _COLOUR.sub("", line)), form, counts):
                        if form.rank is None or observed.rank in (None, form.rank):
                            yield observed
    except OSError as error:
        raise AlignmentError(f"cannot read {path}: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class _Line:
    place: str
    text: str

    def number(self, word: str) -> str:
        """A loss as it was printed."""
        try:
            float(word)
        except ValueError:
            raise self.refusal(f"{word!r} is not a loss") from None
        return word

    def whole(self, word: str, what: str) -> int:
        """A step or a rank."""
        if not word.isdecimal():
            raise self.refusal(f"{word!r} is not a {what}")
        return int(word)

    def md5(self, word: str) -> str:
        """32 hexadecimal digits."""
        if not _MD5.fullmatch(word):
            raise self.refusal(f"{word!r} is not an MD5 of 32 hexadecimal digits")
        return word

    def refusal(self, fact: str) -> AlignmentError:
        """Reason why this line cannot be read."""
        return AlignmentError(f"{self.place}: {fact}; a line that shows a loss must be whole")


def _line(line: _Line, form: LogForm, counts: Counter[tuple[int, str]]) -> Iterator[Observed]:
    pairs = dict(_PAIR.findall(line.text))
    if "loss" in pairs and "global_step" in pairs:
        yield from _trainer(line, pairs)
    for match in _PER_TOKEN.finditer(line.text):
        yield _anchor(line, match, "per_token_loss", form, counts)
    for match in _FINAL.finditer(line.text):
        yield _anchor(line, match, "final_loss", form, counts)
    for match in _MTP.finditer(line.text):
        rank = line.whole(match["rank"], "rank")
        loss = f"mtp{match['module']}"
        step, micro_batch = divmod(_next(counts, rank, loss), form.micro_batches)
        yield _observed(line, match, "mtp_loss_path", loss, rank, step, micro_batch, form)


def _trainer(line: _Line, pairs: dict[str, str]) -> Iterator[Observed]:
    step = line.whole(pairs["global_step"], "global_step")
    md5 = line.md5(pairs["loss_md5"]) if "loss_md5" in pairs else None
    yield Observed(step, "main", "loss", None, None, line.number(pairs["loss"]), md5)
    for key, word in pairs.items():
        if module := _MTP_KEY.fullmatch(key):
            yield Observed(step, f"mtp{module[1]}", "loss", None, None, line.number(word), None)


def _anchor(line: _Line, match: re.Match[str], what: str, form: LogForm, counts: Counter[tuple[int, str]]) -> Observed:
    rank = line.whole(match["rank"], "rank")
    step, rest = divmod(_next(counts, rank, what), form.micro_batches * len(form.order))
    micro_batch, turn = divmod(rest, len(form.order))
    return _observed(line, match, what, form.order[turn], rank, step, micro_batch, form)


def _next(counts: Counter[tuple[int, str]], rank: int, what: str) -> int:
    counts[rank, what] += 1
    return counts[rank, what] - 1


def _observed(
    line: _Line, match: re.Match[str], what: str, loss: str, rank: int, step: int, micro_batch: int, form: LogForm
) -> Observed:
    value = line.number(match["value"]) if "value" in match.re.groupindex else None
    # if one rank was selected, the other log may have the loss on another rank
    shown = None if rank == form.rank else rank
    return Observed(step + 1, loss, what, shown, micro_batch, value, line.md5(match["md5"]))
