"""The benchmarks for GPUs, tried small over gloo: that they run, and have a line for each schedule."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs_torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = {
    "moe": (["128,32,1,2", "8,2,32", "1f1b"], ["ep 2", "pp 2 1f1b"]),
    "host": (
        [os.devnull, "--device", "cpu", "--size", "128,8,1,2", "--rounds", "1"],
        ['{"way": "1f1b, rival, eager", "ms":', '{"way": "1f1b, ours, whole", "ms":'],
    ),
    "tensor": (["256,32,1,2", "2", "1f1b"], ["tp 2 pp 1 1f1b"]),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_runs_on_two_ranks(name):
    arguments, rows = BENCHMARKS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    world |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, str(ROOT / "benchmarks" / "gpu" / f"{name}.py"), *arguments]
    ranks = [
        subprocess.Popen(
            program, env={**os.environ, **world, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    try:
        (out, errors), _ = (rank.communicate(timeout=120) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors[-2000:]
    assert [row for row in rows if any(line.startswith(f"{row} ") for line in out.splitlines())] == rows
