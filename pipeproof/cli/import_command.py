"""``pipeproof import``, and its parts that ``check --from`` shares: files of other tools, and their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.completion import complete_importer
from pipeproof.cli.console import console_for, refusing_bad_plans, writable

if TYPE_CHECKING:
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.interop.importers.imported import Flags, Imported
    from pipeproof.specs.cost import DeviceName

_Command = TypeVar("_Command", bound=Callable[..., Any])


class KindName(click.ParamType):  # type: ignore[type-arg]  # generic in some of click's releases
    """A name of ``pipeproof.interop.importers.import_kinds.KINDS``, which is imported on use."""

    name = "kind"

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the name in help texts."""
        return "KIND"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name of an existing kind."""
        from pipeproof.diagnostics.problems import nearest_name
        from pipeproof.interop.importers.import_kinds import KINDS

        if value in KINDS:
            return str(value)
        near = nearest_name(str(value), KINDS)
        fix = f"; did you mean {near!r}?" if near else ""
        raise click.BadParameter(f"{value!r} is none of {', '.join(KINDS)}{fix}", ctx, param)


class DeviceParam(click.ParamType):  # type: ignore[type-arg]  # generic in some of click's releases
    """A name of ``pipeproof.specs.cost.DeviceName``, which is imported on use."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name of a device with a data sheet."""
        from pipeproof.specs.cost import DeviceName

        known = get_args(DeviceName)
        if value not in known:
            raise click.BadParameter(f"{value!r} is none of {', '.join(known)}", ctx, param)
        return str(value)


def _settings(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[KeyPath, object]:
    """Return ``KEY=VALUE`` pairs as plan keys with values, read as in a plan file; the callback of ``--set``."""
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


def import_options(command: _Command) -> _Command:
    """Give a command the options for values that the files lack."""
    model_help = "A model's config.json with its sizes, for imported files."
    set_help = "A plan key for imported files, such as model.hidden_size=4096; repeatable."
    for option in (
        click.option("--world-size", type=click.IntRange(min=1), help="Number of processes, for imported files."),
        click.option("--model-config", type=click.Path(path_type=Path), help=model_help),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", callback=_settings, help=set_help),
    ):
        command = option(command)
    return command


def import_from(kind: str, files: Sequence[Path], flags: Flags) -> Imported:
    """Import the files.

    Raises:
        PlanFileError: they cannot be a plan.
    """
    from pipeproof.interop.importers.import_kinds import import_files

    return import_files(kind, files, flags)


@click.command("import")
@click.argument("kind", type=KindName(), shell_complete=complete_importer)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write the plan to this file.")  # fmt: skip
@click.option("--device", type=DeviceParam(),
              help="Let the times of the plan be computed for this device (`cost.analytic`).")  # fmt: skip
@import_options
def import_plan(
    kind: str,
    files: tuple[Path, ...],
    output: Path | None,
    device: DeviceName | None,
    settings: dict[KeyPath, object],
    model_config: Path | None,
    world_size: int | None,
) -> None:
    """Write a plan file from files of another tool.

    Comments in the plan name the setting that each value comes from, and the assumptions. `pipeproof check --from`
    checks the files without a plan file.
    """
    from pipeproof.diagnostics.text_output import render_text
    from pipeproof.interop.importers.check_imported import import_findings, load_imported
    from pipeproof.interop.importers.imported import Flags, plan_text, with_device

    with refusing_bad_plans("text", files[0]):
        imported = import_from(kind, files, Flags(settings, model_config, world_size))
        if device is not None:
            imported = with_device(imported, device)
        load_imported(imported)
        text = plan_text(imported, kind)
        if output is not None:
            write_output(output, text)
    render_text(import_findings(imported), imported.source, console=console_for(stderr=True))
    if output is None:
        click.echo(text, nl=False)
