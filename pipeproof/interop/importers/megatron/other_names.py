"""Names that are not read: those that leave the verdict open, those that a plan does not show, and the harmless."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.importers.draft import misspelt
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.imported import IgnoredSetting
from pipeproof.interop.importers.megatron.flag_values import Arguments, FlagReader, Setting, is_off
from pipeproof.interop.importers.megatron.flags import (
    DECIDES,
    FLAGS,
    FLAGS_BY_NAME,
    NOT_SHOWN,
    WITHOUT_BEARING,
    concerns_parallelism,
)
from pipeproof.interop.importers.names import plain
from pipeproof.interop.importers.tools.tool import Tool

_MOST_NAMED: Final = 6
_OTHER_MODELS: Final = re.compile(
    r"(pretrain|finetune|train|posttrain)_?\w*(mamba|hybrid|t5|vlm?|vision|multimodal|llava|retro|ict|sora|dit|clip|rwkv"
    r"|diffusion|flux|omni|audio)\w*\.py$"
)
"""Programs that train other models than GPT."""


_NO_TRAINING: Final = re.compile(
    r"(^|[/_])(eval(uat\w+)?|inference\w*|generat\w+|(run_)?text_generation\w*|convert\w*|preprocess\w*|tasks/main|export\w*)\.py$"
)
"""Programs that evaluate, generate or convert."""


def refuse_other_programs(arguments: Arguments) -> None:
    """Refuse a command that trains nothing.

    Raises:
        PlanFileError: PP170.
    """
    if _NO_TRAINING.search(arguments.program):
        message = f"`{arguments.program}` trains nothing, and plans are of trainings"
        raise PlanFileError(UNREADABLE.finding(message, Location(arguments.file)))


def refuse_misspelt(reader: FlagReader, tool: Tool) -> None:
    """Refuse a flag that is in no list and is almost one that is read, before its default is taken for its value.

    Raises:
        PlanFileError: PP170.
    """
    for name, setting in reader.arguments.flags.items():
        if name in FLAGS or name in NOT_SHOWN or tool.knows(name):
            continue
        known = misspelt(name, sorted(FLAGS))
        if known is not None:
            reader.refuse(f"{name} is no flag of {tool.name}", setting.location, f"did you mean `{known}`?")


def undecided_names(reader: FlagReader, tool: Tool) -> Iterator[IgnoredSetting]:
    """Yield the names on which the verdict may depend, with the reason: unknown ones, and those that are not read."""
    arguments = reader.arguments
    yield from arguments.open
    if _OTHER_MODELS.search(arguments.program):
        yield IgnoredSetting(arguments.program, "it trains another model than GPT", Location(arguments.file))
    for name, setting in arguments.flags.items():
        key = plain(name)
        why = None
        if name in FLAGS or name in NOT_SHOWN or WITHOUT_BEARING.fullmatch(key) or _is_default(key, setting):
            continue
        if key == "spec" and tool.blocks.fullmatch(setting.value or ""):
            continue
        if key in DECIDES:
            why = DECIDES[key]
        elif tool.decides.fullmatch(key):
            why = f"an argument of {tool.name} that decides order, cut or blocks, and is not read"
        elif key in FLAGS_BY_NAME:
            why = f"Megatron-LM has {FLAGS_BY_NAME[key]} for it, and the name itself is no flag"
        elif not tool.knows(name):
            why = f"the name is in {tool.lists}"
        elif tool.owns(name) and concerns_parallelism(name) and not tool.without.fullmatch(key):
            why = f"an argument of {tool.name} with a term of parallelism, which is not read"
        if why is not None:
            yield IgnoredSetting(name, why, setting.location)


def _is_default(key: str, setting: Setting) -> bool:
    """True for a value that changes nothing."""
    value = setting.value
    return value is not None and (is_off(value) or (key, value) == ("spec", "local"))


def note_others(reader: FlagReader, tool: Tool, undecided: frozenset[str]) -> None:
    """List the known names that a plan does not show, one by one where their names have a term of parallelism."""
    draft, others, harmless = reader.draft, [], (WITHOUT_BEARING, tool.without)
    for name, setting in reader.arguments.flags.items():
        if name in NOT_SHOWN:
            draft.ignore(name, NOT_SHOWN[name], setting.location)
        elif name in FLAGS or name in undecided or any(one.fullmatch(plain(name)) for one in harmless):
            continue
        elif concerns_parallelism(plain(name)) and not _is_default(plain(name), setting):
            draft.ignore(name, "the plan does not show it", setting.location)
        else:
            others.append(setting)
    if others:
        names = ", ".join(setting.name for setting in others[:_MOST_NAMED]) + (", .." if others[_MOST_NAMED:] else "")
        why = f"{len(others)}, without a term of parallelism in their names, are not read ({names})"
        draft.ignore("other flags", why, others[0].location)
    for note, location in reader.arguments.notes:
        draft.ignore("the script", note, location)
