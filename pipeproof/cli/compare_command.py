"""``pipeproof compare``: two timelines side by side, such as predicted and measured.

The libraries are imported when it runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pipeproof.cli.console import console_for, format_option, note_kind, refusing_bad_plans
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.schedule.kinds import SCHEDULE_KINDS

if TYPE_CHECKING:
    from pipeproof.analysis.compare.timeline_files import TimelineFile
    from pipeproof.cli.file_kinds import FileKind


@click.command()
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="B", type=click.Path(path_type=Path))
@plan_options(device=True)
@click.option("--step", type=click.IntRange(min=0), help="Only this step of files with several steps.")
@click.option("--worst", type=click.IntRange(0, 100_000), default=10, show_default=True,
              help="Number of listed operations with the largest differences of length.")  # fmt: skip
@format_option()
def compare(
    a: Path, b: Path, source: PlanSource, step: int | None, worst: int, form: Literal["text", "json"],
) -> None:  # fmt: skip
    """Compare two timelines: differences of lengths, starts and totals, and the first difference of order.

    A and B are plans or files of another tool, which are simulated, traces of `simulate -o` or `run -o`, or reports of
    `run --report`. B may be a kind of schedule, such as zb_v: plan A with this schedule. --set applies to plans only.
    The exit status is 0 for any differences.
    """
    from pipeproof.cli.file_kinds import kind_of

    is_kind = str(b) in SCHEDULE_KINDS and not b.exists()
    kinds = [kind_of(a), None if is_kind else kind_of(b)]
    if not any(map(_is_imported, kinds)):
        source.refuse_import_options()
    first = _read("A", a, source, kinds[0])
    second = _of_kind(str(b), a, first, source) if is_kind else _read("B", b, source, kinds[1])
    with refusing_bad_plans("text", b):
        from pipeproof.analysis.compare.timeline_files import with_common_layers

        second, note = with_common_layers(first, second)
    from pipeproof.analysis.compare.compare_text import comparison_to_json, render_comparison
    from pipeproof.analysis.compare.compare_timelines import compare_timelines

    try:
        with showing_progress("comparing"):
            comparison = compare_timelines(first, second, step)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if form == "json":
        click.echo(json.dumps(comparison_to_json(comparison, worst=worst, note=note), indent=2))
    else:
        render_comparison(comparison, console_for(), worst=worst, note=note)


def _of_kind(kind: str, plan: Path, first: TimelineFile, source: PlanSource) -> TimelineFile:
    """The step of a plan with another kind of schedule, each stage with the time of its layers."""
    with refusing_bad_plans("text", plan), showing_progress(f"simulating {kind}"):
        from pipeproof.analysis.compare.timeline_files import simulated_plan
        from pipeproof.api.given_plan import plan_data
        from pipeproof.specs.load_plan import plan_from_dict

        data = plan_data(first.loaded or source.load(plan))
        declared = data["schedule"]
        assert isinstance(declared, dict)
        kept = {key: declared[key] for key in ("num_micro_batches", "micro_batch_size") if key in declared}
        chunks = max(SCHEDULE_KINDS[kind].min_chunks, 1)
        data |= {"schedule": {"kind": kind, "num_chunks": chunks, **kept}}
        return simulated_plan(kind, plan_from_dict(data))


def _is_imported(kind: FileKind | None) -> bool:
    return kind is not None and kind.importer is not None


def _read(name: str, path: Path, source: PlanSource, kind: FileKind | None) -> TimelineFile:
    with refusing_bad_plans("text", path), showing_progress(f"reading {path}"):
        from pipeproof.analysis.compare.timeline_files import TimelineFileError, read_timeline, simulated_plan
        from pipeproof.specs.load_plan import load_plan

        try:
            if _is_imported(kind):
                importer = source if source.kind is not None else source.for_kind(path, kind)
                return simulated_plan(str(path), importer.load(path))
            return read_timeline(path, lambda file: load_plan(file, source.settings))
        except TimelineFileError as error:
            note_kind(path)
            raise click.BadParameter(str(error), param_hint=name) from error
