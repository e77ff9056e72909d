"""Process of one rank of a rehearsal; the launcher starts it as it starts that of a run, ``exec.launch.worker``."""

from __future__ import annotations

import sys

from pipeproof.exec.launch.worker import Emit, main, run_rank
from pipeproof.exec.rank.job_files import Job, end_process
from pipeproof.exec.rehearse.rehearsal_framework import RehearsalFramework


def rehearse_rank(job: Job, rank: int, emit: Emit) -> None:
    """Rehearse every step of one rank's program."""
    run_rank(job, rank, emit, rehearse=RehearsalFramework)


if __name__ == "__main__":
    end_process(main(sys.argv[1:], rehearse_rank))
