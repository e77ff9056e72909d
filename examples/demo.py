"""What ``make demo`` runs: plans are proved, drawn and executed, and one is run although it is wrong.

Every command here is the real command line, as a person would type it. Two of
them are expected to fail, because their plan has the bug that pipeproof was
written for. The demo exits 0 only if every command had the exit status that
stands beside it below, and if the reports of the runs show what the last
heading says. It takes about a minute on two cores.
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
"""How long an interrupted command may take to stop its workers before it is told (again) to stop."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One command: what it shows, its arguments, and the exit status that it must have."""

    heading: str
    arguments: tuple[str, ...]
    status: int


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of a run, out of its report: losses, and by stage (gradients that differ, all)."""

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
            "run executes that plan on four real Paddle processes, bitwise equal to one uncut process",
            ("run", "examples/gpt_pp4.yaml"),
            0,
        ),
        Scene(
            "tensor and sequence parallel, full transport",
            ("run", "examples/gpt_pp2_tp2_sp_full.yaml", "--report", str(directory / "full.json")),
            0,
        ),
        Scene(
            "without sequence parallelism, partial transport is right",
            ("run", "examples/gpt_pp2_tp2_partial.yaml"),
            0,
        ),
        Scene(
            "a zero-bubble schedule that PyTorch wrote, with its communication, checked as it stands",
            ("check", "examples/gpt_pp2_zbv_torch.yaml"),
            0,
        ),
        Scene(
            "a schedule written by hand: every send, receive and wait in a text",
            ("check", "examples/gpt_pp2_text.yaml"),
            0,
        ),
        Scene(
            "the bug in the backward direction only, run all the same",
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
    """Run all scenes, then compare two reports; 0 if everything came out as it must."""
    with tempfile.TemporaryDirectory(prefix="pipeproof-demo-") as name:
        directory = Path(name)
        try:
            failures = [problem for scene in scenes(directory) for problem in play(scene)]
            failures += lesson(directory / "full.json", directory / "damaged.json")
        except KeyboardInterrupt:
            say("\ninterrupted")
            return 130
    for failure in failures:
        say(f"demo: {failure}")
    if not failures:
        say("demo: every command had its expected exit status, and the numbers above hold")
    return 1 if failures else 0


def play(scene: Scene) -> list[str]:
    """Run one command where the person can see it; what is wrong with its exit status, if anything."""
    say(f"\n== {scene.heading}\n$ pipeproof {' '.join(scene.arguments)}\n")
    status = run_command(scene.arguments)
    say(f"(exit status {status}{', as expected' if status == scene.status else ''})")
    if status == scene.status:
        return []
    return [f"`pipeproof {' '.join(scene.arguments)}` ended with {status}, expected {scene.status}"]


def run_command(arguments: Sequence[str]) -> int:
    """The exit status of one ``pipeproof`` command, run from the repository's root.

    Ctrl-C in a terminal reaches the command, too, which then stops its
    workers; where a signal reached this process alone it is passed on.
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
    """Show why the loss is no evidence, from the two reports; what does not hold, if anything."""
    if not (full_file.exists() and damaged_file.exists()):
        return ["a run left no report, so there is nothing to compare"]
    full, damaged = first_step(full_file), first_step(damaged_file)
    say("\n== the loss is no evidence: the first step of both runs\n")
    say_comparison(full, damaged)
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


def say_comparison(full: FirstStep, damaged: FirstStep) -> None:
    """Print the table of the lesson, and the lesson."""
    rows = [
        ("", "backward: full", "backward: partial"),
        ("loss", f"{full.loss:.9f}", f"{damaged.loss:.9f}"),
        ("its bits", full.loss.hex(), damaged.loss.hex()),
        ("loss of the reference", f"{full.reference_loss:.9f}", f"{damaged.reference_loss:.9f}"),
    ]
    for stage, place in enumerate(("upstream", "downstream")):
        full_count, damaged_count = (
            f"{n} of {total}" for n, total in (full.differing[stage], damaged.differing[stage])
        )
        rows.append((f"wrong gradients on stage {stage} ({place})", full_count, damaged_count))
    for label, *values in rows:
        say(f"{label:<40}" + "".join(f"{value:>24}" for value in values))
    say(
        "\nThe losses agree to the last bit, because the first forward pass was right in both runs. Yet with\n"
        "partial transport in the backward direction every gradient upstream of the boundary is wrong. A loss\n"
        "that looks right says nothing of the gradients: the plan has to be proved, or every gradient compared.\n"
    )


def say(text: str) -> None:
    """Print at once, so that the order with the commands' own output is kept."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
