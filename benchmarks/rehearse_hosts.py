"""Cost of a rehearsal with more and more ranks on eight hosts: ``python benchmarks/rehearse_hosts.py``.

Each host is a network namespace with an agent and a temporary directory of its own; they are joined by a bridge. Each
row is a pipeline over as many ranks, 1F1B with 8 micro-batches, PyTorch over gloo. Time of processors is what the
system counted for all processes together; memory is the largest sum of the proportional set sizes, by rank; descriptors
are the most that rank 0 had open, which serves the store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.rehearse_growth import plan_of
from tests.exec.hosts import REPOSITORY, Hosts

NUM_HOSTS = 8
HEADER = (
    "ranks",
    "seconds",
    "of the steps",
    "processor s",
    "of each rank",
    "MiB of each rank",
    "descriptors of rank 0",
)


def row_of(num_ranks: int, folder: Path) -> tuple[int, float, float, float, float, int]:
    """Rehearse once; ranks, seconds, seconds of the steps, seconds of processors, MiB of each rank, descriptors."""
    plan = folder / "plan.json"
    content = plan_of(num_ranks, "torch")
    content["model"]["num_layers"] = max(32, num_ranks)  # type: ignore[index]
    plan.write_text(json.dumps(content))
    used, began = _processor_s(), time.monotonic()
    most_bytes = most_descriptors = 0
    with Hosts(folder, NUM_HOSTS) as hosts:
        program = ("-m", "pipeproof", "rehearse", plan, "--report", "report.json", "--timeout", "300")
        agents = [
            hosts.start(host, REPOSITORY / "tests" / "exec" / "hosts.py", "open_mpi", host, NUM_HOSTS,
                        num_ranks // NUM_HOSTS, hosts.address(0), 29_511, *program)
            for host in range(NUM_HOSTS)
        ]  # fmt: skip
        while any(agent.poll() is None for agent in agents):
            num_bytes, descriptors = _held(str(plan))
            most_bytes, most_descriptors = max(most_bytes, num_bytes), max(most_descriptors, descriptors)
            time.sleep(2.0)
        if any(agent.wait() for agent in agents):
            raise SystemExit("\n".join(hosts.output(host) for host in range(NUM_HOSTS)))
        seconds = time.monotonic() - began
        found = json.loads((hosts.home(0) / "report.json").read_text())
    return num_ranks, seconds, found["seconds"], _processor_s() - used, most_bytes / 2**20 / num_ranks, most_descriptors


def _held(mark: str) -> tuple[int, int]:
    """Bytes of all ranks together, and open descriptors of rank 0."""
    num_bytes = descriptors = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            command = (process / "cmdline").read_text().split("\0")
            if mark in command and command[1:3] == ["-m", "pipeproof"]:
                rollup = (process / "smaps_rollup").read_text()
                num_bytes += int(rollup.partition("\nPss:")[2].split()[0]) * 1024
                if "OMPI_COMM_WORLD_RANK=0" in (process / "environ").read_text().split("\0"):
                    descriptors = len(list((process / "fd").iterdir()))
    return num_bytes, descriptors


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    options = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for num_ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            ranks, seconds, steps, processor, mib, descriptors = row_of(num_ranks, Path(folder))
        cells = (ranks, f"{seconds:.1f}", f"{steps:.2f}", f"{processor:.1f}", f"{processor / ranks:.2f}", f"{mib:.0f}",
                 descriptors)  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
