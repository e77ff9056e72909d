"""``pipeproof import``: plans from files of other tools, and profiles from traces of a run."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.atomic_write import write_json, write_output
from pipeproof.cli.console import console_for, note_kind, refusing_bad_plans, require_separate_outputs, writable
from pipeproof.cli.help_sections import SuggestingGroup
from pipeproof.cli.option_types import PLACE, set_option
from pipeproof.cli.plan_options import import_from, plan_options
from pipeproof.cli.progress import showing_progress

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.cli.plan_options import PlanSource
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.specs.profile_file import Profile

_NUMBER = re.compile(r"[+-]?[0-9]{0,9}(/[0-9]{1,9}|(\.[0-9]{0,9})?([eE][+-]?[0-9]{1,2})?)")
"""A fraction or a decimal number; an exponent of eight digits would be a number of a hundred million digits."""


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
            write_output(output, text)
    render_text(import_findings(imported), imported.source, console=console_for(stderr=True))
    if output is None:
        click.echo(text, nl=False)


def _recognised(file: Path, source: PlanSource) -> PlanSource:
    from pipeproof.cli.file_kinds import kind_of

    file.stat()  # a missing file is refused here
    kind = kind_of(file)
    if kind is None or kind.importer is None:
        note_kind(file)
        raise click.UsageError(f"the kind of {file} is not recognised; name it with `--from KIND`")
    return source.for_kind(file, kind)


def _time(context: click.Context, parameter: click.Parameter, value: str | None) -> Fraction | None:
    """Return the exact number of a text such as ``1/8`` or ``2.5e3``, from 0 to 10^9."""
    if value is None:
        return None
    try:
        number = Fraction(value) if _NUMBER.fullmatch(value) else None
    except (ValueError, ZeroDivisionError):
        number = None
    if number is None or not 0 <= number <= 10**9:
        raise click.BadParameter(f"{value!r} is not a time in microseconds, 0 or more")
    return number


@import_group.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--plan", type=PLACE, required=True, help="The plan of the run.")
@set_option
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), callback=writable,
              help="Write the profile, for `cost: {profile: FILE}`.")  # fmt: skip
@click.option("--message-us", callback=_time, metavar="TIME",
              help="Microseconds of a message, instead of measured ones or if the files have none.")  # fmt: skip
def profile(
    files: tuple[Path, ...],
    plan: Path,
    settings: dict[KeyPath, object],
    output: Path | None,
    message_us: Fraction | None,
) -> None:
    """Make a profile from traces of a run.

    FILE is a trace of PyTorch's profiler (.json, .json.gz, one for each rank), or a directory of them. A plan with
    `cost: {profile: FILE}` is then simulated with these times.
    """
    require_separate_outputs()
    with refusing_bad_plans("text", plan, noted=files):
        from pipeproof.interop.profiles.profile_from_traces import measured_files, profile_of_files
        from pipeproof.specs.load_plan import load_plan

        paths = measured_files(files)
        with showing_progress(f"reading {len(paths)} files"):
            new_profile = profile_of_files(paths, load_plan(plan, settings), message_us)
        if output is not None:
            write_json(output, new_profile.to_json())
    _show(new_profile, output, console_for())


def _show(new_profile: Profile, output: Path | None, console: Console) -> None:
    from rich.text import Text

    from pipeproof.views.tables import print_table

    source = new_profile.source
    assert source is not None
    measured = {op.kind for stage in new_profile.stages for op in stage.ops}
    kinds = [kind for kind in ("F", "B", "I", "W", "STEP") if kind in measured]
    medians: list[dict[str, str]] = [
        {op.kind: f"{op.whole.median_us / 1000:.3f}" for op in stage.ops} for stage in new_profile.stages
    ]
    rows = [[str(stage), *(times.get(kind, "-") for kind in kinds)] for stage, times in enumerate(medians)]
    print_table(["stage", *(f">{kind} ms" for kind in kinds)], rows, console)
    step = "" if source.step_us is None else f"; a step takes {source.step_us / 1000:.3f} ms, the median"
    lines = [f"{new_profile.steps.run} steps, {new_profile.steps.counted} counted{step}"]
    lines += [
        f"messages of {point.num_bytes} bytes: {point.median_us:.3f} us, the median of {point.count}"
        for point in new_profile.messages
    ]
    lines += [f"assumed: {note}" for note in source.assumptions]
    if output is not None:
        lines.append(f"wrote {output}: `cost: {{profile: {output.name}}}` in a plan next to it uses it")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
