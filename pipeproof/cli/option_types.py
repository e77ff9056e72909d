"""Types of arguments and options that several commands share: paths, names, and ``--set``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from pipeproof.diagnostics.problems import KeyPath

_PLAN_SUFFIXES = (".yaml", ".yml", ".json")
_INDEX = "index.json"
"""Ending of the index files of checkpoints, ours and Hugging Face's."""


class GivenPath(click.Path):
    """A path that is not empty: an empty one would be the current directory, and comes from an unset shell variable."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value in ("", b""):
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


PLACE = GivenPath(path_type=Path)
"""A file or a directory that may exist or not."""


class LazyChoice(click.ParamType):  # type: ignore[type-arg]  # generic in some of click's releases
    """One of the names that ``names`` returns when an option is used: they are not imported before."""

    def __init__(self, name: str, names: Callable[[], Sequence[str]]) -> None:
        self.name, self._names = name, names

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin so."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name; for an unknown one, the error names the nearest."""
        from pipeproof.diagnostics.problems import nearest_name

        names = self._names()
        if value in names:
            return str(value)
        near = nearest_name(str(value), names)
        fix = f"; did you mean {near!r}?" if near else ""
        raise click.BadParameter(f"{value!r} is none of {', '.join(names)}{fix}", ctx, param)


def _kinds() -> Sequence[str]:
    from pipeproof.interop.importers.import_kinds import KINDS

    return tuple(KINDS)


def _devices() -> Sequence[str]:
    from pipeproof.specs.cost import DeviceName

    return get_args(DeviceName)


def _schedules() -> Sequence[str]:
    from pipeproof.schedule.kinds import SCHEDULE_KINDS

    return tuple(SCHEDULE_KINDS)


IMPORT_KIND = LazyChoice("choice", _kinds)
"""A kind of another tool's file."""
DEVICE = LazyChoice("device", _devices)
"""A device with a data sheet."""
SCHEDULE = LazyChoice("schedule", _schedules)
"""A kind of schedule."""


def is_plan(path: Path) -> bool:
    """Return True if a path is read as a plan; the index of a checkpoint has such a suffix, too."""
    return path.suffix in _PLAN_SUFFIXES and not path.is_dir() and not path.name.endswith(_INDEX)


def _settings(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[KeyPath, object]:
    """Return ``KEY=VALUE`` pairs as plan keys with values, read as in a plan file."""
    if not values:
        return {}
    from pipeproof.diagnostics.problems import dotted
    from pipeproof.diagnostics.yaml_tree import parse_text

    settings: dict[KeyPath, object] = {}
    for text in values:
        key, equals, value = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            raise click.BadParameter(f"{text!r} is not KEY=VALUE, such as model.hidden_size=4096")
        tree = parse_text(value, "--set")
        if tree.problems:
            raise click.BadParameter(f"{text!r}: {tree.problems[0].message}")
        inside = [
            other_path
            for other_path in settings
            if other_path[: len(path)] == path or path[: len(other_path)] == other_path
        ]
        if inside:
            raise click.BadParameter(f"{text!r}: {dotted(inside[0])} is set already")
        settings[path] = tree.data
    return settings


set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", callback=_settings,
    help="Set a key of the plan, such as model.hidden_size=4096; repeatable.",
)  # fmt: skip
"""``--set`` of every command that reads a plan: values that replace the file's."""
