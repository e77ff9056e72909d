"""``pipeproof tune``: the layouts with which a model trains fastest on a number of devices.

It imports what it needs when it runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from pipeproof.cli.console import console_for, echo, format_option, refusing_bad_plans, writable
from pipeproof.cli.import_command import DeviceParam
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.analysis.tune.tune_model import TuneModel
    from pipeproof.analysis.tune.tune_result import TuneResult


def _fixed(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the allowed values by name; the callback of ``--fix``."""
    fixed: dict[str, list[Any]] = {}
    for text in values:
        name, equals, rest = text.partition("=")
        items = [item.strip() for item in rest.split(",")]
        if not equals or not all(items):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE[,VALUE...], such as tp=8")
        if name in fixed:
            raise click.BadParameter(f"{name} is fixed twice; give its values with commas")
        fixed[name] = [int(item) if item.isdecimal() else item for item in items]
    return fixed


@click.command()
@click.argument("model", metavar="MODEL_OR_PLAN")
@click.option("--gpus", type=click.IntRange(1, 2**20), required=True, help="Number of devices.")
@click.option("--device", type=DeviceParam(), help="The device; by default that of the plan's `cost.analytic`.")
@click.option("--memory-gib", type=click.FloatRange(0, 2**20, min_open=True),
              help="Memory of a device in GiB; by default that of its data sheet.")  # fmt: skip
@click.option("--global-batch", type=click.IntRange(1, 10**9),
              help="Sequences in a step, over all replicas; by default those of the plan.")  # fmt: skip
@click.option("--framework", type=click.Choice(["megatron", "torch", "paddle"]),
              help="Framework whose schedules and settings are tried; by default that of the file, or "
                   "megatron.")  # fmt: skip
@click.option("--top", type=click.IntRange(1, 1000), default=10, show_default=True, help="Number of rows.")
@click.option("--fix", multiple=True, metavar="NAME=VALUE", callback=_fixed,
              help="Try only these values, such as tp=8 or pp=4,8; repeatable. Names are tp, cp, ep, dp, pp, vpp, mbs, "
                   "schedule, cut, recompute, shard_optimizer and overlap.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), callback=writable,
              help="Write the plan of each row, its launch arguments, and results.jsonl, from which the same command "
                   "resumes, to this directory.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 4096), help="Processes; by default one per processor.")
@plan_options()
@format_option()
def tune(
    model: str,
    gpus: int,
    device: str | None,
    memory_gib: float | None,
    global_batch: int | None,
    framework: str | None,
    top: int,
    fix: dict[str, list[Any]],
    output: Path | None,
    workers: int | None,
    source: PlanSource,
    form: Literal["text", "json"],
) -> None:
    """List the layouts with which a model trains fastest on a number of devices, with reasons.

    MODEL_OR_PLAN is a plan file, a training file of another tool, a model's config.json, or the name of a public model
    such as llama3_70b. Every listed layout has passed the whole check.
    """
    with refusing_bad_plans(form, Path(model)):
        from pipeproof.interop.tune_models import tune_model
        from pipeproof.specs.cost import DeviceName

        tuned = tune_model(model, kind=source.kind, flags=source.flags)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        result = _search(
            tuned,
            _required(
                device or tuned.device,
                "--device",
                f"the plan names no device; known are {', '.join(get_args(DeviceName))}",
            ),
            _required(global_batch or tuned.global_batch, "--global-batch", "only a plan has a batch"),
            framework or tuned.framework or "megatron",
            output,
            {"gpus": gpus, "memory_gib": memory_gib, "top": top, "fix": fix, "workers": workers},
        )
        if output is not None:
            _write(result, output)
    if form == "json":
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        from pipeproof.analysis.tune.tune_text import render_tune

        render_tune(result, console_for())
    sys.exit(ExitStatus.OK if result.rows else ExitStatus.FAILED)


def _required(value: Any, option: str, why: str) -> Any:
    if value is None:
        raise click.UsageError(f"{option} is missing: {why}")
    return value


def _search(
    source: TuneModel, device: str, global_batch: int, framework: str, output: Path | None,
    options: Mapping[str, Any],
) -> TuneResult:  # fmt: skip
    from concurrent.futures import BrokenExecutor
    from dataclasses import replace

    from pipeproof.analysis.sweep.results_file import ResultsFileError
    from pipeproof.analysis.tune.search_layouts import TuneError
    from pipeproof.analysis.tune.search_layouts import tune as find_layouts

    results = None if output is None else output / "results.jsonl"
    try:
        with showing_progress("bounding layouts") as on_progress:
            result = find_layouts(
                source.plan, device=device, global_batch=global_batch, framework=framework, results=results,
                on_progress=on_progress, **options,
            )  # fmt: skip
    except TuneError as error:
        raise click.UsageError(str(error)) from error
    except ResultsFileError as error:
        raise click.BadParameter(str(error), param_hint="--output") from error
    except BrokenExecutor:
        echo("error: the workers broke off; the same command with --output resumes", err=True)
        sys.exit(ExitStatus.WORKER_FAILED)
    return replace(result, assumptions=(*source.assumptions, *result.assumptions))


def _write(result: TuneResult, directory: Path) -> None:
    """Write the plan and the launch arguments of each row."""
    from pipeproof.atomic_write import write_output
    from pipeproof.interop.launch_arguments.write_arguments import NoArgumentsError, launch_of_row, plan_file

    for row in result.rows:
        files = dict(plan_file(row))
        try:
            files |= launch_of_row(row, result.framework).files
        except NoArgumentsError as error:
            echo(f"note: row {row.rank} has a plan and no launch arguments: {error}", err=True)
        for name, text in files.items():
            write_output(directory / name, text)
