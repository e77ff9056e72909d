"""Times a large plan from its text to a trace file, next to PyTorch's lowering and dry run of the same schedule.

``python benchmarks/whole.py [--torch-python FILE]`` prints, for interleaved
1F1B on 64 ranks with 4 stages each and 256 micro-batches (131,072 compute
operations), processor and wall seconds of

- pipeproof: reading the plan; generating and lowering its schedule with all
  rules of ``check``; ``simulate`` by the fast engine; making the timeline; and
  writing it as ``simulate -o trace.json`` does (Chrome trace JSON, with an
  arrow for each message);
- PyTorch: the operations of ``ScheduleInterleaved1F1B``, ``_add_send_recv``
  and ``_simulate_comms_compute``;

and the ratio. Each side runs in a process of its own, once, without garbage
collection; imports are not counted on either side. ``--torch-python`` names an interpreter with PyTorch, by default the
one that runs this. Nothing is asserted: times are the machine's.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_schedule import has_torch, interleaved, torch_python

RANKS, CHUNKS, MICRO_BATCHES = 64, 4, 256

Seconds = tuple[float, float]
"""Processor time and wall time."""


def main() -> None:
    """Measure both sides and print the time of each part."""
    show(torch_python(sys.argv[1:]))


def show(python: str) -> dict[str, dict[str, Any]]:
    """Measure both sides, print them, and return the measurements by side."""
    print(f"interleaved 1F1B, {RANKS} ranks x {CHUNKS} stages, {MICRO_BATCHES} micro-batches, seconds")
    print(f"{'':<56} {'processor':>10} {'wall':>8}")
    ours = measured(sys.executable, "ours")
    print_parts("pipeproof", ours)
    if not has_torch(python):
        print("PyTorch is not installed: pip install torch==2.13.0 to compare with it")
        return {"ours": ours}
    theirs = measured(python, "torch")
    print_parts(f"PyTorch {theirs['version']}", theirs)
    processor, wall = (mine / other for mine, other in zip(total(ours), total(theirs), strict=True))
    print(f"pipeproof's time / PyTorch's: {processor:.2f} of the processor, {wall:.2f} on the wall")
    return {"ours": ours, "torch": theirs}


def measured(python: str, side: str) -> dict[str, Any]:
    """``{"parts": {name: Seconds}, "num_ops": ..., "version": ...}`` from a process of its own."""
    done = subprocess.run([python, __file__, "--part", side], stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def total(result: dict[str, Any]) -> Seconds:
    """All parts together."""
    return sum(cpu for cpu, _ in result["parts"].values()), sum(wall for _, wall in result["parts"].values())


def print_parts(name: str, result: dict[str, Any]) -> None:
    """One line a part, then the sum."""
    for part, (cpu, wall) in result["parts"].items():
        print(f"  {name:<20} {part:<33} {cpu:>10.2f} {wall:>8.2f}")
    cpu, wall = total(result)
    print(f"  {name:<20} {'all, {:,} operations'.format(result['num_ops']):<33} {cpu:>10.2f} {wall:>8.2f}")


@contextmanager
def timed(parts: dict[str, Seconds], name: str) -> Iterator[None]:
    """Note the time of the block."""
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    parts[name] = time.process_time() - cpu, time.perf_counter() - wall


def our_parts() -> dict[str, Any]:
    """From the plan to its trace file."""
    from simulate import plan

    from pipeproof import plan_from_dict, simulate
    from pipeproof.verify.check_plan import check
    from pipeproof.views.chrome_trace import write_trace

    parts: dict[str, Seconds] = {}
    with timed(parts, "generate, lower and check"):
        report = check(plan_from_dict(plan(RANKS, CHUNKS, MICRO_BATCHES)))
    assert not report.errors
    with timed(parts, "simulate"):
        simulation = simulate(report.subject.plan, engine="fast")
    with timed(parts, "timeline"):
        timeline = simulation.timeline
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with timed(parts, "write trace.json"):
            write_trace(timeline, file)
        size = file.stat().st_size
    parts[f"write trace.json ({size / 1e6:.0f} MB)"] = parts.pop("write trace.json")
    return {"parts": parts, "num_ops": len(timeline.spans)}


def torch_parts() -> dict[str, Any]:
    """Generating, lowering and the dry run."""
    from torch import __version__
    from torch.distributed.pipelining import schedules

    parts: dict[str, Seconds] = {}
    num_stages = RANKS * CHUNKS

    def stage_to_rank(stage: int) -> int:
        return stage % RANKS

    with timed(parts, "generate"):
        order = interleaved(RANKS, CHUNKS, MICRO_BATCHES)
    with timed(parts, "_add_send_recv"):
        lowered = schedules._add_send_recv(order, stage_to_rank=stage_to_rank, num_stages=num_stages)
    num_ops = sum(map(len, lowered.values()))
    with timed(parts, "_simulate_comms_compute"):
        schedules._simulate_comms_compute(lowered, stage_to_rank, num_stages)
    return {"parts": parts, "num_ops": num_ops, "version": __version__}


if __name__ == "__main__":
    if "--part" in sys.argv:
        gc.disable()
        print(json.dumps({"ours": our_parts, "torch": torch_parts}[sys.argv[-1]]()))
    else:
        main()
