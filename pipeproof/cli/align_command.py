"""``pipeproof state align``: two records, or two logs, bit for bit.

It imports what it needs when it runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from pipeproof.cli.console import console_for, format_option, not_nan, note_kind, print_error
from pipeproof.cli.progress import showing_progress
from pipeproof.exit_status import ExitStatus


def _order(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(value.split(","))
    if len(set(names)) != len(names) or any(name != "main" and not name.startswith("mtp") for name in names):
        raise click.BadParameter(f"{value!r} is no order of losses, such as main,mtp or mtp1,mtp2,main")
    return names


@click.command()
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="B", type=click.Path(path_type=Path))
@click.option("--ulps", type=click.IntRange(min=0), default=0, show_default=True,
              help="Allowed distance of elements, and of losses, in representable numbers.")  # fmt: skip
@click.option("--relative", type=click.FloatRange(min=0.0), default=0.0, show_default=True, callback=not_nan,
              help="Or the allowed difference of a tensor, relative to B's largest element.")  # fmt: skip
@click.option("-m", "--micro-batches", type=click.IntRange(min=1), default=1, show_default=True,
              help="Of logs: number of micro-batches of a step, for counting anchors.")  # fmt: skip
@click.option("--order-a", default="main", show_default=True, callback=_order, metavar="NAMES",
              help="Of logs: losses whose anchors A prints for a micro-batch; PaddleFleet: main,mtp.")  # fmt: skip
@click.option("--order-b", default="main", show_default=True, callback=_order, metavar="NAMES",
              help="The same of B; Megatron: mtp,main.")  # fmt: skip
@click.option("--rank-a", type=click.IntRange(min=0), help="Of logs: read only this rank's anchors in A.")
@click.option("--rank-b", type=click.IntRange(min=0), help="The same of B, which may be another rank.")
@format_option()
def align(
    a: Path,
    b: Path,
    ulps: int,
    relative: float,
    micro_batches: int,
    order_a: tuple[str, ...],
    order_b: tuple[str, ...],
    rank_a: int | None,
    rank_b: int | None,
    form: str,
) -> None:
    """Compare two trainings bit for bit, and report the first difference: step, layer, rank, and its cause.

    A and B are records of `run --record` (a directory with record.jsonl), or text logs as PaddleFormers,
    PaddleFleet and Megatron print them. The exit status is 0 only if all is equal within the given
    distances, 1 if not, 2 if a side cannot be read or the two have nothing in common.
    """
    from pipeproof.analysis.align.align_errors import AlignmentError
    from pipeproof.analysis.align.alignment_text import alignment_to_json, render_alignment
    from pipeproof.analysis.align.compare_records import align as align_files
    from pipeproof.analysis.align.loss_pairs import Tolerance
    from pipeproof.analysis.align.training_logs import LogForm

    if (rank_a is None) != (rank_b is None):
        raise click.UsageError("give --rank-a and --rank-b, or neither: ranks are compared by number")
    forms = (LogForm(micro_batches, order_a, rank_a), LogForm(micro_batches, order_b, rank_b))
    try:
        with showing_progress("comparing") as on_progress:
            found = align_files(
                a, b, Tolerance(ulps, relative), forms, lambda step: on_progress(f"comparing; step {step}", 0, 0)
            )
    except AlignmentError as error:
        print_error(f"{error}")
        for side in dict.fromkeys((a, b)):
            note_kind(side)
        sys.exit(ExitStatus.BAD_INPUT)
    if form == "json":
        click.echo(json.dumps(alignment_to_json(found), indent=2))
    else:
        render_alignment(found, console_for())
    sys.exit(ExitStatus.OK if found.equal else ExitStatus.FAILED)
