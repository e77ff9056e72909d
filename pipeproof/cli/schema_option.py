"""``pipeproof --schema``: the JSON Schema of plan files."""

from __future__ import annotations

import json

import click


def _print_schema(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from pipeproof.specs.plan import plan_json_schema

        click.echo(json.dumps(plan_json_schema(), indent=2))
        context.exit()


schema_option = click.option(
    "--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
    help="Print the JSON Schema of plan files, for editors, and exit.",
)  # fmt: skip
