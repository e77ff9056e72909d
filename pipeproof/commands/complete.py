"""What a shell is offered for arguments: plan files, kinds of schedules, codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

_SUFFIXES = (".yaml", ".yml", ".json")


class GivenPath(click.Path):
    """A path that is not empty: that would be the directory at hand, and is a variable of a shell that is not set."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if value in ("", b""):
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


PLACE = GivenPath(path_type=Path)
"""A file or a directory, there or not."""


class PlanFile(GivenPath):
    """A plan, or another file in YAML or JSON: a shell is offered those, and the directories on the way."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The files of such names that begin so; any file for ``--from``, whose kinds have all suffixes."""
        folder, _, beginning = incomplete.rpartition("/")
        parent = f"{folder}/" if "/" in incomplete else ""
        if ctx.params.get("kind") is not None or incomplete.startswith("~"):
            return [CompletionItem(incomplete, type="file")]
        try:
            entries = sorted(Path(parent or ".").iterdir())
        except OSError:
            return []
        entries = [entry for entry in entries if entry.name.startswith(beginning) and _shown(entry, beginning)]
        files = [entry.name for entry in entries if entry.suffix.lower() in _SUFFIXES and not entry.is_dir()]
        # a shell that is told of directories looks for them itself, and forgets what came before: so this comes first
        folders = [CompletionItem(incomplete, type="dir")] if any(entry.is_dir() for entry in entries) else []
        return [*folders, *(CompletionItem(f"{parent}{name}") for name in files)]


def _shown(entry: Path, beginning: str) -> bool:
    """Hidden files are for those who begin with the dot."""
    return beginning.startswith(".") or not entry.name.startswith(".")


def complete_code(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The codes that begin so, with their titles where a shell shows help."""
    from pipeproof.explain import all_docs

    return [CompletionItem(doc.code, help=doc.title) for doc in all_docs() if doc.code.startswith(incomplete.upper())]


def complete_schedule(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The kinds of schedules that begin so, with what they are."""
    from pipeproof.schedule.kinds import SCHEDULE_KINDS

    return [CompletionItem(k.name, help=k.title) for k in SCHEDULE_KINDS.values() if k.name.startswith(incomplete)]


def complete_convention(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The conventions of names that tensors may have."""
    from pipeproof.state.names.tables import CONVENTIONS

    return [CompletionItem(name) for name in CONVENTIONS if name.startswith(incomplete)]


def complete_importer(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The kinds of files that can be imported."""
    from pipeproof.interop.kinds import KINDS

    return [CompletionItem(kind) for kind in KINDS if kind.startswith(incomplete)]
