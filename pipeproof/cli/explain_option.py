"""``pipeproof --explain``: the documentation of one code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipeproof.cli.completion import complete_code
from pipeproof.cli.console import console_for

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.diagnostics.finding import RuleDoc


def _explain(context: click.Context, parameter: click.Parameter, code: str | None) -> None:
    if code is None or context.resilient_parsing:
        return
    from pipeproof.cli.code_registry import all_docs

    doc = next((doc for doc in all_docs() if doc.code == code.upper()), None)
    if doc is None:
        known = ", ".join(doc.code for doc in all_docs())
        raise click.BadParameter(f"no code {code!r}; known are {known}")
    _render(doc, console_for())
    context.exit()


explain_option = click.option(
    "--explain", metavar="CODE", is_eager=True, expose_value=False, callback=_explain, shell_complete=complete_code,
    help="Explain a code such as PP201, with a wrong and a right example, and exit.",
)  # fmt: skip


def _render(doc: RuleDoc, console: Console) -> None:
    """Print one code: its meaning, a wrong and a right example."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(f"[bold]{doc.code}[/] ({doc.severity}): {doc.title}\n")
    console.print(doc.explanation)
    for title, example in (("wrong", doc.wrong), ("right", doc.right)):
        console.print(f"\n[bold]{title}[/]")
        console.print(Padding(Text(example), (0, 2)))
