"""The site's page of all commands, and of each option with the commands that have it.

It is made from the commands themselves. A test requires that an option has one spelling and one kind of value in
all commands.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
from pages import table

from pipeproof.cli.help_sections import SECTIONS
from pipeproof.cli.main import main as pipeproof

INTRODUCTION = """\
# Commands and options

An option means the same in every command that has it. `--help` after a command describes its own. Codes and the
schema of plans concern no single command, so they are options of `pipeproof` itself.
"""


def commands(group: click.Group = pipeproof, *before: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the words of each command, and the command."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)
        else:
            yield " ".join((*before, name)), command


def options() -> dict[str, dict[str, click.Option]]:
    """Return the options by their long name, each by the words of its commands."""
    found: dict[str, dict[str, click.Option]] = {}
    for words, command in (("pipeproof", pipeproof), *commands()):
        for option in command.params:
            if isinstance(option, click.Option):
                found.setdefault(max(option.opts, key=len), {})[words] = option
    return found


def spelling(option: click.Option) -> tuple[str, ...]:
    """All names of an option."""
    return (*option.opts, *option.secondary_opts)


def kind(option: click.Option) -> str:
    """Kind of an option's value: its type, or, for text, its name in the help."""
    if option.is_flag:
        return "flag"
    if option.type.name == "choice":
        return "choice"
    if isinstance(option.type, click.Path):
        return "path"
    if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType):
        return "number"
    return option.metavar or option.type.name


def _meanings(of_commands: dict[str, click.Option]) -> str:
    """The meaning, or several with the commands that state it so."""
    texts: dict[str, list[str]] = {}
    for words, option in of_commands.items():
        text = option.help or f"{'/'.join(_choices(option))}, {option.default} without it."
        texts.setdefault(text, []).append(words)
    if len(texts) == 1:
        return _cell(next(iter(texts)))
    return "<br>".join(f"{', '.join(f'`{word}`' for word in words)}: {_cell(text)}" for text, words in texts.items())


def _choices(option: click.Option) -> list[str]:
    assert isinstance(option.type, click.Choice)
    return [str(choice) for choice in option.type.choices]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    """The page."""
    parts = [INTRODUCTION]
    rows = [
        (f"`{words}`", command.get_short_help_str(limit=200))
        for _, names in SECTIONS
        for name in names
        for words, command in commands()
        if words.split()[0] == name
    ]
    parts += ["## Commands\n", table(("command", "purpose"), rows)]
    rows = [
        (
            ", ".join(f"`{name}`" for name in spelling(next(iter(of_commands.values())))),
            ", ".join(f"`{words}`" for words in of_commands),
            _meanings(of_commands),
        )
        for _, of_commands in sorted(options().items())
    ]
    parts += ["## Options\n", table(("option", "commands", "meaning"), rows)]
    return "\n".join(parts)
