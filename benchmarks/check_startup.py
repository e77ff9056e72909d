"""Times ``pipeproof check`` of a small plan as a whole process, and the parts of that time.

``python benchmarks/check_startup.py [REPEATS]`` prints, for each command, the
median and the fastest wall time, the median processor time (which a busy
machine changes less), the ratio to a bare interpreter, and the imports that
take longest. Commands alternate: if the machine is busy for a while, all of them slow down. Nothing is asserted: times
are the machine's.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAN = "examples/gpt_pp2_tp2_sp_full.yaml"
CHECK = ("-m", "pipeproof", "check", PLAN)
NUM_IMPORTS = 12


def main() -> None:
    """Measure and print."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    commands = {
        "python -c pass": ("-c", "pass"),
        "import pipeproof.cli.main": ("-c", "import pipeproof.cli.main"),
        f"pipeproof check {PLAN}": CHECK,
    }
    if importlib.util.find_spec("paddle") is not None:
        commands["import paddle (check does not)"] = ("-c", "import paddle")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for arguments in commands.values():
        measure(arguments)  # the first run reads files and writes byte code
    for _ in range(repeats):
        for name, arguments in commands.items():
            times[name].append(measure(arguments))
    bare = statistics.median(wall for wall, _ in times["python -c pass"])
    print(f"{repeats} runs of each command, seconds")
    print(f"{'':<58} {'median':>7} {'fastest':>8} {'processor':>10} {'ratio':>7}")
    for name, pairs in times.items():
        median, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        fastest = min(wall for wall, _ in pairs)
        print(f"{name:<58} {median:>7.3f} {fastest:>8.3f} {cpu:>10.3f} {median / bare:>6.1f}x")
    print_slowest_imports()


def measure(arguments: tuple[str, ...]) -> tuple[float, float]:
    """Wall and processor seconds from the start of a Python process to its end."""
    start, cpu_before = time.perf_counter(), children_cpu_s()
    subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "GLOG_minloglevel": "3"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start, children_cpu_s() - cpu_before


def children_cpu_s() -> float:
    """Processor seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def print_slowest_imports() -> None:
    """One run of check under ``-X importtime``: packages by the time that their own modules take."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *CHECK], cwd=ROOT, capture_output=True, text=True, check=True
    )
    by_package: dict[str, int] = {}
    for microseconds, module in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", done.stderr, re.MULTILINE):
        package = module.partition(".")[0]
        by_package[package] = by_package.get(package, 0) + int(microseconds)
    total = sum(by_package.values())
    print(f"\nimports of one check, {total / 1000:.0f} ms with tracing; time in each package's own modules:")
    for package, own in sorted(by_package.items(), key=lambda item: -item[1])[:NUM_IMPORTS]:
        print(f"  {package:<24} {own / 1000:>7.1f} ms {100 * own / total:>5.1f} %")


if __name__ == "__main__":
    main()
