"""Python script for NeMo-Run: the rehearsal and the training as two jobs of Slurm, the second after the first."""

from __future__ import annotations

from collections.abc import Sequence

from pipeproof.interop.job_files.job import IMAGE, WORK_DIR, Job, JobFile, header
from pipeproof.interop.job_files.slurm import (
    ACCOUNT,
    PARTITION,
    TIME_LIMIT,
    allocation_lines,
    task_command,
    task_lines,
)

_PLACEHOLDERS = (ACCOUNT, PARTITION, TIME_LIMIT, IMAGE, WORK_DIR)

_SCRIPT = """
import shlex

{values}

NAME = {name!r}
NUM_HOSTS = {num_hosts}
RANKS_PER_HOST = {ranks_per_host}
GPUS_PER_HOST = {gpus_per_host}
ALLOCATION = {allocation}
TASK = {task}
REHEARSAL = {rehearsal!r}
TRAINING = {training!r}


def main():
    \"\"\"Submit both jobs.\"\"\"
    import nemo_run as run

    executor = run.SlurmExecutor(
        account=ACCOUNT,
        partition=PARTITION,
        time=TIME_LIMIT,
        nodes=NUM_HOSTS,
        ntasks_per_node=RANKS_PER_HOST,
        gpus_per_node=GPUS_PER_HOST,
        container_image=IMAGE,
        container_mounts=[f"{{WORK_DIR}}:{{WORK_DIR}}"],
        env_vars={{"WORK_DIR": shlex.quote(WORK_DIR)}},
        setup_lines=ALLOCATION,
        packager=run.Packager(),
        # Blocks put ranks that are neighbours in the plan's `topology.order` on one host; the training does not wait
        # for a rehearsal that failed.
        additional_parameters={{"distribution": "block", "kill_on_invalid_dep": "yes"}},
    )
    with run.Experiment(NAME) as experiment:
        rehearsal = experiment.add(run.Script(inline=TASK + REHEARSAL), executor=executor, name="rehearse")
        training = executor.clone()
        training.dependency_type = "afterok"
        experiment.add(run.Script(inline=TASK + TRAINING), executor=training, name="train", dependencies=[rehearsal])
        experiment.run(detach=True)


if __name__ == "__main__":
    main()
"""


def nemo_run_script(job: Job) -> JobFile:
    """Script for a login node of the cluster; it imports NeMo-Run only in ``main``.

    NeMo-Run starts one task per rank by ``srun --kill-on-bad-exit=1``. Each of the two jobs has its own hosts.
    """
    text = _SCRIPT.format(
        values="\n".join(f"{name.removeprefix('FILL_IN_')} = {str(name)!r}" for name in _PLACEHOLDERS),
        name=job.name,
        num_hosts=job.num_hosts,
        ranks_per_host=job.ranks_per_host,
        gpus_per_host=job.ranks_per_host if job.on_gpus else None,
        allocation=_literal(allocation_lines(job)),
        task=_literal(["set -eu", *task_lines(job), 'cd "$WORK_DIR"']),
        rehearsal=f"exec {task_command(job.rehearsal)}\n",
        training=f"exec {task_command(job.training)}\n",
    )
    return JobFile(header(job, "python FILE", _PLACEHOLDERS) + text, _PLACEHOLDERS)


def _literal(lines: Sequence[str]) -> str:
    """Python expression for a text of lines, one line of code for each."""
    return "(\n" + "".join(f"    {line + chr(10)!r}\n" for line in lines) + ")"
