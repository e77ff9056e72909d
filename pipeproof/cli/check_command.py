"""``pipeproof check``: plans, files of other tools, programs and logs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from pipeproof.cli.console import console_for, format_option, refusing_bad_plans
from pipeproof.cli.import_command import import_from
from pipeproof.cli.path_types import PLACE
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.comm.backend_rows import Queue

if TYPE_CHECKING:
    from pipeproof.cli.check_report import CheckTask, Form
    from pipeproof.cli.progress import OnProgress
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.interop.importers.imported import Flags
    from pipeproof.verify.check_plan import Report
    from pipeproof.verify.registry import Selection


def _log_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--log`` and ``--plan`` (as ``log_plan``)."""
    for option in (
        click.option("--plan", "log_plan", metavar="PLAN", type=click.Path(path_type=Path),
                     help="With --log: compare the messages with those of this plan."),
        click.option("--log", metavar="DIR", type=click.Path(path_type=Path),
                     help="Check the logs of a recorded program; `docs/recording.md` describes recording."),
    ):  # fmt: skip
        command = option(command)
    return command


def _import_codes() -> list[str]:
    from pipeproof.interop.importers.import_codes import IMPORT_CODES

    return [doc.code for doc in IMPORT_CODES]


def _log_codes() -> list[str]:
    """Return the codes besides rules that a check of logs may report."""
    from pipeproof.interop.hang.hang_codes import HANG_CYCLE, NEVER_ISSUED
    from pipeproof.interop.traces.trace_codes import RECORD_CODES

    return [doc.code for doc in (*RECORD_CODES, HANG_CYCLE, NEVER_ISSUED)]


def _check_log(
    directory: Path, plan: Path | None, queue: Queue | None, selection: Selection, on_progress: OnProgress
) -> Report:  # fmt: skip
    """Check the logs in a directory.

    Raises:
        PlanFileError: a log, or the plan, cannot be read.
    """
    from pipeproof.interop.traces.check_traces import check_log
    from pipeproof.specs.load_plan import load_plan

    return check_log(
        directory, plan=None if plan is None else load_plan(plan), queue=queue, selection=selection,
        on_progress=on_progress,
    )  # fmt: skip


@click.command()
@click.argument("files", metavar="[PLAN]...", type=PLACE, nargs=-1)
@plan_options()
@click.option("--program", type=click.Path(path_type=Path),
              help="Check this program text, without a plan.")  # fmt: skip
@click.option(
    "--transport",
    "backend",
    metavar="NAME",
    help="The backend whose guarantees hold for --program, such as paddle-gloo.",
)
@_log_options
@click.option("--queue", type=click.Choice(get_args(Queue)),
              help="With --program or --log: transfers of a rank that share one FIFO queue, as `transport.queue` of a "
              "plan declares it; default: those of the backend.")  # fmt: skip
@format_option("sarif")
@click.option("--select", multiple=True, metavar="CODES",
              help="Run only these rules: codes or their beginnings, such as PP401,3xx.")  # fmt: skip
@click.option("--ignore", multiple=True, metavar="CODES", help="Leave these rules out; there is no certificate then.")
@click.option("--strict", is_flag=True, help="Let warnings fail the check, too.")
@click.option("--all", "everything", is_flag=True, help="Show all findings of each code, and all of each finding.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
              help="Colours; auto: on a terminal, unless NO_COLOR is set.")  # fmt: skip
def check(
    files: tuple[Path, ...],
    source: PlanSource,
    program: Path | None,
    backend: str | None,
    log: Path | None,
    log_plan: Path | None,
    queue: Queue | None,
    form: Form,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    strict: bool,
    everything: bool,
    color: str,
) -> None:
    """Prove that a plan's communication is correct, or report where it is wrong."""
    kind, settings = source.kind, source.settings
    if bool(files) + (program is not None) + (log is not None) != 1 or (kind is not None and not files):
        raise click.UsageError("give one of PLAN, --from KIND FILE..., --program FILE and --log DIR")
    if log is None and log_plan is not None:
        raise click.UsageError("--plan goes with --log DIR")
    source.require_kind()
    if settings and not files:
        raise click.UsageError("--set is for plans and for --from KIND")
    file = files[0] if files else log or program or Path()
    if backend is not None and program is None:
        raise click.BadParameter("a plan gives its backend in `run`", param_hint="--transport")
    if queue is not None and files:
        raise click.BadParameter("a plan gives its queue in `transport.queue`", param_hint="--queue")
    from pipeproof.cli.check_report import run_checks, selection_of, show_all

    others = _import_codes() if kind is not None else _log_codes() if log is not None else []
    selection = selection_of(select, ignore, others)
    tasks: list[CheckTask] = [((plan,), partial(_check_file, plan, settings, selection)) for plan in files]
    if kind is not None:
        tasks = [(files, partial(_check_files, kind, files, source.flags, selection))]
    elif program is not None:
        tasks = [((program,), partial(_check_program, program, backend, queue, selection))]
    elif log is not None:
        tasks = [((log,), partial(_check_log, log, log_plan, queue, selection))]
    with (
        refusing_bad_plans(form, file, color), _without_garbage_collection(),
        showing_progress("checking") as on_progress,
    ):  # fmt: skip
        results = run_checks(tasks, on_progress)
    sys.exit(show_all(results, form, partial(console_for, color=color), strict=strict, everything=everything))


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
    plan: Path, settings: Mapping[KeyPath, object], selection: Selection, on_progress: OnProgress
) -> Report:  # fmt: skip
    from pipeproof.specs.load_plan import load_plan
    from pipeproof.verify.check_plan import check as check_plan

    return check_plan(load_plan(plan, settings), selection, on_progress)


def _check_files(
    kind: str, files: tuple[Path, ...], flags: Flags, selection: Selection, on_progress: OnProgress
) -> Report:  # fmt: skip
    from pipeproof.interop.importers.check_imported import check_imported

    return check_imported(import_from(kind, files, flags), selection, on_progress)


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
