"""Demo for ``make demo``: prove, draw and execute plans, and run one plan although it is wrong.

Every command is a real command line, as a user would type it. Two of them are
expected to fail, because their plan has the bug that pipeproof was written for.
The demo exits 0 only if every command has the exit status listed with it below,
and if the reports of the runs confirm the last heading. It takes about a minute on two cores.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 5.0
"""Seconds that an interrupted command may take to stop its workers before it is interrupted again."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One command: a heading, its arguments, and the exit status that it must have."""

    heading: str
    arguments: tuple[str, ...]
    status: int


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of a run, from its report: losses, and by stage (number of gradients that differ, total)."""

    loss: float
    reference_loss: float
    differing: dict[int, tuple[int, int]]


def scenes(directory: Path) -> tuple[Scene, ...]:
    """The demo's commands, in order; traces and reports go to ``directory``."""
    return (
        Scene(
            "check refuses the historic Fleet bug and names the elements that would be lost",
            ("check", "examples/gpt_pp2_tp2_sp_partial.yaml"),
            1,
        ),
        Scene(
            "the same plan with full transport is proved",
            ("check", "examples/gpt_pp2_tp2_sp_full.yaml"),
            0,
        ),
        Scene(
            "simulate predicts its timeline, and writes it for chrome://tracing",
            ("simulate", "examples/gpt_pp2_tp2_sp_full.yaml", "-o", str(directory / "pp2.trace.json")),
            0,
        ),
        Scene(
            "four stages: the shape of 1F1B",
            ("simulate", "examples/gpt_pp4.yaml", "-o", str(directory / "pp4.trace.json")),
            0,
        ),
        Scene(
            "run executes that plan on four real Paddle processes, bitwise equal to one process",
            ("run", "examples/gpt_pp4.yaml"),
            0,
        ),
        Scene(
            "tensor and sequence parallel, full transport",
            ("run", "examples/gpt_pp2_tp2_sp_full.yaml", "--report", str(directory / "full.json")),
            0,
        ),
        Scene(
            "without sequence parallelism, partial transport is correct",
            ("run", "examples/gpt_pp2_tp2_partial.yaml"),
            0,
        ),
        Scene(
            "a zero-bubble schedule that PyTorch wrote, with its communication, checked unchanged",
            ("check", "examples/gpt_pp2_zbv_torch.yaml"),
            0,
        ),
        Scene(
            "a mixture of experts whose all-to-alls run next to the computations of another micro-batch",
            ("check", "examples/moe_overlap.yaml"),
            0,
        ),
        Scene(
            "layers that a plan declares in place of the built-in ones",
            ("check", "examples/declared_layers.yaml"),
            0,
        ),
        Scene(
            "a schedule written by hand: every send, receive and wait as text",
            ("check", "examples/gpt_pp2_text.yaml"),
            0,
        ),
        Scene(
            "the bug in the backward direction only, run nevertheless",
            (
                "run",
                "examples/gpt_pp2_tp2_sp_backward_partial.yaml",
                "--unsafe",
                "--report",
                str(directory / "damaged.json"),
            ),
            1,
        ),
    )


def main() -> int:
    """Run all scenes, then compare two reports; return 0 if every result is as expected."""
    with tempfile.TemporaryDirectory(prefix="pipeproof-demo-") as name:
        directory = Path(name)
        try:
            shown = scenes(directory)
            print_now(f"demo: {len(shown)} commands, about a minute on two cores")
            failures = [problem for number, scene in enumerate(shown, 1) for problem in play(scene, number, len(shown))]
            failures += lesson(directory / "full.json", directory / "damaged.json")
        except KeyboardInterrupt:
            print_now("\ninterrupted")
            return 130
    for failure in failures:
        print_now(f"demo: {failure}")
    if not failures:
        print_now("demo: every command had its expected exit status, and the numbers above hold")
    return 1 if failures else 0


def play(scene: Scene, number: int, total: int) -> list[str]:
    """Run one command visibly; return the problem with its exit status, if any."""
    print_now(f"\n== {number} of {total}: {scene.heading}\n$ pipeproof {' '.join(scene.arguments)}\n")
    status = run_command(scene.arguments)
    print_now(f"(exit status {status}{', as expected' if status == scene.status else ''})")
    if status == scene.status:
        return []
    return [f"`pipeproof {' '.join(scene.arguments)}` ended with {status}, expected {scene.status}"]


def run_command(arguments: Sequence[str]) -> int:
    """Run one ``pipeproof`` command from the repository's root; return its exit status.

    Ctrl-C in a terminal also reaches the command, which then stops its
    workers; a signal that reached this process alone is passed on.
    """
    child = subprocess.Popen([sys.executable, "-m", "pipeproof", *arguments], cwd=ROOT)
    try:
        return child.wait()
    except KeyboardInterrupt:
        try:
            child.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            child.wait()
        raise


def lesson(full_file: Path, damaged_file: Path) -> list[str]:
    """Show from the two reports why the loss proves nothing; return the problems, if any."""
    if not (full_file.exists() and damaged_file.exists()):
        return ["a run wrote no report, so there is nothing to compare"]
    full, damaged = first_step(full_file), first_step(damaged_file)
    print_now("\n== the loss proves nothing: the first step of both runs\n")
    print_comparison(full, damaged)
    problems = []
    if not full.loss == damaged.loss == full.reference_loss:
        problems.append("the three losses of the first step are not equal in every bit")
    if any(count for count, _ in full.differing.values()):
        problems.append("with full transport, gradients differ from the reference")
    upstream, downstream = damaged.differing[0], damaged.differing[1]
    if upstream[0] != upstream[1]:
        problems.append(f"only {upstream[0]} of {upstream[1]} gradients upstream of the boundary differ")
    if downstream[0]:
        problems.append(f"{downstream[0]} gradients downstream of the boundary differ")
    return problems


def first_step(report_file: Path) -> FirstStep:
    """Read a report of ``pipeproof run --report``."""
    report: dict[str, Any] = json.loads(report_file.read_text())
    step = report["steps"][0]
    differing: dict[int, tuple[int, int]] = {}
    for gradient in report["gradients"]:
        if gradient["step"] == step["step"]:
            count, total = differing.get(gradient["stage"], (0, 0))
            differs = gradient["md5"] != gradient["reference_md5"] or not gradient["replicas_agree"]
            differing[gradient["stage"]] = (count + differs, total + 1)
    return FirstStep(step["loss"], step["reference_loss"], differing)


def print_comparison(full: FirstStep, damaged: FirstStep) -> None:
    """Print the comparison as a table, and the conclusion."""
    rows = [
        ("", "backward: full", "backward: partial"),
        ("loss", f"{full.loss:.9f}", f"{damaged.loss:.9f}"),
        ("its bits", full.loss.hex(), damaged.loss.hex()),
        ("loss of the reference", f"{full.reference_loss:.9f}", f"{damaged.reference_loss:.9f}"),
    ]
    for stage, side in enumerate(("upstream", "downstream")):
        full_count, damaged_count = (
            f"{n} of {total}" for n, total in (full.differing[stage], damaged.differing[stage])
        )
        rows.append((f"wrong gradients on stage {stage} ({side})", full_count, damaged_count))
    for label, *values in rows:
        print_now(f"{label:<40}" + "".join(f"{value:>24}" for value in values))
    print_now(
        "\nThe losses agree to the last bit, because the first forward pass was correct in both runs. Yet with\n"
        "partial transport in the backward direction every gradient upstream of the boundary is wrong. A\n"
        "plausible loss proves nothing about gradients: prove the plan, or compare every gradient.\n"
    )


def print_now(text: str) -> None:
    """Print immediately, to keep the order with the commands' own output."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
