"""Types of arguments and options that several commands share: paths, and ``--set``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
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
