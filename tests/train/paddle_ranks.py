"""Programs of several Paddle processes on the CPU, each rank with the environment that Paddle's launcher gives."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeproof.exec.store.rendezvous import rank_environment, reserved_ports

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).resolve().parent / "programs"


def run_ranks(program, num_ranks, *args, timeout=300):
    """The exit status and the output of each rank of ``programs/<program>``; ranks that do not end are killed."""
    with reserved_ports(num_ranks + 1) as ports:
        started = [
            subprocess.Popen(
                [sys.executable, str(PROGRAMS / program), *map(str, args)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                env={
                    **os.environ, **rank_environment("paddle", rank, num_ranks, ports), "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
                },
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        ends = time.monotonic() + timeout
        outputs = []
        for process in started:
            try:
                outputs.append(process.communicate(timeout=max(1, ends - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                outputs.append(f"{process.communicate()[0]}\n[killed after {timeout} s]")
    return [process.returncode for process in started], outputs


def found_by(tmp_path, program, num_ranks, *args):
    """Content of the file of each rank of a program."""
    output = tmp_path / "found"
    statuses, outputs = run_ranks(program, num_ranks, output, *args)
    assert statuses == [0] * num_ranks, "\n".join(outputs)
    return [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(num_ranks)]
