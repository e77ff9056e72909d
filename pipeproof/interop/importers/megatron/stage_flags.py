"""Keys ``stages`` and ``schedule.num_chunks`` of a plan, from the flags of Megatron-LM, and its layout strings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pipeproof.interop.importers.import_codes import REFUSED
from pipeproof.interop.importers.megatron.flag_values import MAX_RANKS, FlagReader
from pipeproof.interop.importers.plan_builder import MAX_LAYERS, stages_of

LETTERS: Final = "EtmL"
MAX_LETTERS: Final = 100_000
"""Longest layout after all repetitions."""

_NUMBER: Final = re.compile(r"\*(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class LayoutLetter:
    """A letter of the layout, and the index of its character in the string."""

    letter: str
    at: int


class LayoutError(ValueError):
    """An invalid layout, with the indices of the wrong characters (the last inclusive)."""

    def __init__(self, message: str, at: int, last: int | None = None, help: str | None = None) -> None:
        super().__init__(message)
        self.at = at
        self.last = at if last is None else last
        self.help = help


def parse_layout(text: str) -> tuple[tuple[LayoutLetter, ...], ...]:
    """Return the letters of each global stage, in order.

    Raises:
        LayoutError: the string does not follow the grammar.
    """
    flat, at = _letters(text, 0, inside=None)
    assert at == len(text), "the whole string is read, or an error was raised"
    stages: list[list[LayoutLetter]] = [[]]
    for entry in flat:
        if entry.letter == "|":
            stages.append([])
        else:
            stages[-1].append(entry)
    return tuple(tuple(stage) for stage in stages)


def check_layout(
    stages: tuple[tuple[LayoutLetter, ...], ...], *, num_layers: int, num_mtp: int, pp: int, length: int
) -> None:
    """Check Megatron-LM's conditions on a layout, and that no stage is empty, which plans do not allow.

    ``length`` is the length of the string, for the location of a missing letter.

    Raises:
        LayoutError: the first violation.
    """
    flat = [entry for stage in stages for entry in stage]
    end = max(length - 1, 0)
    for letter, module in (("E", "embedding"), ("L", "loss")):
        matches = [entry for entry in flat if entry.letter == letter]
        if len(matches) != 1:
            message = f"the {module} `{letter}` appears {len(matches)} times, and must appear once"
            raise LayoutError(message, matches[1].at if len(matches) > 1 else end)
    if flat[0].letter != "E":
        raise LayoutError(f"the layout begins with `{flat[0].letter}`, and the embedding `E` must be first", flat[0].at)
    if flat[-1].letter != "L":
        raise LayoutError(f"the layout ends with `{flat[-1].letter}`, and the loss `L` must be last", flat[-1].at)
    for letter, flag, expected in (("t", "--num-layers", num_layers), ("m", "--mtp-num-layers", num_mtp)):
        count = sum(entry.letter == letter for entry in flat)
        if count != expected:
            raise LayoutError(f"the layout has {count} `{letter}`, and {flag} is {expected}", 0, end)
    modules = [index for index, entry in enumerate(flat) if entry.letter == "m"]
    late = next((entry for entry in flat[modules[0] :] if entry.letter == "t"), None) if modules else None
    if late is not None:
        raise LayoutError("a transformer layer follows a module `m`, which must come after all of them", late.at)
    if len(stages) % pp:
        message = f"the layout has {len(stages)} stages, which do not divide by --pipeline-model-parallel-size {pp}"
        raise LayoutError(message, 0, end)
    holders = {index for index, stage in enumerate(stages) if any(entry.letter == "m" for entry in stage)}
    if len(holders) > 1 or (holders and min(holders) < len(stages) - pp):
        at = flat[modules[0]].at
        raise LayoutError("all modules `m` must be in one stage, in the last chunk of its pipeline rank", at)
    empty = next((index for index, stage in enumerate(stages) if not stage), None)
    if empty is not None:
        before = max((entry.at for stage in stages[:empty] for entry in stage), default=-1)
        raise LayoutError(
            f"stage {empty} has no layer, and a plan's stages have at least one",
            min(before + 1, end),
            help="Megatron-LM runs such a layout; move a layer to that stage to check it",
        )


def _letters(text: str, at: int, *, inside: int | None) -> tuple[list[LayoutLetter], int]:
    """Read letters from ``at`` to the end, or to the parenthesis that closes the one at ``inside``."""
    result: list[LayoutLetter] = []
    while at < len(text):
        c = text[at]
        if c == ",":
            at += 1
            continue
        if c == ")" and inside is not None:
            return result, at
        if c == "(":
            if inside is not None:
                raise LayoutError("nested parentheses, which Megatron-LM does not read", at)
            letters, closing = _letters(text, at + 1, inside=at)
            if closing == len(text):
                raise LayoutError("the parenthesis that opens here is not closed", at)
            if not letters:
                raise LayoutError("the parentheses are empty", at, closing)
            at, first = closing + 1, at
            if not text.startswith("*", at):
                message = "parentheses without a following `*n`, which Megatron-LM does not read"
                raise LayoutError(message, first, closing)
        elif c in LETTERS or c == "|":
            letters, at = [LayoutLetter(c, at)], at + 1
        else:
            near = {"e": "E", "T": "t", "M": "m", "l": "L"}.get(c)
            suggestion = f"did you mean `{near}`?" if near else None
            raise LayoutError(f"`{c}` is none of E, t, m, L, `|`, parentheses and `*n`", at, help=suggestion)
        times, at = _times(text, at)
        if len(result) + len(letters) * times > MAX_LETTERS:
            raise LayoutError(f"more than {MAX_LETTERS} layers and bars", at - 1)
        result += letters * times
    return result, at


def _times(text: str, at: int) -> tuple[int, int]:
    """Return the number after ``*``, 1 without one, and the index of its end."""
    if not text.startswith("*", at):
        return 1, at
    match = _NUMBER.match(text, at)
    if match is None:
        raise LayoutError("a number must follow `*`", at)
    if len(match.group(1)) > len(str(MAX_LETTERS)):
        raise LayoutError(f"a number of more than {len(str(MAX_LETTERS))} digits", at + 1, match.end() - 1)
    if match.end() < len(text) and text[match.end()] == "*":
        raise LayoutError("a second `*` follows the number", match.end())
    return int(match.group(1)), match.end()


LAYOUT = "--pipeline-model-parallel-layout"
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


def import_stages(reader: FlagReader, *, num_layers: int, num_mtp: int, pp: int) -> int:
    """Set ``stages`` if the partition is given and not even, and return the number of stages of each pipeline rank.

    Raises:
        PlanFileError: PP170 for an invalid layout, PP171 if Megatron-LM refuses the settings.
    """
    if num_layers > MAX_LAYERS or pp > MAX_RANKS:
        message = f"{num_layers} layers on {pp} pipeline ranks are more than a plan can have"
        reader.refuse(message, reader.place("--num-layers"))
    partition_flags = [flag for flag in (PER_CHUNK, CHUNKS, LAYOUT) if reader.has(flag)]
    if len(partition_flags) > 1:
        first, second = partition_flags[:2]
        reader.megatron_refuses(f"{first} and {second} are given together", second, "remove one of the two")
    if reader.has(LAYOUT):
        return _by_layout(reader, num_layers, num_mtp, pp)
    num_chunks = _num_chunks(reader, num_layers, pp)
    sizes = _sizes(reader, num_layers, pp, num_chunks)
    stages = stages_of(sizes, num_mtp, reads_normed=_reads_normed(reader))
    flag = next((flag for flag in (FIRST, LAST, EMBEDDING, LOSS, PER_CHUNK, CHUNKS) if reader.has(flag)), None)
    if any(not stage for stage in stages):
        message = f"stage {stages.index([])} has no layer, and a plan's stages have at least one"
        reader.refuse(message, reader.place(flag or "--num-layers"))
    if flag is not None and len(set(sizes)) > 1:  # a plan without `stages` has an even cut, for any pp
        reader.take(flag, ("stages",), stages)
    return num_chunks


def _num_chunks(reader: FlagReader, num_layers: int, pp: int) -> int:
    if reader.has(CHUNKS):
        return reader.degree(CHUNKS)
    if not reader.has(PER_CHUNK):
        return 1
    if reader.has(FIRST) or reader.has(LAST):
        reader.megatron_refuses(f"{PER_CHUNK} is given with an uneven partition", PER_CHUNK, f"use {CHUNKS}")
    total = num_layers + reader.has(EMBEDDING) + reader.has(LOSS)
    per_chunk = reader.number(PER_CHUNK)
    if per_chunk is None:
        reader.refuse(f"only a run determines the value of {PER_CHUNK}", reader.arguments.flags[PER_CHUNK].location)
    if total % pp or total // pp % per_chunk:
        reader.megatron_refuses(
            f"{total} layers over {pp} pipeline ranks do not divide into chunks of {per_chunk}", PER_CHUNK
        )
    return total // pp // per_chunk


def _sizes(reader: FlagReader, num_layers: int, pp: int, num_chunks: int) -> list[int]:
    """Return the blocks of each global stage (get_num_layers_to_build in Megatron-LM's transformer_block.py)."""
    first, last = reader.number(FIRST), reader.number(LAST)
    ends = {0: first, pp - 1: last}
    if first is not None or last is not None:
        if reader.has(EMBEDDING) or reader.has(LOSS):
            both = EMBEDDING if reader.has(EMBEDDING) else LOSS
            reader.megatron_refuses(f"{both} is given with {FIRST if first is not None else LAST}", both)
        rest = num_layers - (first or 0) - (last or 0)
        ranks = pp - (first is not None) - (last is not None)
        flag = FIRST if first is not None else LAST
        if rest and not ranks:
            kept = f"{first or 0} + {last or 0} of {num_layers} blocks are on {pp} pipeline ranks"
            older = f"drop {rest} without a word" if rest > 0 else "build more blocks"
            message = f"{kept}: Megatron-LM from 0.16 on refuses this, and older versions {older}"
            reader.refuse(message, reader.place(flag), code=REFUSED)
        if rest < 0 or (ranks and rest % ranks):
            reader.megatron_refuses(f"{rest} layers are left for {ranks} pipeline ranks, and must divide", flag)
        even = rest // ranks if ranks else 0
        rank_sizes = [even if ends.get(rank) is None else int(ends[rank] or 0) for rank in range(pp)]
    else:
        total = num_layers + reader.has(EMBEDDING) + reader.has(LOSS)
        if total % pp:
            counted = "layers, with those that count for embedding and loss," if total > num_layers else "layers"
            size = "--pipeline-model-parallel-size"
            reader.megatron_refuses(f"{total} {counted} do not divide by {size} {pp}", size)
        rank_sizes = [total // pp] * pp
    uneven = next((size for size in rank_sizes if size % num_chunks), None)
    if uneven is not None:
        flag = CHUNKS if reader.has(CHUNKS) else PER_CHUNK
        reader.megatron_refuses(f"{uneven} layers of a pipeline rank do not divide by {num_chunks} chunks", flag)
    sizes = [rank_sizes[rank] // num_chunks for _ in range(num_chunks) for rank in range(pp)]
    sizes[0] -= reader.has(EMBEDDING)
    sizes[-1] -= reader.has(LOSS)
    return sizes


def _by_layout(reader: FlagReader, num_layers: int, num_mtp: int, pp: int) -> int:
    setting = reader.arguments.flags[LAYOUT]
    text = reader.text(LAYOUT)
    if text is None:
        reader.refuse(f"the value of {LAYOUT} is {setting.why}", setting.location, "write the layout into the script")
    location = setting.value_location
    try:
        stages = parse_layout(text)
        check_layout(stages, num_layers=num_layers, num_mtp=num_mtp, pp=pp, length=len(text))
    except LayoutError as error:
        reader.refuse(f"{LAYOUT}: {error}", location.part(error.at, error.last + 1), error.help)
    reader.take(LAYOUT, ("stages",), _named(stages, num_layers if _reads_normed(reader) else None))
    holder = next((index for index, stage in enumerate(stages) if any(entry.letter == "m" for entry in stage)), -1)
    if 0 <= holder < len(stages) - 1:  # validate_layer_layout sets mtp_standalone, and p2p then sends shapes
        reader.take(LAYOUT, ("transport", "shape_exchange"), "per_message")
    return len(stages) // pp


def _reads_normed(reader: FlagReader) -> bool:
    """True if modules read the result of the last norm, which is then on the stage of the last block."""
    return bool(reader.plan.get("model", "mtp", "reads") == "after_norm")


def _named(stages: tuple[tuple[LayoutLetter, ...], ...], num_before_norm: int | None) -> list[list[str]]:
    """The layers of each stage; the norm is before the head, or after so many blocks."""
    counts = {"t": 0, "m": 0}
    named = []
    for stage in stages:
        names: list[str] = []
        for entry in stage:
            match entry.letter:
                case "E":
                    names.append("embed")
                case "L":
                    names += ["norm", "head"] if num_before_norm is None else ["head"]
                case letter:
                    names.append(f"{'layer' if letter == 't' else 'mtp'}.{counts[letter]}")
                    counts[letter] += 1
                    if letter == "t" and counts[letter] == num_before_norm:
                        names.append("norm")
        named.append(names)
    return named
