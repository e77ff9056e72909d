"""A rank of Fleet's own pipeline that is recorded: what ``pipeproof fleet --record`` starts.

``python -m pipeproof.interop.record.fleet_rank DIRECTORY EVENT_FD`` is the
worker of ``exec.fleet`` with ``record_paddle`` around its steps.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager

from pipeproof.exec.fleet.run import recorded_to
from pipeproof.exec.fleet.worker import run_fleet_rank
from pipeproof.exec.jobs import Job
from pipeproof.exec.worker import Emit, main


def run_recorded_rank(job: Job, rank: int, emit: Emit) -> None:
    """As ``run_fleet_rank``, with a log of every step."""
    run_fleet_rank(job, rank, emit, _recorded)


def _recorded(job: Job) -> AbstractContextManager[object]:
    from pipeproof.interop.record.paddle_calls import record_paddle

    return record_paddle(recorded_to(job))


if __name__ == "__main__":
    status = main(sys.argv[1:], run_recorded_rank)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
