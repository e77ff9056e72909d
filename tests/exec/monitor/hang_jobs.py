"""Jobs with planted hangs as processes, and the verdicts of the monitor about them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeproof.exec.monitor.follow import Follower, follow
from pipeproof.exec.monitor.verdict import Verdict
from tests.interop.record.processes import world

Framework = Literal["torch", "paddle"]
ROOT = Path(__file__).parents[3]
BACKEND = os.environ.get("PLANTED_BACKEND", "gloo")
NUM_RANKS = int(os.environ.get("PLANTED_RANKS", "3"))
_LAST = NUM_RANKS - 1
CAUSES = {
    "crossed_sends": (_LAST - 1, _LAST), "missing_receive": (1,), "extra_collective": (1,), "rank_local_keys": (1,),
    "exception": (1,), "killed": (1,), "stopped": (1,), "data_loader_stuck": (1,), "wrong_group": (1,),
    "micro_batch_counts": (_LAST,), "shape_mismatch": (1,),
}  # fmt: skip
"""The planted kinds of hang, each with the ranks that are its cause."""


@dataclass(frozen=True)
class Outcome:
    """The verdict about a job; ``seconds`` are those from its last event to the verdict; ``log`` is of all ranks."""

    verdict: Verdict | None
    seconds: float
    log: str


@contextmanager
def running(
    name: str, directory: Path, num_steps: int = 8, framework: Framework = "torch"
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run a job until the block ends; then no process of it is left. ``directory/../log`` has what the ranks print."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    directory.mkdir(parents=True)
    command = [sys.executable, str(Path(__file__).with_name("planted_hangs.py")), framework, name]
    of_rank = world(NUM_RANKS)
    with (directory.parent / "log").open("wb") as log:
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(NUM_RANKS), str(directory), str(num_steps)], cwd=ROOT,
                env={**environment, **of_rank(rank)}, stdout=log, stderr=log,
            )
            for rank in range(NUM_RANKS)
        ]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.wait()


def outcome(
    name: str, directory: Path, *, patience_s: float, num_steps: int = 8, timeout_s: float = 300,
    framework: Framework = "torch",
) -> Outcome:  # fmt: skip
    """Run a job, follow it until it hangs or ends, and end it."""
    with running(name, directory, num_steps, framework):
        followed = follow(
            Follower(directory, patience_s=patience_s).look, report=lambda verdict, job: None, timeout_s=timeout_s
        )  # fmt: skip
        now_ns = time.time_ns()
    log = (directory.parent / "log").read_text(errors="replace")
    if followed is None:
        return Outcome(None, timeout_s, log)
    verdict, job = followed
    return Outcome(verdict, (now_ns - max(rank.since_ns for rank in job.ranks)) / 1e9, log)
