"""Times both engines of the simulator on graphs of four sizes, next to PyTorch's own dry run of the same schedule.

``python benchmarks/simulate.py`` prints, for interleaved 1F1B of about 1,000,
10,000, 130,000 and 1,000,000 operations and for each engine,

- the processor time of the first run in a new process (``cold``: with numba,
  this loads it and compiles) and of the fastest of several more (``warm``);
- operations a second, warm;
- the peak of the memory that one more run allocates, for each operation.

A measurement of more than ten seconds is run once, cold.

A run is from the op table and its durations to the start and end of every
operation. ``simpy`` is the reference model;
``fast`` the longest paths, walked in Python; ``fast, numba`` the same walked
by compiled code, where numba is installed. ``whole`` is what
``pipeproof.simulate`` does: durations, engine and figures, without a timeline.
``PyTorch`` is ``_simulate_comms_compute``, where PyTorch is installed
(``pip install torch==2.13.0``; ``--torch-python FILE`` names an interpreter
that has it): it orders the operations in steps and gives them no times. Its
operations are fewer: waits are not among them.

Then follows what ``whole.py`` measures. ``--write`` puts the tables into
``docs/simulating.md``; it needs numba and PyTorch.

Nothing is asserted: times are the machine's.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import whole
from torch_schedule import has_torch, interleaved, torch_python

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "validation" / "pages"))

from pages import fill, table  # noqa: E402 - the writers of generated page parts are in validation/pages

SIZES = {"1k": (4, 2, 16), "10k": (8, 4, 32), "130k": (32, 4, 96), "1M": (64, 4, 384)}
"""(ranks, stages on each, micro-batches) by name."""

ENGINES = ("simpy", "fast", "fast, numba", "whole", "PyTorch")
REPEATS = 5
MOST_SECONDS = 10


Results = dict[tuple[str, str], dict[str, float]]
"""Measured times by size and engine."""


def main() -> None:
    """Measure each engine at each size in a process of its own and print one line for it; then the whole way."""
    python = torch_python(sys.argv[1:])
    if "--write" in sys.argv and not (importlib.util.find_spec("numba") and has_torch(python)):
        sys.exit("--write needs numba, and PyTorch: --torch-python FILE names an interpreter that has it")
    results: Results = {}
    print(f"{'':<6} {'engine':<12} {'operations':>10} {'cold s':>8} {'warm s':>8} {'warm ops/s':>12} {'bytes/op':>9}")
    for size in SIZES:
        for engine in ENGINES:
            measured = in_own_process(size, engine, python)
            if measured is None:
                continue
            results[size, engine] = measured
            num_ops, cold, warm, peak = (measured[key] for key in ("num_ops", "cold", "warm", "peak"))
            each = f"{peak / num_ops:>9,.0f}" if peak else f"{'-':>9}"
            print(f"{size:<6} {engine:<12} {num_ops:>10,} {cold:>8.3f} {warm:>8.4f} {num_ops / warm:>12,.0f} {each}")
    if importlib.util.find_spec("numba") is None:
        print("numba is not installed: pip install numba to compare with it")
    print()
    sides = whole.show(python)
    if "--write" in sys.argv:
        page = ROOT / "docs" / "simulating.md"
        page.write_text(fill(page, {"speed": speed_table(results), "whole": whole_table(sides)}), encoding="utf-8")


def speed_table(results: Results) -> str:
    """Processor time by size and engine, and the operations a second of the largest."""
    largest = [*SIZES][-1]
    rows = [
        (
            f"{results[size, ENGINES[0]]['num_ops']:,}",
            *(seconds_text(results[size, engine]["warm"]) for engine in ENGINES),
        )
        for size in SIZES
    ]
    speeds = (results[largest, engine]["num_ops"] / results[largest, engine]["warm"] for engine in ENGINES)
    rows.append(("operations a second, at the last", *(f"{float(f'{speed:.2g}'):,.0f}" for speed in speeds)))
    theirs = f"{results[largest, 'PyTorch']['num_ops']:,}"
    note = f"PyTorch's operations are fewer, {theirs} in the last row of times: waits are not among them.\n"
    return table(("operations", *ENGINES), rows) + "\n" + note


def seconds_text(seconds: float) -> str:
    """Seconds, or milliseconds below a tenth, with two digits that count."""
    rounded = float(f"{seconds:.2g}")
    return f"{rounded:g} s" if seconds >= 0.1 else f"{1000 * rounded:g} ms"


def whole_table(sides: dict[str, dict[str, Any]]) -> str:
    """Processor time of the parts of both sides, their sums, and the ratio of these.

    Time on the wall is printed only: where others use the machine, it is theirs.
    """
    rows = []
    for side, name in (("ours", "pipeproof"), ("torch", f"PyTorch {sides['torch']['version'].partition('+')[0]}")):
        of_side = [*sides[side]["parts"].items(), ("**all**", whole.total(sides[side]))]
        rows += [(name, part, f"{cpu:.2f}") for part, (cpu, _) in of_side]
    ratio = whole.total(sides["ours"])[0] / whole.total(sides["torch"])[0]
    return table(("", "part", "processor s"), [*rows, ("pipeproof / PyTorch", "", f"{ratio:.2f}")])


def in_own_process(size: str, engine: str, python: str) -> dict[str, float] | None:
    """The measurement; None if a package that it needs is not installed."""
    if engine == "fast, numba" and importlib.util.find_spec("numba") is None:
        return None
    if engine == "PyTorch" and not has_torch(python):
        return None
    command = [python if engine == "PyTorch" else sys.executable, __file__, "--part", size, engine]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(size: str, engine: str) -> dict[str, float]:
    """Make the graph, then run the engine on it again and again, the last time with its memory traced."""
    num_ops, run = torch_run(size) if engine == "PyTorch" else our_run(size, engine)
    gc.collect()
    gc.disable()
    times = [seconds(run)]
    if times[0] > MOST_SECONDS:
        return {"num_ops": num_ops, "cold": times[0], "warm": times[0], "peak": 0}
    times += [seconds(run) for _ in range(REPEATS)]
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    return {"num_ops": num_ops, "cold": times[0], "warm": min(times[1:]), "peak": peak}


def seconds(run: Callable[[], object]) -> float:
    """The processor time of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def our_run(size: str, engine: str) -> tuple[int, Callable[[], object]]:
    """The number of operations, and the measured function."""
    from pipeproof import lower, plan_from_dict, simulate
    from pipeproof.comm.channel_models import ChannelModel
    from pipeproof.sim.fast_engine import run_fast
    from pipeproof.sim.op_durations import durations_of
    from pipeproof.sim.simpy_model import run_model

    lowered = lower(plan_from_dict(plan(*SIZES[size])).spec)
    graph, model = lowered.graph, ChannelModel("directed_edge", "eager")
    durations = durations_of(lowered)
    runs: dict[str, Callable[[], object]] = {
        "simpy": lambda: run_model(graph, durations, model),
        "fast": lambda: run_fast(graph, durations, model, compiled=False),
        "fast, numba": lambda: run_fast(graph, durations, model, compiled=True),
        "whole": lambda: simulate(lowered, engine="fast"),
    }
    return graph.num_ops, runs[engine]


def plan(ranks: int, chunks: int, micro_batches: int) -> dict[str, Any]:
    """Interleaved 1F1B with one layer on each stage, and messages that take time."""
    return {
        "pipeproof": 1,
        "model": {
            "kind": "gpt", "num_layers": ranks * chunks, "hidden_size": 64, "num_heads": 8, "ffn_size": 128,
            "vocab_size": 256, "seq_length": 64,
        },
        "topology": {"pp": ranks},
        "schedule": {
            "kind": "interleaved", "variant": "torch", "num_micro_batches": micro_batches, "micro_batch_size": 1,
            "num_chunks": chunks,
        },
        "cost": {"forward_us": 100, "backward_us": 200, "p2p_latency_us": 3},
    }  # fmt: skip


def torch_run(size: str) -> tuple[int, Callable[[], object]]:
    """PyTorch's dry run of the same schedule, lowered by its own ``_add_send_recv``."""
    from torch.distributed.pipelining import schedules

    ranks, chunks, micro_batches = SIZES[size]

    def stage_to_rank(stage: int) -> int:
        return stage % ranks

    order = interleaved(ranks, chunks, micro_batches)
    lowered = schedules._add_send_recv(order, stage_to_rank=stage_to_rank, num_stages=ranks * chunks)

    def run() -> object:
        fresh = {rank: list(actions) for rank, actions in lowered.items()}  # which it empties
        return schedules._simulate_comms_compute(fresh, stage_to_rank, ranks * chunks)

    return sum(map(len, lowered.values())), run


if __name__ == "__main__":
    if "--part" in sys.argv:
        where = sys.argv.index("--part")
        print(json.dumps(measure(*sys.argv[where + 1 : where + 3])))
    else:
        main()
