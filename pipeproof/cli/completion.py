"""Shell completion: argument types that complete plan files, completion of names, and ``pipeproof --completion``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

_NAME = "pipeproof"
_VARIABLE = "_PIPEPROOF_COMPLETE"
"""The environment variable that click reads for a command of this name."""

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


class PlanFile(GivenPath):
    """A plan, or another file in YAML or JSON; completion offers such files and directories."""

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return matching files with these suffixes; all files with ``--from``, whose kinds have other suffixes."""
        folder, _, beginning = incomplete.rpartition("/")
        parent = f"{folder}/" if "/" in incomplete else ""
        if ctx.params.get("kind") is not None or incomplete.startswith("~"):
            return [CompletionItem(incomplete, type="file")]
        try:
            entries = sorted(Path(parent or ".").iterdir())
        except OSError:
            return []
        entries = [entry for entry in entries if entry.name.startswith(beginning) and _is_offered(entry, beginning)]
        files = [entry.name for entry in entries if entry.suffix.lower() in _PLAN_SUFFIXES and not entry.is_dir()]
        # For an item of type dir, a shell searches directories itself and drops earlier items: so it comes first.
        folders = [CompletionItem(incomplete, type="dir")] if any(entry.is_dir() for entry in entries) else []
        return [*folders, *(CompletionItem(f"{parent}{name}") for name in files)]


def _is_offered(entry: Path, beginning: str) -> bool:
    """Hidden files are offered only after a dot."""
    return beginning.startswith(".") or not entry.name.startswith(".")


def is_plan(path: Path) -> bool:
    """Return True if a path is read as a plan; the index of a checkpoint has such a suffix, too."""
    return path.suffix in _PLAN_SUFFIXES and not path.is_dir() and not path.name.endswith(_INDEX)


def complete_code(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return matching codes, with their titles for shells that show help."""
    from pipeproof.cli.code_registry import all_docs

    return [CompletionItem(doc.code, help=doc.title) for doc in all_docs() if doc.code.startswith(incomplete.upper())]


def complete_schedule(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return matching kinds of schedules, with their titles."""
    from pipeproof.schedule.kinds import SCHEDULE_KINDS

    return [CompletionItem(k.name, help=k.title) for k in SCHEDULE_KINDS.values() if k.name.startswith(incomplete)]


def complete_convention(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return matching conventions of tensor names."""
    from pipeproof.state.names.convention_tables import CONVENTIONS

    return [CompletionItem(name) for name in CONVENTIONS if name.startswith(incomplete)]


def _print_completion(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    if shell is None or context.resilient_parsing:
        return
    script = get_completion_class(shell)
    assert script is not None  # click has these three
    click.echo(script(context.find_root().command, {}, _NAME, _VARIABLE).source())
    context.exit()


completion_option = click.option(
    "--completion", type=click.Choice(["bash", "zsh", "fish"]), is_eager=True, expose_value=False,
    callback=_print_completion,
    help="Print the script with which this shell completes commands, options, plans, codes and schedules, and exit. "
    'bash, in ~/.bashrc, and zsh, in ~/.zshrc after compinit: eval "$(pipeproof --completion bash)"; fish, once: '
    "pipeproof --completion fish > ~/.config/fish/completions/pipeproof.fish",
)  # fmt: skip
