"""The arguments that a training program of Megatron-LM gets: flags, their values, and their places."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeproof.interop.megatron.flags import FLAGS
from pipeproof.interop.megatron.shell_script import Script, read_script
from pipeproof.interop.megatron.shell_values import Argument, words_of
from pipeproof.interop.megatron.shell_words import ShellTextError
from pipeproof.specs.finding import Finding, Location, Severity
from pipeproof.specs.load import PlanFileError, read_text
from pipeproof.specs.source import LINE_BREAK, SourceMap


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag with its values; a value is None where only a run can tell it, and ``why`` says what it is."""

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
    """All flags by name, the last of each (as argparse takes them), and those of the launcher before the program."""

    file: str
    lines: tuple[str, ...]
    flags: Mapping[str, Setting]
    launcher: Mapping[str, Setting]
    notes: tuple[tuple[str, Location], ...] = ()
    """What was taken for granted to read the script, with its place."""


_PROGRAM = re.compile(r".*\.py")
_FLAG = re.compile(r"--[A-Za-z]")
_PRINTS = frozenset({"echo", "printf", "cat"})


def read_arguments(path: Path) -> Arguments:
    """The arguments in a shell script, or in a file that lists them.

    Raises:
        PlanFileError: PP100 where the file cannot be read, PP170 where it is no shell text, or where no command in
            it has a flag of Megatron-LM.
    """
    name = str(path)
    text = read_text(name)
    lines = tuple(LINE_BREAK.split(text))
    source = SourceMap(name, lines)
    try:
        script = read_script(text)
    except ShellTextError as error:
        raise PlanFileError(
            Finding("PP170", Severity.ERROR, f"{error}", source.at(error.span)), source=source
        ) from error
    candidates = [command for command in _lists(script) if _score(command)]
    if not candidates:
        raise PlanFileError(
            Finding(
                "PP170",
                Severity.ERROR,
                "no command here has flags of Megatron-LM",
                Location(name, 1, 1),
                help="give the script that starts the training, or a file with its flags",
            ),
            source=source,
        )
    chosen = max(candidates, key=_score)
    return _arguments(name, lines, chosen, tuple(_notes(script, name, candidates, chosen)))


def _lists(script: Script) -> Iterator[Sequence[Argument]]:
    """The commands; flags alone on their lines are one list; where there is neither, all variables that hold flags."""
    found = [command for command in script.commands if command and command[0].text not in _PRINTS]
    alone = [argument for command in found if (command[0].text or "").startswith("--") for argument in command]
    programs = [command for command in found if not (command[0].text or "").startswith("--") and _score(command)]
    yield from programs
    if alone:
        yield alone
    elif not programs:
        yield [word for _, items in script.variables.arrays() for item in items for word in words_of(item)]


def _score(command: Sequence[Argument]) -> int:
    """How many flags of Megatron-LM the command has."""
    return sum(argument.text is not None and argument.text.partition("=")[0] in FLAGS for argument in command)


def _arguments(
    file: str, lines: tuple[str, ...], command: Sequence[Argument], notes: tuple[tuple[str, Location], ...]
) -> Arguments:
    """Part the flags of the program from those of its launcher, which stand before it."""
    programs = [index for index, word in enumerate(command) if word.text is not None and _PROGRAM.fullmatch(word.text)]
    first_flag = next(index for index, word in enumerate(command) if _score([word]))
    program = max((index for index in programs if index < first_flag), default=-1)
    return Arguments(
        file, lines, _settings(file, command[program + 1 :]), _settings(file, command[: program + 1]), notes
    )


def _settings(file: str, words: Sequence[Argument]) -> dict[str, Setting]:
    """Flags with the words behind them up to the next flag; ``--flag=value`` too."""
    found: dict[str, Setting] = {}
    name, place, values = "", Location(file, 1, 1), list[Argument]()

    def take() -> None:
        if name:
            texts = tuple(value.text for value in values)
            why = next((value.why for value in values if value.text is None), "")
            found[name] = Setting(name, texts, place, _place(file, values[0]) if values else place, why)

    for word in words:
        if word.text is not None and _FLAG.match(word.text):
            take()
            name, equals, value = word.text.partition("=")
            name = f"--{name[2:].replace('_', '-')}"
            place, values = _place(file, word), []
            if equals:
                values.append(replace(word, text=value, column=word.column + len(name) + 1))
        else:
            values.append(word)
    take()
    return found


def _place(file: str, word: Argument) -> Location:
    return Location(file, word.line, word.column, word.end_column)


def _notes(
    script: Script, file: str, candidates: Sequence[Sequence[Argument]], chosen: Sequence[Argument]
) -> Iterator[tuple[str, Location]]:
    """What reading alone could not decide."""
    variables = script.variables
    for name, line in variables.undecided.items():
        if name in variables.used:
            yield (
                f"`{name}` is changed here if a condition holds that only a run decides: not followed",
                Location(file, line, 1),
            )
    for command in script.commands:
        if command and command[0].text in ("source", "."):
            what = command[1].text if len(command) > 1 else None
            yield f"what `{what or 'another file'}` sets is not read", _place(file, command[0])
    for other in candidates:
        if other is not chosen:
            yield "another command with flags of Megatron-LM begins here: not looked at", _place(file, other[0])
