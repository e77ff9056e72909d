"""The launchers that job files can be written for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from pipeproof.interop.job_files.host_launchers import host_script
from pipeproof.interop.job_files.job import Job, JobFile
from pipeproof.interop.job_files.kubernetes import jobset, trainjob
from pipeproof.interop.job_files.nemo_run_script import nemo_run_script
from pipeproof.interop.job_files.ray_script import ray_script
from pipeproof.interop.job_files.slurm import slurm_script


@dataclass(frozen=True, slots=True)
class JobLauncher:
    """A launcher; ``backend`` is the only framework that it starts, None for both."""

    write: Callable[[Job], JobFile]
    backend: str | None = None


LAUNCHERS: Final = MappingProxyType(
    {
        "torchrun": JobLauncher(host_script, "torch"),
        "paddle": JobLauncher(host_script, "paddle"),
        "slurm": JobLauncher(slurm_script),
        "jobset": JobLauncher(jobset),
        "trainjob": JobLauncher(trainjob),
        "ray": JobLauncher(ray_script),
        "nemo-run": JobLauncher(nemo_run_script),
    }
)
"""By the name that the command takes."""


def write_job_file(launcher: str, job: Job) -> JobFile:
    """Return the job file for a launcher of ``LAUNCHERS``.

    Raises:
        ValueError: the launcher does not start the framework of the plan.
    """
    row = LAUNCHERS[launcher]
    if row.backend not in (None, job.backend):
        fitting = next(name for name, other in LAUNCHERS.items() if other.backend == job.backend)
        fact = f"{launcher} starts {row.backend}, and run.backend is {job.backend} ({job.backend_position})"
        raise ValueError(f"{fact}: use {fitting}")
    return row.write(job)
