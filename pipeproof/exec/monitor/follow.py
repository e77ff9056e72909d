"""Following of a watched job until it hangs or ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pipeproof.exec.monitor.check_job import check_job
from pipeproof.exec.monitor.job import JobNow, ProcessState, process_states, read_headers, read_job, ring_files
from pipeproof.exec.monitor.ring import RingHeader, divergences
from pipeproof.exec.monitor.verdict import FAILURES, PATIENCE_S, SLOW_S, Status, Verdict

POLL_S: Final = 0.5
_WINDOW_S: Final = 2.0
_BUSY_SHARE: Final = 0.5
_WARM_UP_EVENTS: Final = 64
"""Number of first events of a rank whose gaps belong to the start: imports, compilation, first connections."""
_LONGER: Final = 2.0
"""A wait that is this many times as long as every wait that the job has survived is unusual."""


@dataclass
class Follower:
    """Repeated verdicts about the rings in a directory.

    If a job makes progress and the digests of each group agree, a look only reads the headers. A rank is busy if its
    process used a processor for more than half of the last two seconds. A job that has survived a longer wait (its
    checkpoints, its evaluation) gets twice that much patience. Ranks begin at different times: a rank without an
    operation is awaited for ``slow_s``.

    Args:
        directory: directory of the rings, or of one directory per host.
        patience_s: wait of a rank, in seconds, from which the job counts as hung.
        slow_s: the same limit for a wait for a rank that computes, or that has not begun.
    """

    directory: Path
    patience_s: float = PATIENCE_S
    slow_s: float = SLOW_S
    now_ns: Callable[[], int] = time.time_ns
    _cpu: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    _events: dict[int, tuple[int, int]] = field(default_factory=dict)
    _longest_gap_s: float = 0.0

    def look(self) -> tuple[Verdict, JobNow] | None:
        """Return the verdict now, and the job; None while a look at the headers shows progress, or there is no ring.

        Raises:
            PlanFileError: PP952, a file is not a ring, or the rings are of different jobs.
        """
        files = ring_files(self.directory)
        if not files:
            return None
        headers = read_headers(files)
        is_sound = next(divergences((header.rank, header.digests) for header in headers), None) is None
        if self._makes_progress(headers) and is_sound:
            return None
        job = read_job(files)
        verdict = self._check(job)
        if verdict.status is Status.ERROR:  # a record that was read while it was written is left out
            job = read_job(files)
            verdict = self._check(job)
        return verdict, job

    def _check(self, job: JobNow) -> Verdict:
        patience_s = max(self.patience_s, _LONGER * self._longest_gap_s)
        slow_s = max(self.slow_s, patience_s)
        return check_job(job, patience_s=patience_s, slow_s=slow_s, busy=self._busy(), starting=self._starting(job))

    def _makes_progress(self, headers: tuple[RingHeader, ...]) -> bool:
        """Update the history of all ranks; True if every rank runs and has had an event within half of the patience."""
        now_ns = self.now_ns()
        progresses = True
        for header, state in zip(headers, process_states(headers), strict=True):
            samples = self._cpu.setdefault(header.rank, [])
            if not samples or header.heartbeat_ns > samples[-1][0]:
                samples.append((header.heartbeat_ns, header.cpu_ns))
            while len(samples) > 2 and samples[-1][0] - samples[1][0] > _WINDOW_S * 1e9:
                samples.pop(0)
            num_events, since_ns = self._events.get(header.rank, (-1, now_ns))
            if header.num_events != num_events:
                if num_events > _WARM_UP_EVENTS:
                    self._longest_gap_s = max(self._longest_gap_s, (now_ns - since_ns) / 1e9)
                self._events[header.rank] = header.num_events, now_ns
                since_ns = now_ns
            is_still = (now_ns - since_ns) / 1e9 > self.patience_s / 2
            progresses = progresses and state is ProcessState.RUNNING and not is_still
        return progresses

    def _starting(self, job: JobNow) -> frozenset[int]:
        """Ranks that may not have begun: those without an operation or a ring, not long after the first ring."""
        idle = [rank for rank in job.ranks if rank.last is None and rank.state is ProcessState.RUNNING]
        started = {rank.rank: rank.ring.header.started_ns for rank in idle}
        first_ns = min(rank.ring.header.started_ns for rank in job.ranks)
        started |= dict.fromkeys(job.missing, first_ns)
        return frozenset(rank for rank, since_ns in started.items() if (job.now_ns - since_ns) / 1e9 < self.slow_s)

    def _busy(self) -> frozenset[int]:
        busy = set()
        for rank, samples in self._cpu.items():
            (start_ns, start_cpu_ns), (end_ns, end_cpu_ns) = samples[0], samples[-1]
            if end_ns > start_ns and (end_cpu_ns - start_cpu_ns) / (end_ns - start_ns) > _BUSY_SHARE:
                busy.add(rank)
        return frozenset(busy)


def follow(
    look: Callable[[], tuple[Verdict, JobNow | None] | None], *,
    report: Callable[[Verdict | None, JobNow | None], None],
    timeout_s: float | None = None, poll_s: float = POLL_S,
) -> tuple[Verdict, JobNow | None] | None:  # fmt: skip
    """Call ``look`` every ``poll_s`` seconds until the job hangs, computes wrong numbers or ends.

    Return that verdict, None after ``timeout_s``.

    ``report`` gets every look, None while the job makes progress.

    Raises:
        PlanFileError: PP952, a file is not a ring, or the rings are of different jobs; PP956, RAS cannot be asked.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while end is None or time.monotonic() < end:
        looked = look()
        report(*(looked or (None, None)))
        if looked is not None and looked[0].status in (*FAILURES, Status.ENDED):
            return looked
        time.sleep(poll_s)
    return None
