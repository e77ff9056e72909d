"""Flags of Megatron-LM in a script, and their typed values; invalid values are refused at their location."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from types import MappingProxyType
from typing import NoReturn

from pipeproof.diagnostics.finding import Location, RuleDoc
from pipeproof.diagnostics.problems import KeyPath, dotted
from pipeproof.diagnostics.source import LINE_BREAK, PlanFileError, SourceMap
from pipeproof.interop.importers.import_codes import REFUSED, UNREADABLE, unreadable
from pipeproof.interop.importers.imported import IgnoredSetting
from pipeproof.interop.importers.megatron.flags import FLAGS, NOT_SHOWN, PLAN_KEYS, concerns_parallelism
from pipeproof.interop.importers.megatron.launch_script import BLOCKS, READ, Argument, Script, ScriptError, read_script
from pipeproof.interop.importers.plan_builder import PlanBuilder


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag with its values; a value is None if only a run determines it, and ``why`` describes it, or a default."""

    name: str
    values: tuple[str | None, ...]
    location: Location
    value_location: Location
    why: str = ""

    @property
    def value(self) -> str | None:
        """The first value."""
        return self.values[0] if self.values else None


@dataclass(frozen=True)
class Arguments:
    """All flags by name, the last of each (like argparse), and the launcher's flags before the program."""

    file: str
    lines: tuple[str, ...]
    flags: Mapping[str, Setting]
    launcher: Mapping[str, Setting]
    notes: tuple[tuple[str, Location], ...] = ()
    """Assumptions about the script, with their locations."""
    world_size: int | None = None
    """Number of processes, if the file has it."""
    has_all: bool = False
    """True if all arguments of the program are listed, defaults included."""
    program: str = ""
    """The program that a command starts."""
    unread: tuple[str, ...] = ()
    """Files that a script sources and that are not next to it."""
    open: tuple[IgnoredSetting, ...] = ()
    """Settings that are known to leave the verdict open, besides names."""
    checkpoint: tuple[str, Location] | None = None
    """The checkpoint that a file names, where its number of blocks is not known."""


_OFF = ("None", "False", "", "[]", "0", "0.0")


def is_off(value: object) -> bool:
    """Return True for a value at which an argument has no effect."""
    return str(value) in _OFF


_PROGRAM = re.compile(r".*\.py")
_FLAG = re.compile(r"--[A-Za-z]")
_PRINTS = frozenset({"echo", "printf", "cat"})


def arguments_of_text(text: str, name: str) -> Arguments:
    """Read the arguments in the text of a script, or in a list of arguments; ``name`` is its file in messages.

    Raises:
        PlanFileError: PP170, it is not a shell text, or no command in it has a flag of Megatron-LM.
    """
    script, source = script_of(text, name)
    candidates = [command for command in _lists(script) if _score(command)]
    if not candidates:
        raise _no_command(script, source)
    chosen = max(candidates, key=_score)
    certain, doubtful = _without_blocks(chosen, source)
    notes = (*_notes(script, candidates, chosen), *doubtful)
    unread = tuple(word.text or word.why for word in script.unread)
    return replace(_arguments(name, source.lines, certain, notes), unread=unread)


def _no_command(script: Script, source: SourceMap) -> PlanFileError:
    hidden = next((command for command in script.in_blocks if _score(command)), None)
    if hidden is not None:
        message = "the command with flags of Megatron-LM is in a block, which is not evaluated"
        return unreadable(message, hidden[0].location, BLOCKS, source)
    fix = "give the script that starts the training, or a file with its flags"
    message = "no command here has flags of Megatron-LM"
    return unreadable(message, Location(source.file), fix, source)


def script_of(text: str, name: str, preset: Mapping[str, str] = MappingProxyType({})) -> tuple[Script, SourceMap]:
    """Read the text of a script; ``preset`` are variables of its environment.

    Raises:
        PlanFileError: PP170, it cannot be read.
    """
    source = SourceMap(name, tuple(LINE_BREAK.split(text)))
    try:
        return read_script(text, name, preset), source
    except ScriptError as error:
        raise unreadable(f"{error}", error.location, error.help, source) from error


def require_evaluated(command: Sequence[Argument], source: SourceMap) -> None:
    """Refuse a command with words from a block of the script, which is not evaluated.

    Raises:
        PlanFileError: PP170.
    """
    word = next((word for word in command if word.block), None)
    if word is not None:
        shown = f"{word.why}" if word.text is None else f"`{word.text}` only where the block at line {word.block} runs"
        message = f"a word of the command is {shown}"
        raise unreadable(message, word.location, BLOCKS, source)


def _without_blocks(
    command: Sequence[Argument], source: SourceMap
) -> tuple[list[Argument], list[tuple[str, Location]]]:
    """Return the words of every run, and notes on flags that only a block appends."""
    words: list[Argument] = []
    notes: list[tuple[str, Location]] = []
    is_value = False
    for word in command:
        text = word.text if word.text is not None else word.start if "=" in word.start else ""
        is_flag = _FLAG.match(text) is not None
        if not word.block:
            words.append(word)
        elif (word.text is None and not is_value and not is_flag) or (is_flag and _decides(text)):
            require_evaluated([word], source)
        elif is_flag and text.partition("=")[0] in FLAGS:
            notes.append((f"`{text}` is given only where the block at line {word.block} runs", word.location))
        is_value = word.block > 0 and (is_flag or is_value)
    return words, notes


def _decides(text: str) -> bool:
    """True for a flag on which the schedule, the cut or the number of micro-batches depends."""
    flag = text.partition("=")[0].replace("_", "-")
    is_read = flag in FLAGS or flag in NOT_SHOWN
    return is_read and (concerns_parallelism(flag) or flag in ("--num-layers", "--global-batch-size"))


def _lists(script: Script) -> Iterator[Sequence[Argument]]:
    """Yield the commands with flags; or lines of flags only, as one list; or else all variables with flags."""
    commands = [command for command in script.commands if command and command[0].text not in _PRINTS]
    alone = [argument for command in commands if (command[0].text or "").startswith("--") for argument in command]
    programs = [command for command in commands if not (command[0].text or "").startswith("--") and _score(command)]
    yield from programs
    if alone:
        yield alone
    elif not programs:
        yield script.words()


def _score(command: Sequence[Argument]) -> int:
    """Return the number of Megatron-LM flags of the command."""
    return sum(argument.text is not None and argument.text.partition("=")[0] in FLAGS for argument in command)


def _arguments(
    file: str, lines: tuple[str, ...], command: Sequence[Argument], notes: tuple[tuple[str, Location], ...]
) -> Arguments:
    """Separate the flags of the program from its launcher's flags, which come first."""
    names = [word.end if word.text is None else word.text for word in command]
    programs = [index for index, name in enumerate(names) if _PROGRAM.fullmatch(name)]
    first_flag = next(index for index, word in enumerate(command) if _score([word]))
    program = max((index for index in programs if index < first_flag), default=-1)
    unread = takewhile(lambda word: word.text is None or not _FLAG.match(word.text), command[program + 1 :])
    before = [(f"`{word.text or word.why}` before the first flag is not read", word.location) for word in unread]
    notes = (*notes, *(before if programs else ()))
    flags, launcher = settings_of_words(command[program + 1 :]), settings_of_words(command[: program + 1])
    may_have_flags = "its words are known to a run alone, and may have any flag"
    hidden = (word for word in command[program + 1 :] if word.text is None and word.why.endswith(READ))
    unknown = tuple(IgnoredSetting(word.why.split("`")[1], may_have_flags, word.location) for word in hidden)
    return Arguments(file, lines, flags, launcher, notes, program=names[program] if program >= 0 else "", open=unknown)


def settings_of_words(words: Sequence[Argument]) -> dict[str, Setting]:
    """Return the flags with the words up to the next flag; also ``--flag=value``."""
    settings: dict[str, Setting] = {}
    flag: Argument | None = None
    values: list[Argument] = []

    def take() -> None:
        if flag is not None:
            texts = tuple(value.text for value in values)
            unknown = [value for value in values if value.text is None]
            why = next((value.why for value in unknown or values if value.why), "")
            settings[name] = Setting(name, texts, flag.location, (values[0] if values else flag).location, why)

    for word in words:
        if word.text is not None and _FLAG.match(word.text):
            take()
            name, equals, value = word.text.partition("=")
            name = f"--{name[2:].replace('_', '-')}"
            flag, values = word, []
            if equals:
                start = len(name) + 1
                values.append(replace(word, text=value, location=word.location.part(start, start + len(value))))
        else:
            values.append(word)
    take()
    return settings


def _notes(
    script: Script, candidates: Sequence[Sequence[Argument]], chosen: Sequence[Argument]
) -> Iterator[tuple[str, Location]]:
    """Notes about script parts that only a run decides."""
    for word in script.unread:
        name = word.text or word.why
        yield f"the settings of `{name}` are not read: there is no such file next to the script", word.location
    for candidate in candidates:
        if candidate is not chosen:
            yield "another command with flags of Megatron-LM begins here: ignored", candidate[0].location


_INT = re.compile(r"[+-]?\d{1,18}", re.ASCII)


MAX_RANKS = 2**16
"""Most ranks of an axis, and most stages of a rank, as in plans."""


class FlagReader:
    """Typed access to the flags of a script, for the builder of its plan."""

    def __init__(self, arguments: Arguments, plan: PlanBuilder) -> None:
        self.arguments = arguments
        self.plan = plan

    def has(self, flag: str) -> bool:
        """Return True if the flag is in the script."""
        return flag in self.arguments.flags

    def setting(self, flag: str) -> Setting | None:
        """Return the flag, or None."""
        return self.arguments.flags.get(flag)

    def location(self, flag: str) -> Location | None:
        """Return the location of a flag."""
        setting = self.setting(flag)
        return None if setting is None else setting.location

    def place(self, flag: str) -> Location:
        """Return the location of a flag, or the file of the arguments without it."""
        return self.location(flag) or Location(self.arguments.file)

    def shown(self, flag: str) -> str:
        """Return the flag with its value, for messages."""
        setting = self.setting(flag)
        return flag if setting is None or setting.value is None else f"{flag} {setting.value}"

    def text(self, flag: str) -> str | None:
        """Return the value of a flag; None if the flag is absent or only a run determines its value.

        Raises:
            PlanFileError: PP170, the flag has no value.
        """
        setting = self.setting(flag)
        if setting is None:
            return None
        if not setting.values:
            self.refuse(f"{flag} has no value", setting.location)
        return setting.value

    def number(self, flag: str, *, at_least: int = 1) -> int | None:
        """Return the value as an integer.

        Raises:
            PlanFileError: PP170, it is not an integer.
        """
        text = self.text(flag)
        if text is None:
            return None
        if not _INT.fullmatch(text) or int(text) < at_least:
            setting = self.arguments.flags[flag]
            self.refuse(f"{flag} needs an integer of at least {at_least}, found `{text}`", setting.value_location)
        return int(text)

    def real(self, flag: str) -> float | None:
        """Return the value as a non-negative number.

        Raises:
            PlanFileError: PP170, it is not such a number.
        """
        text = self.text(flag)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            self.refuse(f"{flag} needs a number, found `{text}`", self.arguments.flags[flag].value_location)
        return value

    def degree(self, flag: str) -> int:
        """Return an integer that the verdict depends on, and set it: ``--set``, else the flag, else 1.

        Raises:
            PlanFileError: PP170, it is not an integer, or only a run determines it.
        """
        number = self.given_degree(flag)
        if number is None:
            return 1
        self.put(flag, number)
        return number

    def given_degree(self, flag: str) -> int | None:
        """Return the integer that ``--set``, else the flag, gives for the flag's key; None without one.

        Raises:
            PlanFileError: PP170, it is not an integer, or only a run determines it.
        """
        key = PLAN_KEYS[flag]
        if key in self.plan:
            return self.plan.number(*map(str, key))
        setting = self.setting(flag)
        if setting is not None and setting.values and setting.value is None:
            fix = f"give it with `--set {dotted(key)}=N`"
            self.refuse(f"the value of {flag} is {setting.why}", setting.location, fix)
        number = self.number(flag)
        if number is not None and number > MAX_RANKS and setting is not None:
            self.refuse(f"{flag} is more than {MAX_RANKS}, which a plan does not have", setting.value_location)
        return number

    def put(self, flag: str, value: object) -> None:
        """Set the plan key that a flag has in ``PLAN_KEYS``."""
        self.take(flag, PLAN_KEYS[flag], value)

    def take(self, flag: str, key: KeyPath, value: object) -> None:
        """Set a plan value from the flag."""
        self.plan.set(key, value, self.shown(flag), self.location(flag))

    def take_for_device(self, flag: str, key: KeyPath, value: object) -> None:
        """Set a plan value from the flag that is used only if times are computed for a device."""
        self.plan.set_for_device(key, value, self.shown(flag), self.location(flag))

    def ignore(self, flag: str, why: str) -> None:
        """Record a flag that the plan does not show, with its value."""
        self.plan.ignore(self.shown(flag), why, self.location(flag))

    def refuse(self, message: str, location: Location, help: str | None = None, code: RuleDoc = UNREADABLE) -> NoReturn:
        """End the import.

        Raises:
            PlanFileError: always.
        """
        source = SourceMap(self.arguments.file, self.arguments.lines)
        raise PlanFileError(code.finding(message, location, help), source=source)

    def megatron_refuses(self, message: str, flag: str, help: str | None = None) -> NoReturn:
        """End the import because Megatron-LM would refuse the settings.

        Raises:
            PlanFileError: always, PP171.
        """
        self.refuse(f"Megatron-LM refuses this: {message}", self.place(flag), help, code=REFUSED)
