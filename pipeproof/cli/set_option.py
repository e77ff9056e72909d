"""The option ``--set`` of every command that reads a plan: values in place of those of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pipeproof.diagnostics.problems import KeyPath


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
        inside = [known for known in settings if known[: len(path)] == path or path[: len(known)] == known]
        if inside:
            raise click.BadParameter(f"{text!r}: {dotted(inside[0])} is set already")
        settings[path] = tree.data
    return settings


set_option = click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", callback=_settings,
    help="Use this value for a key of the plan, such as model.hidden_size=4096; repeatable.",
)  # fmt: skip
