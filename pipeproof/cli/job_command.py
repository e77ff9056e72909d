"""The group ``pipeproof job``."""

from __future__ import annotations

import click

from pipeproof.cli.help_sections import LazyCommands, SuggestingGroup


@click.group(cls=SuggestingGroup)
def job() -> None:
    """Examine jobs that hang."""


job.commands = LazyCommands({"hang": "hang_command:hang"}, job.commands, "job")
