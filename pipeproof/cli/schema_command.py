"""``pipeproof schema``: the JSON Schema of plan files."""

from __future__ import annotations

import json

import click


@click.command()
def schema() -> None:
    """Print the JSON Schema of plan files, for editors."""
    from pipeproof.specs.plan import plan_json_schema

    click.echo(json.dumps(plan_json_schema(), indent=2))
