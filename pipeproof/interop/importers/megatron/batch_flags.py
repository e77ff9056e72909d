"""Keys of ``schedule`` for batches, from the flags of Megatron-LM."""

from __future__ import annotations

import re
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.interop.importers.draft import count
from pipeproof.interop.importers.megatron.flag_values import FlagReader, Setting

_SIZE, _TOTAL = "--micro-batch-size", "--global-batch-size"
_STEPS, _RAMP = "--step-batch-size-schedule", "--rampup-batch-size"
_LOWER = "--decrease-batch-size-if-needed"
_ENTRY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?)([KMBT]?):([0-9]+(?:\.[0-9]*)?)([KMBT]?)", re.ASCII | re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_FIX = "give the processes of the whole training with `--world-size N`"


def import_batches(reader: FlagReader, data_parallel: int, num_chunks: int) -> None:
    """Set ``schedule.micro_batch_size`` and ``schedule.num_micro_batches``: of the last steps, if batches grow.

    Raises:
        PlanFileError: PP170, a value cannot be read; PP171, Megatron-LM refuses the batches.
    """
    draft = reader.draft
    size = reader.number(_SIZE)
    if size is None:
        why = f"{'only a run determines' if reader.has(_SIZE) else 'there is no'} {_SIZE}"
        draft.assume(("schedule", "micro_batch_size"), 1, why)
    else:
        reader.take(_SIZE, ("schedule", "micro_batch_size"), size)
    sequences = count(draft, "schedule", "micro_batch_size") * data_parallel
    key = ("schedule", "num_micro_batches")
    steps = reader.arguments.micro_batches
    if steps is not None and steps.value is not None:
        draft.set(key, int(steps.value), steps.name, steps.location)
    elif steps is not None:
        draft.assume(key, 2 * count(draft, "topology", "pp"), steps.why, steps.location)
    if steps is not None:
        return
    batches = _scheduled(reader)
    flag = _STEPS if batches else _TOTAL
    total = batches[-1] if batches else reader.number(_TOTAL)
    if total is None:
        setting = reader.setting(_TOTAL)
        if setting is None:
            draft.set(key, 1, f"no {_TOTAL}: one micro-batch for each data-parallel rank")
        else:
            why = f"the value of {_TOTAL} is {setting.why}"
            draft.assume(key, 2 * count(draft, "topology", "pp"), why, setting.location)
        return
    if reader.has(_LOWER) and total >= sequences:
        total -= total % sequences
    if total % sequences:
        message = f"{flag} {total} does not divide by {sequences // data_parallel} sequences x {data_parallel} "
        reader.megatron_refuses(message + "data-parallel ranks", flag, _FIX)
    reader.take(flag, key, total // sequences)
    _note_other_steps(reader, batches, sequences, num_chunks)


def _scheduled(reader: FlagReader) -> tuple[int, ...]:
    """Return the batch sizes of ``--step-batch-size-schedule`` such as "0:768 250B:1536", by their thresholds."""
    setting = reader.setting(_STEPS)
    if setting is None:
        return ()
    if reader.has(_TOTAL) and not reader.arguments.has_all:  # a block has the size that Megatron-LM sets itself
        reader.megatron_refuses(f"{_STEPS} and {_TOTAL} are given together", _TOTAL, "remove one of the two")
    if None in setting.values or not setting.values:
        reader.refuse(f"only a run determines the value of {_STEPS}", setting.location)
    entries = sorted(_entry(reader, setting, text) for text in " ".join(map(str, setting.values)).split())
    thresholds = [threshold for threshold, _ in entries]
    if thresholds[0] or len(set(thresholds)) < len(thresholds):
        reader.megatron_refuses("the first threshold is 0, and the others grow", _STEPS)
    return tuple(size for _, size in entries)


def _entry(reader: FlagReader, setting: Setting, text: str) -> tuple[int, int]:
    match = _ENTRY.fullmatch(text.strip(","))
    number, size = (0, 0) if match is None else (_number(match[1], match[2]), _number(match[3], match[4]))
    if not size:
        reader.refuse(f"{_STEPS} needs pairs such as 250B:1536, found `{text}`", setting.value_location)
    return number, size


def _number(digits: str, unit: str) -> int:
    return int(float(digits[:18]) * _UNITS[unit.upper()])


def _note_other_steps(reader: FlagReader, batches: tuple[int, ...], sequences: int, num_chunks: int) -> None:
    """List the steps with other batches, and refuse those for which there is no interleaved schedule."""
    draft = reader.draft
    checked = f"steps of {count(draft, 'schedule', 'num_micro_batches')} micro-batches are checked"
    others = [size // sequences for size in batches[:-1] if size % sequences == 0]
    pp = count(draft, "topology", "pp")
    least = min(others, default=pp)
    if num_chunks > 1 and least < pp:
        message = f"{least} micro-batches in the first steps, where interleaved stages need {pp}, the pipeline ranks"
        reader.megatron_refuses(message, _STEPS)
    if others:
        why = f"{checked}; give `--set schedule.num_micro_batches={others[0]}` to check the first steps"
        draft.ignore(reader.shown(_STEPS), why, reader.location(_STEPS))
    if reader.has(_RAMP):
        location: Location | None = reader.location(_RAMP)
        draft.ignore(_RAMP, f"{checked}, those with the whole {_TOTAL}; current versions ignore the flag", location)
