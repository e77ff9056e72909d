"""Batch script for Slurm: ``srun`` starts one task per rank, and each task sets the environment of its framework."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from pipeproof.interop.job_files.job import Job, JobFile, Placeholder, header, python_words

ACCOUNT = Placeholder("ACCOUNT", "account that the job is charged to")
PARTITION = Placeholder("PARTITION", "partition of the hosts")
TIME_LIMIT = Placeholder("TIME_LIMIT", "time limit of the job, such as 01:00:00")


_PORTS = range(20000, 32000)
"""Ports of jobs: below those that Linux gives to processes that ask for any."""


def _ports_per_step(job: Job) -> int:
    """Ports that a step may use on a host: of rank 0's store, and of each rank for Paddle."""
    return 1 + job.ranks_per_host


def allocation_lines(job: Job) -> list[str]:
    """Shell lines, run once in an allocation, after which every task finds rank 0."""
    ports = 2 * _ports_per_step(job)
    first = f"{_PORTS.start} + SLURM_JOB_ID % {max(1, len(_PORTS) // ports)} * {ports}"
    return [
        'mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'export HOST_NAMES="${HOSTS[*]}" MASTER_ADDR="${HOSTS[0]}"',
        f'export MASTER_PORT="$(({first}))"  # jobs with numbers near each other may share a host',
    ]


def task_lines(job: Job) -> list[str]:
    """Shell lines, run in each task, that set the variables of torchrun or of Paddle's launcher from Slurm's."""
    if job.backend == "torch":
        return [
            'export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_NTASKS"',
            f'export LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE={job.ranks_per_host}',
        ]
    lines = [
        "endpoints=()",
        "for host in $HOST_NAMES; do",
        f'    for ((i = 1; i <= {job.ranks_per_host}; i++)); do endpoints+=("$host:$((MASTER_PORT + i))"); done',
        "done",
        'PADDLE_TRAINER_ENDPOINTS="$(IFS=,; echo "${endpoints[*]}")"',
        'export PADDLE_TRAINER_ENDPOINTS PADDLE_CURRENT_ENDPOINT="${endpoints[SLURM_PROCID]}"',
        'export PADDLE_TRAINER_ID="$SLURM_PROCID" PADDLE_TRAINERS_NUM="$SLURM_NTASKS"',
        f'export PADDLE_LOCAL_RANK="$SLURM_LOCALID" PADDLE_LOCAL_SIZE={job.ranks_per_host}',
        'export PADDLE_MASTER="$MASTER_ADDR:$MASTER_PORT"',
        f"export PADDLE_DISTRI_BACKEND={'nccl' if job.on_gpus else 'gloo'}",
    ]
    return [*lines, 'export FLAGS_selected_gpus="$SLURM_LOCALID"'] if job.on_gpus else lines


def task_command(words: Sequence[str]) -> str:
    """Command of one rank."""
    return shlex.join(("python", *python_words(words)))


def slurm_script(job: Job) -> JobFile:
    """Script for ``sbatch``; it starts in the directory of the submission, on a file system of all hosts."""
    placeholders = (ACCOUNT, PARTITION, TIME_LIMIT)
    options = [
        f"account={ACCOUNT}",
        f"partition={PARTITION}",
        f"time={TIME_LIMIT}",
        f"job-name={job.name}",
        f"nodes={job.num_hosts}",
        f"ntasks={job.num_ranks}",
        f"ntasks-per-node={job.ranks_per_host}",
        *([f"gpus-per-node={job.ranks_per_host}"] if job.on_gpus else []),
        "distribution=block",
    ]
    srun = 'srun --kill-on-bad-exit=1 bash -c "$TASK" task'
    ports = f'MASTER_PORT="$((MASTER_PORT + {_ports_per_step(job)}))"'
    lines = [
        "#!/usr/bin/env bash",
        header(job, "sbatch FILE", placeholders),
        *(f"#SBATCH --{option}" for option in options),
        "# Blocks put ranks that are neighbours in the plan's `topology.order` on one host.",
        "",
        "set -euo pipefail",
        *allocation_lines(job),
        "TASK=" + shlex.quote("\n".join(["", *task_lines(job), 'exec "$@"'])),
        f"{srun} {task_command(job.rehearsal)}",
        f"{ports} {srun} {task_command(job.training)}",
        "",
    ]
    return JobFile("\n".join(lines), placeholders)
