"""``pipeproof state align``: two records, or two logs, bit for bit.

The libraries are imported when it runs.
"""

from __future__ import annotations

import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.console import (
    console_for,
    format_option,
    not_nan,
    note_kind,
    print_error,
    refusing_bad_plans,
    require_separate_outputs,
    writable,
)
from pipeproof.cli.progress import showing_progress
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.analysis.align.record_map import MapFile


def _order(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(value.split(","))
    if len(set(names)) != len(names) or any(name != "main" and not name.startswith("mtp") for name in names):
        raise click.BadParameter(f"{value!r} is not an order of losses, such as main,mtp or mtp1,mtp2,main")
    return names


def _picture(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and value.suffix.lower() != ".svg":
        raise click.BadParameter(f"{str(value)!r} has another ending than .svg (a picture)")
    return writable(context, parameter, value)


@click.command()
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="B", type=click.Path(path_type=Path))
@click.option("--ulps", type=click.IntRange(min=0), default=0, show_default=True,
              help="Allowed difference of elements and losses, in ULPs (representable numbers).")  # fmt: skip
@click.option("--relative", type=click.FloatRange(min=0.0), default=0.0, show_default=True, callback=not_nan,
              help="Allowed difference of a tensor, relative to B's largest element.")  # fmt: skip
@click.option("--rounding", is_flag=True, help="Allow differences within the rounding error bound.")
@click.option("--names-a", metavar="NAMES",
              help="Records: the naming convention of A's model, such as megatron; needs --names-b.")  # fmt: skip
@click.option("--names-b", metavar="NAMES", help="Records: the naming convention of B's model, such as huggingface.")
@click.option("--map", "map_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Records: a YAML file of matching tensors with different names.")  # fmt: skip
@click.option("--draft", is_flag=True, help="Propose a --map for unmatched tensors, by shape and order, and print it.")
@click.option("-m", "--micro-batches", type=click.IntRange(min=1), default=1, show_default=True,
              help="Logs: number of micro-batches in a step, for counting anchors.")  # fmt: skip
@click.option("--order-a", default="main", show_default=True, callback=_order, metavar="NAMES",
              help="Logs: order of the losses in A for each micro-batch; PaddleFleet: main,mtp.")  # fmt: skip
@click.option("--order-b", default="main", show_default=True, callback=_order, metavar="NAMES",
              help="Logs: order of the losses in B; Megatron: mtp,main.")  # fmt: skip
@click.option("--rank-a", type=click.IntRange(min=0), help="Logs: read only this rank's anchors in A.")
@click.option("--rank-b", type=click.IntRange(min=0), help="Logs: read only this rank's anchors in B.")
@click.option("--plot", "picture", type=click.Path(path_type=Path, dir_okay=False), callback=_picture,
              metavar="FILE", help="Also plot the main losses by step to this .svg file.")  # fmt: skip
@format_option()
def align(
    a: Path,
    b: Path,
    ulps: int,
    relative: float,
    rounding: bool,
    names_a: str | None,
    names_b: str | None,
    map_file: Path | None,
    draft: bool,
    micro_batches: int,
    order_a: tuple[str, ...],
    order_b: tuple[str, ...],
    rank_a: int | None,
    rank_b: int | None,
    picture: Path | None,
    form: str,
) -> None:
    """Compare two trainings bit for bit, and report the first difference: step, layer, rank, and its cause.

    A and B are record directories (`run --record`, `record_layers`), or text logs of PaddleFormers, PaddleFleet or
    Megatron; write `first,second` for a training in several parts. Exit status: 0 only if all is equal within the
    allowed differences, 1 if not, 2 if a side cannot be read or the two have nothing in common.
    """
    from pipeproof.analysis.align.alignment_text import alignment_to_json, render_alignment
    from pipeproof.analysis.align.compare_records import align as align_files
    from pipeproof.analysis.align.loss_pairs import Tolerance
    from pipeproof.analysis.align.loss_picture import loss_picture
    from pipeproof.analysis.align.read_record import parts_of
    from pipeproof.analysis.align.record_format import AlignmentError
    from pipeproof.analysis.align.record_map import read_map
    from pipeproof.analysis.align.training_logs import LogForm

    require_separate_outputs(parts_of)
    if (names_a is None) != (names_b is None):
        raise click.UsageError("give both --names-a and --names-b, or neither")
    if (rank_a is None) != (rank_b is None):
        raise click.UsageError("give --rank-a and --rank-b, or neither: ranks are compared by number")
    if draft and picture is not None:
        raise click.UsageError("--draft compares nothing that --plot could draw: leave one out")
    forms = (LogForm(micro_batches, order_a, rank_a), LogForm(micro_batches, order_b, rank_b))
    names = None if names_a is None or names_b is None else (names_a, names_b)
    try:
        with refusing_bad_plans("text", map_file or a), showing_progress("comparing") as on_progress:
            partners = None if map_file is None else read_map(map_file)
            if draft:
                click.echo(_draft(a, b, names, partners), nl=False)
                return
            alignment = align_files(
                a, b, Tolerance(ulps, relative, rounding), forms,
                lambda step: on_progress(f"comparing; step {step}", 0, 0), names, partners,
            )  # fmt: skip
            drawn = None if picture is None else loss_picture(a, b, forms, _factor(partners))
    except AlignmentError as error:
        print_error(f"{error}")
        for side in dict.fromkeys((a, b)):
            note_kind(side)
        sys.exit(ExitStatus.BAD_INPUT)
    if picture is not None and drawn is not None:
        write_output(picture, drawn)
        click.echo(f"picture written to {picture}", err=True)
    if form == "json":
        click.echo(json.dumps(alignment_to_json(alignment), indent=2))
    else:
        render_alignment(alignment, console_for())
    sys.exit(ExitStatus.OK if alignment.equal else ExitStatus.FAILED)


def _factor(partners: MapFile | None) -> Fraction:
    return Fraction(1) if partners is None else partners.scale.get("main", Fraction(1))


def _draft(a: Path, b: Path, names: tuple[str, str] | None, partners: MapFile | None) -> str:
    from pipeproof.analysis.align.draft_map import draft_map
    from pipeproof.analysis.align.read_record import open_record
    from pipeproof.analysis.align.record_map import RecordMap

    records = open_record(a), open_record(b)
    return draft_map(*records, RecordMap(*records, names, partners))
