"""``pipeproof explain``: the documentation of one code."""

from __future__ import annotations

from rich.console import Console
from rich.syntax import Syntax

from pipeproof.specs.codes import RuleDoc
from pipeproof.verify.registry import all_docs


def find_doc(code: str) -> RuleDoc | None:
    """The documentation of a code, whatever its case; None if there is no such code."""
    return next((doc for doc in all_docs() if doc.code == code.upper()), None)


def known_codes() -> tuple[str, ...]:
    """Every code that has a page."""
    return tuple(doc.code for doc in all_docs())


def render_doc(doc: RuleDoc, console: Console) -> None:
    """Print one page: what it means, a wrong and a right example."""
    console.print(f"[bold]{doc.code}[/] ({doc.severity}): {doc.title}\n")
    console.print(doc.explanation)
    for title, example in (("wrong", doc.wrong), ("right", doc.right)):
        console.print(f"\n[bold]{title}[/]")
        console.print(Syntax(example, "yaml", background_color="default", padding=(0, 2)))
