"""The help of all commands: its sections, and an example of each command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import click

SECTIONS: Final = (
    ("Prove a plan", ("check", "show")),
    ("Start", ("init", "import")),
    ("Predict", ("simulate", "tune", "sweep", "compare", "schedule", "play")),
    ("Execute", ("doctor", "rehearse", "run", "job")),
    ("Saved state", ("state",)),
)
"""In the order of a first use."""

_OTHERS = "More"

EXAMPLES: Final = MappingProxyType(
    {
        "check": "pipeproof check plan.yaml",
        "compare": "pipeproof compare plan.yaml run.json",
        "doctor": "pipeproof doctor --backend torch",
        "import plan": "pipeproof import plan pretrain.sh -o plan.yaml",
        "import profile": "pipeproof import profile traces/ --plan plan.yaml -o profile.json",
        "init": "pipeproof init --model llama3-70b --gpus 512 --pp 8 --tp 8 --device h100 --global-batch 1024",
        "job hang": "pipeproof job hang dumps/",
        "play": "pipeproof play -o play.html",
        "rehearse": "pipeproof rehearse plan.yaml --set model.seq_length=512",
        "run": "pipeproof run plan.yaml --report run.json",
        "schedule convert": "pipeproof schedule convert schedule.csv --as text",
        "schedule list": "pipeproof schedule list",
        "schedule show": "pipeproof schedule show zb_v -p 4 -m 8",
        "show": "pipeproof show plan.yaml --rank 0",
        "simulate": "pipeproof simulate plan.yaml -o timeline.html",
        "state align": "pipeproof state align records/run records/reference",
        "state aoa": "pipeproof state aoa names.aoa --source states --inverse",
        "state diff": "pipeproof state diff states/step-00000002 moved",
        "state reshard": "pipeproof state reshard states --to plan_b.yaml -o moved",
        "state show": "pipeproof state show states/step-00000002 --md5",
        "sweep": "pipeproof sweep plan.yaml --set 'schedule.kind=[1f1b, zb_h1]'",
        "tune": "pipeproof tune llama3_70b --gpus 512 --device h100 --global-batch 1024",
    }
)
"""Examples by the words of the command."""


_OTHER_NAMES = {"monitor": "job hang --follow", "watch": "job hang --follow"}
"""Words under which people look for a command that has another name."""


class LazyCommands(dict[str, click.Command]):
    """The commands of a group: ``modules`` maps names to ``module:attribute``, imported on lookup.

    ``commands`` are imported already; ``group`` is the word of the group.
    """

    def __init__(self, modules: Mapping[str, str], commands: Mapping[str, click.Command], group: str = "") -> None:
        super().__init__(commands)
        self._modules, self._group = dict(modules), group

    def __getitem__(self, name: str) -> click.Command:
        if name in self._modules:
            module, _, attribute = self._modules.pop(name).partition(":")
            self[name] = getattr(import_module(f"pipeproof.cli.{module}"), attribute)
            _give_example(self[name], f"{self._group} {name}".strip())
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The command, imported now; ``default`` without one."""
        return self[name] if name in self else default  # noqa: SIM401 - it is this method

    def __contains__(self, name: object) -> bool:
        return name in self._modules or super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._modules, *super().__iter__()))

    def __len__(self) -> int:
        return len(self._modules) + super().__len__()

    def items(self) -> Any:
        """Names and commands, all of them imported now."""
        return [(name, self[name]) for name in [*self]]

    def values(self) -> Any:
        """The commands, all of them imported now."""
        return [self[name] for name in [*self]]


class SuggestingGroup(click.Group):
    """A group that lists its commands with their full first sentence, and suggests a command for an unknown one.

    The help of each command ends with its example.
    """

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command of this group."""
        super().add_command(cmd, name)
        _give_example(cmd, f"{self.name} {name or cmd.name}")

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; for an unknown one, the error names the nearest command of the program."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            _refuse(args[0], ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands."""
        self._write_section("Commands", sorted(self.commands), formatter)

    def _write_section(self, title: str, names: Iterable[str], formatter: click.HelpFormatter) -> None:
        commands = [(name, self.commands[name]) for name in names if name in self.commands]
        rows = [(name, command.get_short_help_str(limit=200)) for name, command in commands if not command.hidden]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def _refuse(word: str, context: click.Context) -> NoReturn:
    from pipeproof.diagnostics.problems import nearest_name

    root = context.find_root()
    if Path(word).exists():
        from pipeproof.cli.file_kinds import note_of_word

        note = note_of_word(Path(word), context.command_path.split()[1:])
        if note is not None:
            raise click.UsageError(f"a command is missing before the file: {note}", context)
    assert isinstance(root.command, click.Group)
    places: dict[str, list[str]] = {}
    for words in command_words(root.command):
        for name in dict.fromkeys((words[-1], words[0])):
            places.setdefault(name, []).append(" ".join((*words[: words.index(name)], name)))
    for name, path in _OTHER_NAMES.items():
        places.setdefault(name, []).append(path)
    near = nearest_name(word, places)
    group = context.command_path.partition(" ")[2]
    suggestion = " or ".join(
        f"`{root.info_name} {path}`"
        for path in sorted(
            dict.fromkeys(places.get(near or "", ())),
            key=lambda path: (not path.startswith(group), path.count(" "), path),
        )
    )
    fix = f"did you mean {suggestion}?" if suggestion else f"`{context.command_path} --help` lists the commands"
    raise click.UsageError(f"there is no command {word!r}; {fix}", context)


def command_words(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command below a group."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from command_words(command, *before, name)
        else:
            yield (*before, name)


class SectionedGroup(SuggestingGroup):
    """A group whose commands are listed in sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of commands for each section."""
        in_sections = {name for _, names in SECTIONS for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in in_sections)
        for title, names in (*SECTIONS, (_OTHERS, others)):
            self._write_section(title, names, formatter)


def _give_example(command: click.Command, words: str) -> None:
    if words in EXAMPLES:
        command.epilog = f"\b\nExample:\n  {EXAMPLES[words]}"
