"""``pipeproof import``: plans from files of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.cli.console import console_for, refusing_bad_plans, require_separate_outputs, writable
from pipeproof.cli.help_sections import LazyCommands, SuggestingGroup
from pipeproof.cli.plan_options import DeviceParam, import_from, import_options
from pipeproof.interop.importers.import_kinds import KINDS

if TYPE_CHECKING:
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.interop.importers.imported import Flags
    from pipeproof.specs.cost import DeviceName


@click.group("import", cls=SuggestingGroup)
def import_group() -> None:
    """Write plans, declarations of layers and profiles from files of other tools and from measurements."""


def _add_importer(kind: str) -> None:
    """Add the command that writes a plan from files of a kind of ``KINDS``."""

    @import_group.command(
        kind,
        short_help=f"Write a plan from {KINDS[kind].description}.",
        help=f"""Write a plan file from {KINDS[kind].description}.

        Comments in the plan name the setting that each value comes from, and the assumptions. `pipeproof check --from
        {kind}` checks the files without a plan file.
        """,
    )
    @click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
    @click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
                  help="Write the plan to this file.")  # fmt: skip
    @click.option("--device", type=DeviceParam(),
                  help="Let the times of the plan be computed for this device (`cost.analytic`).")  # fmt: skip
    @import_options
    def command(
        files: tuple[Path, ...],
        output: Path | None,
        device: DeviceName | None,
        settings: dict[KeyPath, object],
        model_config: Path | None,
        world_size: int | None,
    ) -> None:
        from pipeproof.interop.importers.imported import Flags

        require_separate_outputs()
        _import_plan(kind, files, output, device, Flags(settings, model_config, world_size))


for _kind in KINDS:
    _add_importer(_kind)


def _import_plan(
    kind: str, files: tuple[Path, ...], output: Path | None, device: DeviceName | None, flags: Flags
) -> None:
    from pipeproof.diagnostics.text_output import render_text
    from pipeproof.interop.importers.check_imported import import_findings, load_imported
    from pipeproof.interop.importers.imported import plan_text, with_device

    with refusing_bad_plans("text", files[0]):
        imported = import_from(kind, files, flags)
        if device is not None:
            imported = with_device(imported, device)
        load_imported(imported)
        text = plan_text(imported, kind)
        if output is not None:
            from pipeproof.atomic_write import write_output

            write_output(output, text)
    render_text(import_findings(imported), imported.source, console=console_for(stderr=True))
    if output is None:
        click.echo(text, nl=False)


import_group.commands = LazyCommands(
    {
        "profile": "profile_command:profile",
    },
    import_group.commands,
    "import",
)
