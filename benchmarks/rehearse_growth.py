"""Cost of a rehearsal with more and more processes of one machine: ``python benchmarks/rehearse_growth.py``.

Each row is a pipeline over as many ranks, 1F1B with 8 micro-batches. The report gives the numbers of messages and of
elements that ranks compare; the system gives the processor time of all processes together. ``--ranks`` chooses rows,
``--backend`` the framework.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEADER = ("ranks", "seconds", "of the steps", "processor s", "of each rank", "messages", "elements of each rank")


def plan_of(num_ranks: int, backend: str) -> dict[str, object]:
    """A layer or more on each rank; the boundary tensors do not depend on the number of ranks."""
    model = {"num_layers": 32, "hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 128, "seq_length": 64}
    return {
        "pipeproof": 1,
        "model": {"kind": "gpt", **model},
        "topology": {"pp": num_ranks},
        "schedule": {"kind": "1f1b", "num_micro_batches": 8, "micro_batch_size": 1},
        "run": {"backend": backend},
    }


def row_of(num_ranks: int, backend: str, folder: Path) -> tuple[str, ...]:
    """Rehearse once and report time and memory."""
    plan, report = folder / "plan.json", folder / "report.json"
    plan.write_text(json.dumps(plan_of(num_ranks, backend)))
    used, began = _processor_s(), time.monotonic()
    command = [sys.executable, "-m", "pipeproof", "rehearse", str(plan), "--report", str(report), "--timeout", "240"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout)
    seconds, processor = time.monotonic() - began, _processor_s() - used
    found = json.loads(report.read_text())
    return (
        str(num_ranks),
        f"{seconds:.1f}",
        f"{found['seconds']:.2f}",
        f"{processor:.1f}",
        f"{processor / num_ranks:.2f}",
        str(found["messages"]),
        str(found["elements"] // num_ranks),
    )


def _processor_s() -> float:
    """Processor time of all started processes that have ended, with their own children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--backend", choices=["paddle", "torch"], default="torch")
    options = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in options.ranks:
            print(f"| {' | '.join(row_of(num_ranks, options.backend, Path(folder)))} |", flush=True)


if __name__ == "__main__":
    main()
