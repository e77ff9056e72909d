"""Verdicts about rings that this process writes for all ranks of a job."""

import re
import time
from collections import deque
from dataclasses import replace

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.exec.monitor.check_job import check_job
from pipeproof.exec.monitor.follow import Follower
from pipeproof.exec.monitor.job import JobNow, read_job, ring_files
from pipeproof.exec.monitor.ring_recorder import RingRecorder
from pipeproof.exec.store.process_state import ProcessId


class Rank:
    """A rank whose operations the test issues."""

    def __init__(self, directory, rank, num_ranks, *, on_device=False, **options):
        marker = (lambda backend: lambda: False) if on_device else None
        self.ring = RingRecorder(directory, rank, num_ranks, "none 1.0", marker=marker, **options)
        self.ring.group("0", range(num_ranks), "nccl" if on_device else "gloo")

    def begin(self, op, peer=None, size=4, at=1, dtype="float32"):
        """Issue an operation at a line of train.py, and wait for it."""
        call = f"seq = ring.issue({op!r}, '0', {peer}, 0, {dtype!r}, ({size},), {size}, {size})"
        names = {"ring": self.ring}
        exec(compile("\n" * (at - 1) + call, "train.py", "exec"), names)
        self.seq = names["seq"]
        self.ring.waits((self.seq,))

    def note_ends(self):
        """Note the ends on the device, as the heartbeat does."""
        self.ring._on_device = deque((seq, lambda: True) for seq, _ in self.ring._on_device)
        self.ring._note_done(time.time_ns())

    def do(self, op, peer=None, size=4, at=1):
        self.begin(op, peer, size, at)
        self.ring.done((self.seq,))


def job_of(directory, *, after_s=10.0):
    """The job as it is some seconds from now."""
    now = read_job(ring_files(directory))
    later_ns = time.time_ns() + int(after_s * 1e9)
    headers = [replace(rank.ring.header, heartbeat_ns=later_ns) for rank in now.ranks]
    ranks = tuple(
        replace(rank, ring=replace(rank.ring, header=header)) for rank, header in zip(now.ranks, headers, strict=True)
    )  # fmt: skip
    return JobNow(ranks, now.missing, later_ns)


def two_steps(ranks):
    for _ in range(2):
        for rank in ranks:
            rank.do("all_reduce", at=10)
            rank.do("all_reduce", at=20)


def ranks_in(directory, num_ranks):
    return [Rank(directory, rank, num_ranks) for rank in range(num_ranks)]


def test_ranks_that_wait_for_each_other(tmp_path):
    ranks = ranks_in(tmp_path, 2)
    two_steps(ranks)
    ranks[0].begin("recv", 1, at=30)
    ranks[1].begin("recv", 0, at=31)
    verdict = check_job(job_of(tmp_path))
    assert (verdict.status, verdict.kind, verdict.causes) == ("hang", "cycle", (0, 1))
    assert [(wait.rank, wait.ranks) for wait in verdict.waits] == [(0, (1,)), (1, (0,))]
    assert "train.py:31" in verdict.findings[0].message
    assert check_job(job_of(tmp_path, after_s=1)).status == "running"


def test_on_a_device_an_operation_that_is_queued_behind_another_one_has_not_come(tmp_path):
    ranks = [Rank(tmp_path, rank, 2, on_device=True) for rank in range(2)]
    for rank, other in zip(ranks, (1, 0), strict=True):
        rank.do("send", other, at=30)  # the host passes it, and the device does not
        rank.do("recv", other, at=31)
    verdict = check_job(job_of(tmp_path))
    assert (verdict.kind, verdict.causes) == ("cycle", (0, 1))
    assert "whose part at train.py:31 is queued behind" in verdict.findings[0].message


def test_the_first_operation_of_a_group_opens_its_connections(tmp_path):
    for rank in range(2):
        begun = Rank(tmp_path, rank, 2)
        begun.ring.issue("all_reduce", "0", None, 0, "float32", (4,), 4, 4)
    assert check_job(job_of(tmp_path)).status == "running"
    assert check_job(job_of(tmp_path, after_s=100)).kind == "unfinished"


def test_a_rank_with_an_operation_that_no_step_before_had_is_the_cause_of_a_cycle(tmp_path):
    ranks = ranks_in(tmp_path, 3)
    for _ in range(3):
        for rank in ranks:
            rank.do("all_reduce", at=10)
        for other in (0, 2):
            ranks[1].do("send", other, at=20)
            ranks[other].do("recv", 1, at=21)
    for rank in ranks:
        rank.do("all_reduce", at=10)
    ranks[1].begin("all_reduce", at=15)
    for other in (0, 2):
        ranks[other].begin("recv", 1, at=21)
    verdict = check_job(job_of(tmp_path))
    assert (verdict.kind, verdict.causes) == ("cycle", (1,))


def test_a_busy_rank_is_slow_and_an_idle_one_absent(tmp_path):
    ranks = ranks_in(tmp_path, 2)
    two_steps(ranks)
    ranks[0].begin("all_reduce", at=10)
    job = job_of(tmp_path)
    slow = check_job(job, busy=frozenset({1}))
    assert (slow.status, slow.causes, slow.findings[0].code) == ("slow", (1,), "PP955")
    hang = check_job(job)
    assert (hang.status, hang.kind, hang.causes) == ("hang", "absent", (1,))
    assert check_job(job, busy=frozenset({1}), slow_s=8).status == "hang"
    assert next(iter(hang.lines())) == "cause: rank 1"


def test_a_rank_that_ended_is_the_cause_only_if_the_others_do_as_before(tmp_path):
    ranks = ranks_in(tmp_path, 3)
    two_steps(ranks)
    for rank in ranks[:2]:
        rank.begin("all_reduce", at=10)
    ranks[2].ring.close(None)
    verdict = check_job(job_of(tmp_path))
    assert (verdict.kind, verdict.causes) == ("ended", (2,))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"size": 5}, "of [5] float32"),
        ({"dtype": "bfloat16"}, "of [4] bfloat16"),
        ({"op": "broadcast"}, "broadcast"),
    ],
    ids=["size", "dtype", "operation"],
)
def test_a_mismatch_names_the_rank_that_differs(tmp_path, change, named):
    ranks = ranks_in(tmp_path, 3)
    two_steps(ranks)
    for rank in ranks:
        rank.begin(**({"op": "all_reduce", "at": 10} | (change if rank is ranks[2] else {})))
    verdict = check_job(job_of(tmp_path))
    assert (verdict.kind, verdict.causes, verdict.findings[0].code) == ("mismatch", (2,), "PP932")
    line = next(line for line in verdict.findings[0].message.splitlines() if line.startswith("rank 2 issued"))
    assert named in line
    assert line.endswith("train.py:10")


def nccl_ranks(directory, num_ranks=2, **options):
    """Ranks whose devices have finished everything, and whose heartbeats have not noted it yet."""
    return [Rank(directory, rank, num_ranks, on_device=True, **options) for rank in range(num_ranks)]


@pytest.mark.parametrize("change", [{"op": "all_gather", "at": 11}, {"size": 5, "at": 11}], ids=["operation", "size"])
def test_a_mismatch_that_nccl_lets_pass_is_an_error_though_nobody_waits(tmp_path, change):
    ranks = nccl_ranks(tmp_path)
    for number in range(60):
        for rank in ranks:
            rank.do(**({"op": "all_reduce", "at": 10} | (change if rank is ranks[1] and number == 5 else {})))
            rank.note_ends()
    verdict, _ = Follower(tmp_path).look()
    assert (verdict.status, verdict.kind, verdict.causes, verdict.waits) == ("error", "mismatch", (1,), ())
    assert "collective #5 of group 0" in verdict.findings[0].message
    assert next(iter(verdict.lines())) == "cause: rank 1"


@pytest.mark.parametrize("more", [2, 77, 1000])
def test_the_digests_say_since_when_members_differ_whose_records_are_gone(tmp_path, more):
    ranks = nccl_ranks(tmp_path, 3, capacity=16)
    for rank in ranks:
        for number in range(100):
            rank.do("broadcast" if rank is ranks[2] and number == 41 else "all_reduce")
    for number in range(more):
        for rank in ranks[: 3 if number < more - 2 else 2]:
            rank.do("all_reduce")
    verdict = check_job(job_of(tmp_path, after_s=1))
    assert (verdict.kind, verdict.causes) == ("mismatch", (2,))
    first, last = map(int, re.search(r"one of #(\d+) to #(\d+) ", verdict.findings[0].message).groups())
    assert first <= 41 <= last


def test_equal_sequences_have_equal_digests_whatever_their_ranks_may_differ_in(tmp_path):
    ranks = nccl_ranks(tmp_path, capacity=4)
    for number in range(300):
        for rank in ranks[: 1 + (number < 290)]:
            rank.do("all_reduce")
            rank.do("all_to_all", size=1 + number % 3 + rank.ring.rank)
            rank.ring.issue("all_gather", "0", None, 0, "float32", (2,), 2 + rank.ring.rank, 5)
            rank.do("send", 1 - rank.ring.rank, size=rank.ring.rank + 1)
    assert Follower(tmp_path).look() is None


@pytest.mark.parametrize("killed", [0, 1])
def test_of_processes_that_are_all_gone_the_one_that_was_awaited_was_killed(tmp_path, monkeypatch, killed):
    """A launcher ends the others within 0.2 s; the heartbeat of none has noted the last ends of its device."""
    monkeypatch.setattr(ProcessId, "own", lambda: ProcessId(2**22 + 1, "1"))
    ranks = nccl_ranks(tmp_path)
    for rank in ranks:
        for _ in range(5):
            rank.do("all_reduce")
    ranks[1 - killed].do("all_reduce")
    looked = Follower(tmp_path).look()
    for verdict in (looked[0], check_job(read_job(ring_files(tmp_path)))):
        assert (verdict.status, verdict.kind, verdict.causes) == ("hang", "killed", (killed,))
        assert set(verdict.states.values()) == {"gone"}
        assert f"rank {1 - killed} waited for rank {killed}" in verdict.findings[0].message
    ranks[killed].do("all_reduce")
    verdict = check_job(read_job(ring_files(tmp_path)))
    assert (verdict.kind, verdict.causes) == ("killed", (0, 1))


def test_a_hang_is_known_after_the_processes_that_waited_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(ProcessId, "own", lambda: ProcessId(2**22 + 1, "1"))
    ranks = nccl_ranks(tmp_path)
    for rank in ranks:
        rank.do("all_reduce")
    ranks[1].ring.close(None)
    ranks[0].note_ends()
    ranks[0].do("all_reduce")
    assert check_job(read_job(ring_files(tmp_path))).kind == "killed"  # it had waited for a moment
    ranks[0].ring._ring.pulse(time.time_ns() + 20 * 10**9, 0)
    verdict = check_job(read_job(ring_files(tmp_path)))
    assert (verdict.kind, verdict.causes, dict(verdict.states)) == ("ended", (1,), {0: "gone", 1: "ended"})


def test_ends_that_a_killed_rank_did_not_note_are_known_from_the_others(tmp_path):
    ranks = nccl_ranks(tmp_path)
    for rank in ranks:
        for _ in range(5):
            rank.do("all_reduce")
    ranks[0].note_ends()
    other = read_job(ring_files(tmp_path)).ranks[1]
    assert [op.number for op in other.blocking] == [4]


def test_a_rank_without_a_ring_is_named(tmp_path):
    rank = Rank(tmp_path, 0, 2)
    rank.begin("all_reduce")
    verdict = check_job(job_of(tmp_path))
    assert (verdict.kind, verdict.causes, verdict.missing) == ("absent", (1,), (1,))


@pytest.mark.parametrize("has_ring", [False, True], ids=["no_ring", "no_operation"])
def test_a_followed_rank_that_has_not_begun_has_time_to(tmp_path, has_ring):
    """On a busy machine ranks begin seconds apart, and the first ones wait."""
    rank = Rank(tmp_path, 0, 2)
    other = Rank(tmp_path, 1, 2) if has_ring else None
    rank.begin("all_reduce")
    time.sleep(0.5)

    def look(slow_s):
        follower = Follower(tmp_path, patience_s=0.2, slow_s=slow_s)
        follower.look()
        time.sleep(0.2)  # more than half of the patience without an event
        return follower.look()[0]

    assert (look(60).status, look(60).causes) == ("running", ())
    assert (look(0.4).status, look(0.4).kind, look(0.4).causes) == ("hang", "absent", (1,))
    if other is not None:
        other.ring.close(None)
        assert (look(60).status, look(60).kind, look(60).causes) == ("hang", "ended", (1,))


def test_rings_of_several_hosts_and_of_different_jobs(tmp_path):
    for rank in range(2):
        Rank(tmp_path / f"node-{rank}", rank, 2)
    assert list(ring_files(tmp_path)) == [0, 1]
    Rank(tmp_path / "node-0", 1, 2)
    with pytest.raises(PlanFileError, match="both of rank 1"):
        ring_files(tmp_path)
    Rank(tmp_path / "other", 0, 2)
    Rank(tmp_path / "other", 1, 4)
    with pytest.raises(PlanFileError, match="4 ranks"):
        read_job(ring_files(tmp_path / "other"))


@pytest.mark.parametrize(("lines", "causes"), [((10, 15, 10, 10), (1,)), ((10, 10, 15, 15), (0, 1))])
def test_an_operation_that_does_not_end_names_a_rank_that_left_most_others_or_else_its_own_ranks(
    tmp_path, lines, causes
):
    ranks = ranks_in(tmp_path, 4)
    two_steps(ranks)
    for rank, line in zip(ranks, lines, strict=True):
        rank.do("all_reduce", at=line)
    ranks[0].begin("send", 1, at=30)
    ranks[1].begin("recv", 0, at=31)
    verdict = check_job(job_of(tmp_path, after_s=100))
    assert (verdict.kind, verdict.causes, bool(verdict.reasons)) == ("unfinished", causes, len(causes) == 1)
