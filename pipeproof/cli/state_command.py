"""``pipeproof state``: contents of a checkpoint, MD5 of its tensors, verification, and comparison of two."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeproof.cli.console import console_for, echo, format_option, note_kind, opening_checkpoints, refusing_bad_plans
from pipeproof.cli.help_sections import LazyCommands, SuggestingGroup
from pipeproof.cli.option_types import PLACE, is_plan
from pipeproof.cli.progress import showing_progress
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.cli.check_report import Form
    from pipeproof.state.checkpoint import Checkpoint
    from pipeproof.state.inspect_checkpoints import StateComparison

_MANY = 40
"""Most tensors with one row each; of more, similar ones share a row."""
_SHOWN = 20

_verify_option = click.option(
    "--verify", is_flag=True, help="Check every file against the index, SHA-256 included; list all faults."
)


@click.group(cls=SuggestingGroup)
def state() -> None:
    """Show, compare, reshard and rename saved states, and compare the trainings that saved them.

    A checkpoint is a state of `run --save` (or a directory of states: the newest), a safetensors file or a directory of
    them, a checkpoint of Paddle, or PyTorch's distributed checkpoint (DCP).
    """


@state.command("show")
@click.argument("path", type=PLACE)
@click.option("--md5", is_flag=True, help="Print `name  md5` of each whole tensor, and one digest of all.")
@_verify_option
@format_option()
def show_state(path: Path, *, md5: bool, verify: bool, form: Form) -> None:
    """Show the contents of a checkpoint.

    An MD5 covers the bytes of a whole tensor, for any sharding. The exit status is 1 where --verify finds a fault.
    """
    with _opening((path,), form, verify=verify) as (opened,):
        if md5:
            _show_md5(opened, as_json=form == "json")
        elif verify and form == "text":
            _print_verified(opened)
        else:
            _show(opened, as_json=form == "json")


@state.command("diff")
@click.argument("path", type=PLACE)
@click.argument("other", type=PLACE)
@_verify_option
@format_option()
def diff_states(path: Path, other: Path, *, verify: bool, form: Form) -> None:
    """Compare two checkpoints bit by bit, of any topologies and kinds.

    The exit status is 1 where the two differ, or where --verify finds a fault.
    """
    with _opening((path, other), form, verify=verify) as (first, second):
        _compare(first, second, as_json=form == "json")


@contextmanager
def _opening(paths: Sequence[Path], form: Form, *, verify: bool) -> Iterator[tuple[Checkpoint, ...]]:
    """Open checkpoints, after ``--verify`` if given; refuse plans and unreadable files."""
    for path in paths:
        if is_plan(path) and path.is_file():
            note_kind(path)
            raise click.UsageError(f"{path} is not a checkpoint: name a state that runs of a plan saved")
    with refusing_bad_plans(form, paths[0], noted=paths), opening_checkpoints():
        if verify and not _verify(paths, as_json=form == "json"):
            sys.exit(ExitStatus.FAILED)
        from pipeproof.state.open_checkpoint import open_checkpoint

        with showing_progress("opening"):
            opened = tuple(open_checkpoint(path) for path in paths)
        yield opened


def _verify(places: Sequence[Path], *, as_json: bool) -> bool:
    from pipeproof.diagnostics.text_output import finding_to_json, render_text
    from pipeproof.state.open_checkpoint import file_findings

    with showing_progress("reading every file"):
        path_faults = [(path, file_findings(path)) for path in places if path.exists()]  # opening reports others
    if any(faults for _, faults in path_faults):
        if as_json:
            _write({"faults": [finding_to_json(fault) for _, faults in path_faults for fault in faults]})
        for path, faults in path_faults:
            if faults and not as_json:
                render_text(faults, None, console=console_for(stderr=True))
                echo(f"{path}: {len(faults)} {'fault' if len(faults) == 1 else 'faults'}")
        return False
    return True


def _print_verified(opened: Checkpoint) -> None:
    from pipeproof.state.open_checkpoint import num_checksummed

    num_files = len(opened.files)
    bare = num_files - num_checksummed(opened)
    if bare:
        subject = "it" if num_files == 1 else f"{bare} of them"
        result = f"has the length of its header; there is no SHA-256 of {subject} to check the content"
    elif opened.kind == "dcp":
        result = "has the CRC-32 of its content" if num_files == 1 else "has the CRC-32 of each tensor in it"
    else:
        origin = "its provenance file" if opened.kind == "merged" else "the index"
        result = f"has the size, SHA-256 and tensors of {origin}"
    files = "its file" if num_files == 1 else f"each of its {num_files} files"
    echo(f"{opened.path}: {files} {result}; the shards cover every tensor")


def _show(opened: Checkpoint, *, as_json: bool) -> None:
    from pipeproof.state.inspect_checkpoints import checkpoint_to_json, summary_lines, tensor_rows, totals_by_kind
    from pipeproof.views.tables import print_table

    if as_json:
        _write(checkpoint_to_json(opened))
        return
    for line in summary_lines(opened):
        echo(line)
    console = console_for()
    kinds = [(kind, dtype, *(f"{number:,}" for number in numbers)) for kind, dtype, *numbers in totals_by_kind(opened)]
    console.print()
    print_table(("kind", "type", ">tensors", ">elements", ">bytes"), kinds, console)
    rows = [
        (row.name, str(row.num), row.entry.dtype, " x ".join(map(str, row.entry.shape)) or "()", row.cut, row.states)
        for row in tensor_rows(opened, fold=len(opened.tensors) > _MANY)
    ]
    console.print()
    print_table(("tensor", ">similar", "type", "shape", "sharding", "optimizer state"), rows, console)


def _show_md5(opened: Checkpoint, *, as_json: bool) -> None:
    from pipeproof.state.checkpoint import md5_lines, md5_of_all, tensor_md5s

    with showing_progress(f"reading {opened.path}"):
        digests = tensor_md5s(opened)
    if as_json:
        _write({"md5": md5_of_all(digests), "tensors": digests})
        return
    click.echo(f"{md5_lines(digests)}all {len(digests)} tensors  {md5_of_all(digests)}")


def _compare(first: Checkpoint, second: Checkpoint, *, as_json: bool) -> None:
    from pipeproof.state.inspect_checkpoints import compare_checkpoints, comparison_to_json

    with showing_progress("comparing"):
        comparison = compare_checkpoints(first, second)
    if as_json:
        _write(comparison_to_json(comparison))
    else:
        _print_comparison(first, second, comparison)
    sys.exit(ExitStatus.OK if comparison.equal else ExitStatus.FAILED)


def _print_comparison(first: Checkpoint, second: Checkpoint, comparison: StateComparison) -> None:
    from pipeproof.state.inspect_checkpoints import difference_text
    from pipeproof.state.region_text import counted

    for checkpoint, names in ((first, comparison.only_first), (second, comparison.only_second)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            echo(f"{len(names)} only in {checkpoint.path}: {', '.join(names[:_SHOWN])}{more}")
    for difference in comparison.differ[:_SHOWN]:
        echo(f"{difference.name}: {difference_text(difference)}")
    if len(comparison.differ) > _SHOWN:
        echo(f"and {counted(len(comparison.differ) - _SHOWN, 'more tensor')}; `--format json` has them all")
    if comparison.steps is not None and comparison.steps[0] != comparison.steps[1]:
        one_step, other_step = comparison.steps
        echo(f"one is the state after {counted(one_step, 'step')}, the other after {other_step:,}")
    have = "has" if comparison.num_alike == 1 else "have"
    equal = f"{counted(comparison.num_alike, 'tensor')} {have} the same type, shape and bits"
    differ = f"{len(comparison.differ):,} {'differs' if len(comparison.differ) == 1 else 'differ'}"
    whole = "" if comparison.num_alike == 1 else "all "
    echo(f"{whole}{equal}" if comparison.equal else f"{equal}, {differ}")


def _write(content: dict[str, Any]) -> None:
    click.echo(json.dumps(content, indent=2))


state.commands = LazyCommands(
    {"reshard": "reshard_command:reshard", "aoa": "aoa_command:aoa", "align": "align_command:align"},
    state.commands,
    "state",
)
