"""``pipeproof import``: plans from files of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.cli.console import console_for, note_kind, refusing_bad_plans, writable
from pipeproof.cli.help_sections import LazyCommands, SuggestingGroup
from pipeproof.cli.plan_options import import_from, plan_options

if TYPE_CHECKING:
    from pipeproof.cli.plan_options import PlanSource


@click.group("import", cls=SuggestingGroup)
def import_group() -> None:
    """Write plans and profiles from files of other tools and from measurements."""


class _WithKinds(click.Command):
    """A command whose help has the kinds of files."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and the kinds."""
        from pipeproof.interop.importers.import_kinds import KINDS

        super().format_options(ctx, formatter)
        with formatter.section("Kinds"):
            formatter.write_dl([(name, kind.description) for name, kind in KINDS.items()])


@import_group.command("plan", cls=_WithKinds)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write the plan to this file.")  # fmt: skip
@plan_options(device=True)
def import_plan(files: tuple[Path, ...], output: Path | None, source: PlanSource) -> None:
    """Write a plan from files of another tool.

    Comments in the plan name the setting that each value comes from, and the assumptions. `pipeproof check` checks the
    files without a plan file.
    """
    from pipeproof.diagnostics.text_output import render_text
    from pipeproof.interop.importers.check_imported import import_findings, load_imported
    from pipeproof.interop.importers.imported import plan_text, with_device

    with refusing_bad_plans("text", files[0]):
        if source.kind is None:
            source = _recognised(files[0], source)
        assert source.kind is not None
        imported = import_from(source.kind, files, source.flags)
        if source.device is not None:
            imported = with_device(imported, source.device)
        load_imported(imported)
        text = plan_text(imported, source.kind)
        if output is not None:
            from pipeproof.atomic_write import write_output

            write_output(output, text)
    render_text(import_findings(imported), imported.source, console=console_for(stderr=True))
    if output is None:
        click.echo(text, nl=False)


def _recognised(file: Path, source: PlanSource) -> PlanSource:
    from pipeproof.cli.file_kinds import kind_of

    file.stat()  # one that is missing is refused as such
    kind = kind_of(file)
    if kind is None or kind.importer is None:
        note_kind(file)
        raise click.UsageError(f"the content of {file} shows no kind that is imported; `--from KIND` names it")
    return source.for_kind(file, kind)


import_group.commands = LazyCommands({"profile": "profile_command:profile"}, import_group.commands, "import")
