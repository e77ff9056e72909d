"""``pipeproof check``: plans, files of other tools, programs and logs, and what is known of them already."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.commands.baseline import baseline_options
from pipeproof.commands.complete import PlanFile, complete_importer
from pipeproof.commands.import_plan import KindName, import_from, import_options
from pipeproof.commands.line import console_for, refusing_bad_plans
from pipeproof.commands.log import log_options

if TYPE_CHECKING:
    from pipeproof.comm.capabilities import Queue
    from pipeproof.commands.check import Form
    from pipeproof.commands.judged import Item
    from pipeproof.interop.imported import Flags
    from pipeproof.specs.baseline_file import LoadedBaseline
    from pipeproof.specs.problems import KeyPath
    from pipeproof.verify.check import Report
    from pipeproof.verify.selection import Selection


@click.command()
@click.argument("files", metavar="[PLAN]...", type=PlanFile(), nargs=-1)
@click.option(
    "--from",
    "kind",
    type=KindName(),
    shell_complete=complete_importer,
    help="Judge files of another tool; `docs/importing.md` has the kinds.",
)
@import_options
@click.option("--program", type=click.Path(path_type=Path),
              help="Judge this program text alone, without a plan.")  # fmt: skip
@click.option("--backend", metavar="NAME", help="Whose promises hold for --program, such as paddle-gloo.")
@log_options
@click.option("--format", "form", type=click.Choice(["text", "json", "sarif"]), default="text", show_default=True)
@click.option("--select", multiple=True, metavar="CODES",
              help="Run only these rules: codes or their beginnings, as in PP401,3xx.")  # fmt: skip
@click.option("--ignore", multiple=True, metavar="CODES", help="Leave these rules out; nothing is certified then.")
@click.option("--strict", is_flag=True, help="Let warnings fail the check, too.")
@baseline_options
@click.option("--all", "everything", is_flag=True, help="Show all findings, however many of one code, and all of each.")
@click.option("--color", type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
              help="Colours; auto: on a terminal, unless NO_COLOR is set.")  # fmt: skip
def check(
    files: tuple[Path, ...],
    kind: str | None,
    settings: dict[KeyPath, object],
    model_config: Path | None,
    world_size: int | None,
    program: Path | None,
    backend: str | None,
    log: Path | None,
    log_plan: Path | None,
    channels: Queue | None,
    form: Form,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    strict: bool,
    baseline: Path | None,
    new_baseline: Path | None,
    reason: str | None,
    everything: bool,
    color: str,
) -> None:
    """Prove that a plan's communication is right, or say where it is wrong."""
    if bool(files) + (program is not None) + (log is not None) != 1 or (kind is not None and not files):
        raise click.UsageError("give one of PLAN, --from KIND FILE..., --program FILE and --log DIR")
    if log is None and (log_plan is not None or channels is not None):
        raise click.UsageError("--plan and --channels go with --log DIR")
    if kind is None and (settings or model_config is not None or world_size is not None):
        raise click.UsageError("--set, --model-config and --world-size go with --from KIND")
    file = files[0] if files else log or program or Path()
    if backend is not None and program is None:
        raise click.BadParameter("a plan says its backend itself, in `run`", param_hint="--backend")
    from pipeproof.commands.check import selection_of, show_all
    from pipeproof.commands.judged import held_against, judge_all, write_baseline
    from pipeproof.commands.log import check_log, codes_of_logs
    from pipeproof.interop.codes import IMPORT_CODES
    from pipeproof.interop.imported import Flags

    others = [doc.code for doc in IMPORT_CODES] if kind is not None else codes_of_logs() if log is not None else []
    selection = selection_of(select, ignore, others)
    items: list[Item] = [((plan,), partial(_check_file, plan, selection)) for plan in files]
    if kind is not None:
        flags = Flags(settings, model_config, world_size)
        items = [(files, partial(_check_files, kind, files, flags, selection))]
    elif program is not None:
        items = [((program,), partial(_check_program, program, backend, selection))]
    elif log is not None:
        items = [((log,), partial(check_log, log, log_plan, channels, selection))]
    known = None if baseline is None else _load_baseline(baseline, form, color)
    with refusing_bad_plans(form, file, color), _not_collecting():
        judged = judge_all(items)
    if new_baseline is not None:
        with refusing_bad_plans(form, new_baseline, color):
            known = write_baseline(new_baseline, judged, selection, reason)
    if known is not None:
        judged = held_against(known, judged, selection)
    sys.exit(show_all(judged, form, partial(console_for, color=color), strict=strict, everything=everything))


@contextmanager
def _not_collecting() -> Iterator[None]:
    """Without garbage collection: building the plan's models sets it off again and again, for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()  # what was loaded stays: do not look through all of it either
            gc.enable()


def _load_baseline(file: Path, form: Form, color: str) -> LoadedBaseline:
    from pipeproof.specs.baseline_file import load_baseline

    with refusing_bad_plans(form, file, color):
        return load_baseline(file)


def _check_file(plan: Path, selection: Selection) -> Report:
    from pipeproof.specs.load import load_plan
    from pipeproof.verify.check import check as check_plan

    return check_plan(load_plan(plan), selection)


def _check_files(kind: str, files: tuple[Path, ...], flags: Flags, selection: Selection) -> Report:
    from pipeproof.interop.judge import check_imported

    return check_imported(import_from(kind, files, flags), selection)


def _check_program(file: Path, backend: str | None, selection: Selection) -> Report:
    from pipeproof.comm.backends import table_named
    from pipeproof.verify.check import check_subject
    from pipeproof.verify.program import load_program

    try:
        table = None if backend is None else table_named(backend)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--backend") from error
    return check_subject(load_program(file, backend=table), selection)
