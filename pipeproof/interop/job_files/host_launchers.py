"""Shell scripts and commands for ``torchrun`` and ``paddle.distributed.launch``, which start the ranks of one host."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pipeproof.interop.job_files.job import HOST_0_PORT, Job, JobFile, Placeholder, header, python_words

_HOST_0 = Placeholder("HOST_0", "IPv4 address of host 0, as the other hosts reach it")


def host_commands(job: Job, host: str = '"$HOST_NUMBER"') -> str:
    """Shell lines that rehearse and then train with the ranks of one host; ``host`` is its number, quoted.

    With several hosts they read ``HOST_0`` and ``HOST_0_PORT``. These are not named ``MASTER_*``: if a user exports
    those, Paddle takes the port of its launcher for that of rank 0's store. Paddle's launcher on host 0 knows itself
    only by its IPv4 address.
    """
    lines = [
        _command(job, "rehearse", job.rehearsal, host, '"$HOST_0_PORT"'),
        _command(job, "train", job.training, host, '"$((HOST_0_PORT + 1))"'),
        "",
    ]
    if job.num_hosts > 1:
        lines.insert(0, "# Numbers of hosts put ranks that are neighbours in the plan's `topology.order` on one host.")
    return "\n".join(lines)


def _command(job: Job, step: str, words: Sequence[str], host: str, port: str) -> str:
    count, several = job.ranks_per_host, job.num_hosts > 1
    if job.backend == "torch":
        parts = [f"torchrun --nnodes {job.num_hosts} --nproc-per-node {count}" + ("" if several else " --standalone")]
        if several:
            parts.append(f'--node-rank {host} --master-addr "$HOST_0" --master-port {port}')
        parts.append(shlex.join(python_words(words)))
    else:
        parts = [f"python -m paddle.distributed.launch --nnodes {job.num_hosts} --nproc_per_node {count}"]
        if several:
            parts.append(f'--rank {host} --master "$HOST_0":{port}')
        parts += [f"--log_dir log/{step}", shlex.join(words)]
    return " \\\n    ".join(parts)


def host_script(job: Job) -> JobFile:
    """Shell script that the user starts on each host, for the launcher of the plan's backend."""
    several = job.num_hosts > 1
    placeholders = (_HOST_0,) if several else ()
    start = "bash FILE HOST, on each host, with 0 on the host of HOST_0, then 1, 2, .." if several else "bash FILE"
    lines = ["#!/usr/bin/env bash", header(job, start, placeholders)]
    if several:
        lines += [f"HOST_0={_HOST_0}\n"]
    lines += ["set -euo pipefail"]
    if several:
        lines += [f"HOST_0_PORT={HOST_0_PORT}", 'HOST_NUMBER="${1:?give the number of this host, from 0}"']
    return JobFile("\n".join([*lines, host_commands(job)]), placeholders)
