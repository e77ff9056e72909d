"""Ranks as processes; none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_ranks(
    script: str,
    name: str,
    num_ranks: int,
    directory: Path,
    *,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    kill_when: Callable[[], bool] | None = None,
    exits: tuple[int, ...] = (0,),
) -> None:
    """Run a program on all ranks to its end, or until ``kill_when`` holds: then kill all of them."""
    path = Path(__file__).parent / script
    command = [sys.executable, str(path), name]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(directory)], cwd=ROOT, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment(rank)},
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    try:
        if kill_when is not None:
            ends = time.monotonic() + 60
            while not kill_when():
                assert time.monotonic() < ends, [process.poll() for process in processes]
                time.sleep(0.05)
            return
        for process in processes:
            output, _ = process.communicate(timeout=100)
            assert process.returncode in exits, output.decode()[-3000:]
    finally:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none is to see another one end
            for process in processes:
                process.send_signal(number)
        for process in processes:
            process.communicate()


def world(num_ranks: int = 2) -> Callable[[int], Mapping[str, str]]:
    """The environment of each rank of a Paddle job over gloo, at ports that are free."""
    sockets = [socket.socket() for _ in range(num_ranks + 1)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ends = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    shared = {
        "PADDLE_TRAINERS_NUM": str(num_ranks), "PADDLE_TRAINER_ENDPOINTS": ",".join(ends[:-1]),
        "PADDLE_MASTER": ends[-1], "PADDLE_DISTRI_BACKEND": "gloo",
    }  # fmt: skip
    return lambda rank: {**shared, "PADDLE_TRAINER_ID": str(rank), "PADDLE_CURRENT_ENDPOINT": ends[rank]}
