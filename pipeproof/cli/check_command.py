"""``pipeproof check``: plans, files of other tools, programs and logs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from pipeproof.cli.console import console_for, format_option, refusing_bad_plans
from pipeproof.cli.file_kinds import LOGS, PROGRAM, kind_of
from pipeproof.cli.option_types import PLACE
from pipeproof.cli.plan_options import PlanSource, import_from, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.comm.backend_rows import Queue

if TYPE_CHECKING:
    from pipeproof.cli.check_report import CheckTask, Form
    from pipeproof.cli.file_kinds import FileKind
    from pipeproof.cli.progress import OnProgress
    from pipeproof.interop.importers.imported import Flags
    from pipeproof.verify.check_plan import Report
    from pipeproof.verify.registry import Selection


@click.command()
@click.argument("files", metavar="FILE...", type=PLACE, nargs=-1, required=True)
@plan_options()
@click.option("--plan", metavar="PLAN", type=click.Path(path_type=Path),
              help="For logs: compare the messages with this plan.")  # fmt: skip
@click.option("--transport", "backend", metavar="NAME",
              help="For a program text: the backend whose guarantees hold, such as paddle-gloo.")  # fmt: skip
@click.option("--queue", type=click.Choice(get_args(Queue)),
              help="For a program text or logs: which transfers of a rank share one FIFO queue, as in the plan key "
              "`transport.queue`; default: as the backend.")  # fmt: skip
@format_option("sarif")
@click.option("--select", multiple=True, metavar="CODES",
              help="Run only these rules: codes or prefixes, such as PP401,3xx.")  # fmt: skip
@click.option("--ignore", multiple=True, metavar="CODES", help="Skip these rules; the result then has no certificate.")
@click.option("--strict", is_flag=True, help="Fail on warnings, too.")
@click.option("--all", "everything", is_flag=True, help="Show every finding of each code, in full.")
def check(
    files: tuple[Path, ...],
    source: PlanSource,
    plan: Path | None,
    backend: str | None,
    queue: Queue | None,
    form: Form,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    strict: bool,
    everything: bool,
) -> None:
    """Prove that communication is correct, or report where it is wrong.

    FILE is a plan, a file of another tool, a program text (one line for each rank), or the directory with the logs of a
    recorded program.
    """
    from pipeproof.cli.check_report import run_checks, selection_of, show_all

    recognised = [] if source.kind is not None else list(map(kind_of, files))
    kinds = [_Kind.IMPORTED] if source.kind is not None else list(map(_kind, files, recognised))
    for option, value, takers in (
        ("--plan", plan, {_Kind.LOG}),
        ("--transport", backend, {_Kind.PROGRAM}),
        ("--queue", queue, {_Kind.PROGRAM, _Kind.LOG}),
        ("--set", source.settings or None, {_Kind.PLAN, _Kind.IMPORTED}),
    ):
        if value is not None and takers.isdisjoint(kinds) and files[0].exists():
            raise click.UsageError(f"{option} is for {' and '.join(sorted(takers))}, which {files[0]} is not")
    if {_Kind.PLAN, _Kind.IMPORTED}.isdisjoint(kinds):
        source.refuse_import_options()
    selection = selection_of(select, ignore, _codes(set(kinds)))

    def task(file: Path, kind: _Kind, file_kind: FileKind | None) -> CheckTask:
        if kind is _Kind.PROGRAM:
            return (file,), partial(_check_program, file, backend, queue, selection)
        if kind is _Kind.LOG:
            return (file,), partial(_check_log, file, plan, queue, selection)
        return (file,), partial(_check_file, file, file_kind, source, selection)

    tasks = list(map(task, files, kinds, recognised))
    if source.kind is not None:
        tasks = [(files, partial(_check_imported, source.kind, files, source.flags, selection))]
    with (
        refusing_bad_plans(form, files[0]), _without_garbage_collection(),
        showing_progress("checking") as on_progress,
    ):  # fmt: skip
        results = run_checks(tasks, on_progress)
    sys.exit(show_all(results, form, console_for, strict=strict, everything=everything))


class _Kind(StrEnum):
    """A kind of argument of the command."""

    IMPORTED = "a file of another tool"
    LOG = "a directory of logs"
    PLAN = "a plan"
    PROGRAM = "a program text"


def _kind(file: Path, kind: FileKind | None) -> _Kind:
    """An unrecognised file counts as a program if its suffix is ``.txt``, else as a plan."""
    if kind is LOGS:
        return _Kind.LOG
    if kind is PROGRAM or (kind is None and file.suffix == ".txt"):
        return _Kind.PROGRAM
    return _Kind.PLAN if kind is None or kind.importer is None else _Kind.IMPORTED


def _codes(kinds: Collection[_Kind]) -> list[str]:
    """The codes besides rules that a check of such files may report."""
    codes = []
    if _Kind.IMPORTED in kinds:
        from pipeproof.interop.importers.import_codes import IMPORT_CODES

        codes += [doc.code for doc in IMPORT_CODES]
    if _Kind.LOG in kinds:
        from pipeproof.interop.hang.hang_codes import HANG_CYCLE, NEVER_ISSUED
        from pipeproof.interop.traces.trace_codes import RECORD_CODES

        codes += [doc.code for doc in (*RECORD_CODES, HANG_CYCLE, NEVER_ISSUED)]
    return codes


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Switch garbage collection off: building the plan's models triggers it many times without effect."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # loaded modules stay: they need no collection
            gc.enable()


def _check_file(
    file: Path, kind: FileKind | None, source: PlanSource, selection: Selection, on_progress: OnProgress
) -> Report:  # fmt: skip
    from pipeproof.specs.load_plan import load_plan
    from pipeproof.verify.check_plan import check as check_plan

    source = source.for_kind(file, kind)
    if source.kind is not None:
        return _check_imported(source.kind, (file,), source.flags, selection, on_progress)
    return check_plan(load_plan(file, source.settings), selection, on_progress)


def _check_imported(
    kind: str, files: tuple[Path, ...], flags: Flags, selection: Selection, on_progress: OnProgress
) -> Report:  # fmt: skip
    from pipeproof.interop.importers.check_imported import check_imported

    return check_imported(import_from(kind, files, flags), selection, on_progress)


def _check_log(
    directory: Path, plan: Path | None, queue: Queue | None, selection: Selection, on_progress: OnProgress
) -> Report:  # fmt: skip
    from pipeproof.interop.traces.check_traces import check_log
    from pipeproof.specs.load_plan import load_plan

    return check_log(
        directory, plan=None if plan is None else load_plan(plan), queue=queue, selection=selection,
        on_progress=on_progress,
    )  # fmt: skip


def _check_program(
    file: Path, backend: str | None, queue: Queue | None, selection: Selection, on_progress: OnProgress
) -> Report:  # fmt: skip
    from pipeproof.comm.backends import backend_table, table_named, with_queue
    from pipeproof.verify.check_plan import check_subject
    from pipeproof.verify.subject import load_program

    try:
        table = backend_table("paddle", "cpu") if backend is None else table_named(backend)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--transport") from error
    return check_subject(load_program(file, backend=with_queue(table, queue)), selection, on_progress)
