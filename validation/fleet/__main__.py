"""``python -m validation.fleet MODEL``: the same layers trained by Fleet's own pipeline and by ours."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import yaml

from pipeproof.atomic_write import write_json, write_output
from pipeproof.cli.console import console_for
from pipeproof.diagnostics.text_output import render_text
from pipeproof.exit_status import ExitStatus
from validation.fleet.fleet_run import FleetReport, Settings, run_fleet

PLAN_FILE = "plan.yaml"
"""File of the plan next to recorded calls."""


@click.command()
@click.argument("model", type=click.Choice(["mixer", "conv_net"]))
@click.option("--pp", default=2, show_default=True, help="Pipeline ranks.")
@click.option("--replicas", default=1, show_default=True, help="Data-parallel replicas.")
@click.option("--chunks", default=1, show_default=True, help="Stages of each rank; more than one is interleaved.")
@click.option("--micro-batches", default=4, show_default=True)
@click.option("--balanced", is_flag=True, help="Set `best_unbalanced_scheduler`.")
@click.option("--steps", default=5, show_default=True)
@click.option("--report", "report_file", type=click.Path(path_type=Path, dir_okay=False), help="Write a JSON report.")
@click.option("--log", type=click.Path(path_type=Path, file_okay=False),
              help="Record the communication of each of Fleet's ranks here, for `check`.")  # fmt: skip
def fleet(
    model: str, pp: int, replicas: int, chunks: int, micro_batches: int, balanced: bool, steps: int,
    report_file: Path | None, log: Path | None,
) -> None:  # fmt: skip
    """Train the layers of MODEL with Fleet's own pipeline and with ours; compare losses, gradients and operations."""
    if log is not None and log.is_dir() and any(log.glob("rank_*.jsonl")):
        raise click.BadParameter(f"{str(log)!r} has logs already", param_hint="--log")
    settings = Settings(model, pp, micro_batches, replicas, chunks, balanced, steps,
                        None if log is None else str(log.resolve()))  # fmt: skip
    report = run_fleet(settings)
    _render(report)
    if report_file is not None:
        write_json(report_file, report.to_json())
    if log is not None:
        write_output(log / PLAN_FILE, yaml.safe_dump(report.subject.loaded.spec.model_dump(mode="json")))
        print(f"recorded; to check: pipeproof check {log} --plan {log / PLAN_FILE}")
    sys.exit(ExitStatus.FAILED if report.findings else ExitStatus.OK)


def _render(report: FleetReport) -> None:
    console = console_for()
    render_text(report.findings, report.subject.source, console=console)
    for step, (theirs, ours) in enumerate(report.losses):
        console.print(f"step {step}  pipeproof {ours:.9f}  Fleet {theirs:.9f}")
    num_equal = sum(each["is_equal"] for each in report.gradients)
    console.print(f"{num_equal} of {len(report.gradients)} gradients have the same bits")
    verdict = "[red]differ from the plan[/]" if report.order_findings else "match the plan, in its order"
    console.print(
        f"{report.ranks[0]['scheduler']}: {report.num_computed} forwards and backwards and {report.num_messages} "
        f"messages per step {verdict}",
        soft_wrap=True,
    )
    if not report.findings:
        console.print("[bold green]matches[/]: pipeproof and Fleet train the same, bit for bit")


if __name__ == "__main__":
    fleet()
