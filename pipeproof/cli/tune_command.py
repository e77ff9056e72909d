"""``pipeproof tune``: the layouts with which a model trains fastest on a number of devices, or on a plan's own ranks.

The libraries are imported when it runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from pipeproof.cli.console import console_for, echo, format_option, refusing_bad_plans, writable
from pipeproof.cli.option_types import DEVICE
from pipeproof.cli.plan_options import PlanSource, plan_options
from pipeproof.cli.progress import showing_progress
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from pipeproof.analysis.tune.frameworks import TuneModel
    from pipeproof.analysis.tune.tune_result import TuneResult
    from pipeproof.specs.cost import DeviceName


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
@click.option("--gpus", type=click.IntRange(1, 2**20),
              help="Number of devices; the mesh, the cut and the memory settings are searched, too. Without it: only "
                   "schedules, chunks and micro-batches on the ranks of the plan.")  # fmt: skip
@click.option("--device", type=DEVICE, help="The device; default: `cost.analytic` of the plan.")
@click.option("--memory-gib", type=click.FloatRange(0, 2**20, min_open=True),
              help="Memory of a device in GiB; default with --gpus: its data sheet.")  # fmt: skip
@click.option("--global-batch", type=click.IntRange(1, 10**9),
              help="With --gpus: sequences in a step, over all replicas; default: as in the plan.")  # fmt: skip
@click.option("--framework", type=click.Choice(["megatron", "torch", "paddle", "any"]),
              help="Framework whose schedules and settings are tried; default: of the file, or megatron with --gpus. "
                   "`any`, without --gpus: every schedule.")  # fmt: skip
@click.option("--top", type=click.IntRange(1, 1000), default=10, show_default=True, help="Number of rows.")
@click.option("--fix", multiple=True, metavar="NAME=VALUE", callback=_fixed,
              help="Try only these values, such as tp=8 or pp=4,8; repeatable. Names are tp, cp, ep, dp, pp, vpp, mbs, "
                   "schedule, cut, recompute, shard_optimizer and overlap; without --gpus vpp, mbs, splits, schedule "
                   "and overlap.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path, file_okay=False), callback=writable,
              help="Write the plan of each row and its launch arguments to this directory.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 4096),
              help="Processes; by default one per processor with --gpus, else one.")  # fmt: skip
@plan_options()
@format_option()
def tune(
    model: str, device: DeviceName | None, global_batch: int | None, framework: str | None, output: Path | None,
    source: PlanSource, form: Literal["text", "json"], **options: Any,
) -> None:  # fmt: skip
    """List the layouts with which a model trains fastest, with reasons: on a number of devices, or on a plan's ranks.

    MODEL_OR_PLAN is a plan file, a training file of another tool, a model's config.json, or the name of a public model
    such as llama3_70b. Every listed layout has passed the whole check. Without --gpus, the output begins with the
    critical rank or edge of the plan, and lists what is faster.
    """
    with refusing_bad_plans(form, Path(model)):
        tuned = _read(model, source.for_file(Path(model)), options["gpus"], device)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        if options["gpus"] is None:
            if tuned.global_batch is None:
                raise click.UsageError("--gpus is missing: only a plan has ranks and a batch")
            if global_batch is not None:
                raise click.UsageError("--global-batch goes with --gpus: without it, the plan has the batch")
        elif tuned.plan.spec.has_layer_times:
            options |= {"device": device, "global_batch": global_batch}
        else:
            from pipeproof.specs.cost import DeviceName

            framework = framework or tuned.framework or "megatron"
            unknown = f"the plan names no device; known are {', '.join(get_args(DeviceName))}"
            options["device"] = _required(device or tuned.device, "--device", unknown)
            batch = global_batch or tuned.global_batch
            options["global_batch"] = _required(batch, "--global-batch", "only a plan has a batch")
        result = _search(tuned, {"framework": framework, **options})
        if output is not None:
            _write(result, output)
    if form == "json":
        click.echo(json.dumps(result.to_json(), indent=2))
    else:
        from pipeproof.analysis.tune.tune_text import render_tune

        render_tune(result, console_for())
    sys.exit(ExitStatus.OK if result.rows or result.present is not None else ExitStatus.FAILED)


def _read(model: str, source: PlanSource, gpus: int | None, device: DeviceName | None) -> TuneModel:
    """The model to tune; on a plan's own ranks, the device is one of the values that a file lacks."""
    from dataclasses import replace

    from pipeproof.analysis.tune.frameworks import model_of_plan
    from pipeproof.interop.tune_models import tune_model

    if gpus is not None or (device is None and source.kind is None):
        return tune_model(model, kind=source.kind, flags=source.flags)
    if source.kind is not None:
        return model_of_plan(replace(source, device=device).load(Path(model)))
    settings = {**source.settings, ("cost", "analytic", "device"): device}
    return tune_model(model, flags=replace(source.flags, settings=settings))


def _required(value: Any, option: str, why: str) -> Any:
    if value is None:
        raise click.UsageError(f"{option} is missing: {why}")
    return value


def _search(source: TuneModel, options: Mapping[str, Any]) -> TuneResult:
    from concurrent.futures import BrokenExecutor
    from dataclasses import replace

    from pipeproof.analysis.tune.present_step import TuneError
    from pipeproof.analysis.tune.search_layouts import tune as find_layouts

    try:
        with showing_progress("bounding layouts") as on_progress:
            result = find_layouts(source.plan, on_progress=on_progress, **options)
    except TuneError as error:
        raise click.UsageError(str(error)) from error
    except BrokenExecutor:
        echo("error: the workers broke off", err=True)
        sys.exit(ExitStatus.WORKER_FAILED)
    return replace(result, assumptions=(*source.assumptions, *result.assumptions))


def _write(result: TuneResult, directory: Path) -> None:
    """Write the plan and the launch arguments of each row."""
    from pipeproof.atomic_write import write_output
    from pipeproof.interop.write_arguments import NoArgumentsError, launch_of_row, plan_file

    for row in result.rows:
        files = dict(plan_file(row))
        try:
            files |= {} if result.framework == "any" else launch_of_row(row, result.framework).files
        except NoArgumentsError as error:
            echo(f"note: row {row.rank} has a plan and no launch arguments: {error}", err=True)
        for name, text in files.items():
            write_output(directory / name, text)
