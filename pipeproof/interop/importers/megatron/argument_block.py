"""The block of resolved arguments that Megatron-LM prints when it starts, as arguments of a training.

``_print_args`` in megatron/training/arguments.py (commit d98e8a6) prints one line for each argument, after its checks
and with all defaults. Loggers may put a prefix before each line. Of several blocks in a log, the last is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import LINE_BREAK, SourceMap
from pipeproof.interop.importers.import_codes import unreadable
from pipeproof.interop.importers.megatron.flag_values import Arguments, Setting, is_off
from pipeproof.interop.importers.megatron.flags import DECIDES, FLAGS_BY_NAME, NEGATED
from pipeproof.interop.importers.megatron.layer_frequency import literal_list
from pipeproof.interop.importers.names import MEGATRON, names_of

BEGIN: Final = re.compile(r"-{24} arguments -{24}")
_END: Final = re.compile(r"-{20} end of arguments -{21}")
_LINE: Final = re.compile(r"(?:^|[^\w.])(?P<name>[A-Za-z]\w*) (?P<dots>\.*) (?P<value>.*?)\s*$")
_NAME_AND_DOTS: Final = 48
"""Characters of a name and the dots after it; a name of that many characters has no dots."""

_RESOLVED: Final = frozenset({"num_layers_per_virtual_pipeline_stage", "decoder_num_layers", "encoder_num_layers"})
"""Arguments that determine other arguments of the block."""

_LAYOUT, _CHUNKS = "--pipeline-model-parallel-layout", "--num-virtual-stages-per-pipeline-rank"
_DEFAULTS: Final = frozenset(
    {
        ("num_distributed_optimizer_instances", "1"),
        ("main_grads_dtype", "torch.float32"),
        ("vision_model_type", "radio"),
    }
)
"""Values at which arguments outside of a plan change nothing."""


def has_block(text: str) -> bool:
    """Return True if Megatron-LM has printed its arguments into the text."""
    return BEGIN.search(text) is not None


def arguments_of_block(text: str, name: str) -> Arguments:
    """Read the last block of arguments in a log; ``name`` is its file in messages.

    Raises:
        PlanFileError: PP170, the block has no end, a line of another form, or no pipeline size.
    """
    lines = tuple(LINE_BREAK.split(text))
    begin = max(number for number, line in enumerate(lines, start=1) if BEGIN.search(line))
    return _arguments(_lines(lines, begin, name), SourceMap(name, lines), Location(name, begin))


def arguments_of_values(values: Mapping[str, object], name: str) -> Arguments:
    """Read the arguments that Megatron-LM has in its process, by their names; ``name`` is their source in messages.

    Raises:
        PlanFileError: PP170, there is no pipeline size.
    """
    location = Location(name)
    settings = ((argument, Setting(argument, (str(value),), location, location)) for argument, value in values.items())
    return _arguments(settings, SourceMap(name, ()), location)


def _arguments(settings: Iterable[tuple[str, Setting]], source: SourceMap, begin: Location) -> Arguments:
    flags: dict[str, Setting] = {}
    world_size = None
    for argument, setting in settings:
        if argument == "world_size" and (setting.value or "").isdecimal():
            world_size = int(setting.value or 0)
        else:
            flags.update(_flags(argument, setting))
    if "--pipeline-model-parallel-size" not in flags:
        message = "the arguments that begin here have no pipeline_model_parallel_size"
        raise unreadable(message, begin, source=source)
    if _LAYOUT in flags:
        flags.pop(_CHUNKS, None)
    return Arguments(source.file, source.lines, flags, {}, world_size=world_size or None, has_all=True)


def _lines(lines: tuple[str, ...], begin: int, name: str) -> Iterator[tuple[str, Setting]]:
    """Yield the arguments of the block that begins at a line, each as a setting with its text."""
    source = SourceMap(name, lines)
    for number, line in enumerate(lines[begin:], start=begin + 1):
        if _END.search(line):
            return
        match, whole = _LINE.search(line), Location(name, number)
        if match is None or (len(match["name"]) + len(match["dots"]) != _NAME_AND_DOTS and match["dots"]):
            message = "this line of the block of arguments is not an argument with a value"
            raise unreadable(message, whole, source=source)
        places = whole.part(*match.span("name")), whole.part(*match.span("value"))
        yield match["name"], Setting(match["name"], (match["value"],), *places)
    fix = "give the whole log of the rank that prints it"
    raise unreadable("the block of arguments that begins here has no end", Location(name, begin), fix, source)


def _flags(argument: str, setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield the flag of an argument of the block, with its values; none if it has no effect."""
    text = setting.value or ""
    negated = NEGATED.get(argument)
    if negated is not None and text == "False":
        yield negated, replace(setting, name=negated, values=())
    flag = FLAGS_BY_NAME.get(argument)
    if flag is None and (is_off(text) or (argument in names_of(MEGATRON) and argument not in DECIDES)):
        return
    if argument in _RESOLVED or text in ("None", "False", "") or (argument, text) in _DEFAULTS:
        return
    flag = flag or f"--{argument.replace('_', '-')}"
    values: tuple[str | None, ...]
    if text == "True":
        values = ()
    elif flag == "--attention-backend":
        values = (text.rpartition(".")[2],)  # an enumeration, such as AttnBackend.flash
    elif flag in ("--rampup-batch-size", "--moe-aux-loss-coeff"):
        values = tuple(map(str, literal_list(text) or (text,)))
    else:
        values = (text,)
    yield flag, replace(setting, name=flag, values=values)
