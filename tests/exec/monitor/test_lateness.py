"""Stragglers among jitter: planted slow ranks, healthy jobs, and long pauses."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from pipeproof.exec.monitor.check_job import check_job
from pipeproof.exec.monitor.follow import Follower
from pipeproof.exec.monitor.job import read_job, ring_files
from pipeproof.exec.monitor.lateness import lateness
from tests.exec.monitor.hang_jobs import ROOT


def arrivals(num_ranks, *, slow=1.0, jitter=0.2, pause=0.0, steps=200, seed=0):
    """Arrivals of steps of 1 s; rank 0 is slower by a factor, and pauses once."""
    draw = random.Random(seed)
    start, found = 0.0, []
    for step in range(steps):
        members = {
            rank: start + draw.uniform(1 - jitter, 1 + jitter) * (slow if rank == 0 else 1.0)
            for rank in range(num_ranks)
        }  # fmt: skip
        members[0] += pause if step == steps // 2 else 0.0
        found.append(members)
        start = max(members.values())
    return found, start


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_a_rank_that_is_slower_by_30_percent_is_the_straggler(num_ranks):
    for seed in range(20):
        rows = lateness(*arrivals(num_ranks, slow=1.3, seed=seed))
        assert [row.rank for row in rows if row.is_straggler] == [0]
        assert rows[0].num_last > 100
        assert 0.05 < rows[0].share < 0.3


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_jitter_and_one_long_pause_are_no_straggler(num_ranks):
    for seed in range(50):
        for pause in (0.0, 100.0):
            rows = lateness(*arrivals(num_ranks, jitter=0.5, pause=pause, seed=seed))
            assert len(rows) == num_ranks
            assert not any(row.is_straggler for row in rows)


def test_a_rank_that_is_always_late_by_little_costs_too_little():
    found = [{0: step + 0.02, 1: float(step), 2: float(step)} for step in range(64)]
    found[30][0] += 50.0  # one pause does not change that
    (row, *_) = lateness(found, 64.0)
    assert (row.num_last, row.num_collectives, row.is_straggler) == (64, 64, False)
    assert row.share == pytest.approx(0.02)
    assert lateness(found[:31], 31.0) == ()


@pytest.mark.needs_torch
@pytest.mark.slow(but=["1.3"])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_a_job_with_a_slow_rank_runs_and_has_a_straggler(tmp_path, factor):
    rings = tmp_path / "rings"
    program = str(Path(__file__).with_name("late_job.py"))
    command = [sys.executable, program, "{rank}", "3", str(rings), str(factor)]
    processes = [subprocess.Popen([part.format(rank=rank) for part in command], cwd=ROOT) for rank in range(3)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    job = read_job(ring_files(rings))
    verdict = check_job(job)
    assert (verdict.status, verdict.causes) == ("ended", ())
    assert [finding.code for finding in verdict.findings] == (["PP955"] if factor > 1 else [])
    if factor > 1:
        assert verdict.findings[0].message.startswith("rank 1 came last to ")
        assert "ms after the others" in verdict.findings[0].message


@pytest.mark.needs_torch
def test_a_followed_job_that_makes_progress_is_looked_at_for_stragglers(tmp_path, monkeypatch):
    now_ns = 10**18
    follower = Follower(tmp_path, now_ns=lambda: now_ns, _lateness_ns=now_ns)
    from tests.exec.monitor.test_verdict import ranks_in, two_steps

    two_steps(ranks_in(tmp_path, 2))
    assert follower.look() is None
    now_ns += 31 * 10**9
    follower._events.clear()  # the ranks have had events meanwhile
    looked = follower.look()
    assert looked is not None
    assert (looked[0].status, looked[0].findings) == ("running", ())
