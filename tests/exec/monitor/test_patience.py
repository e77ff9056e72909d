"""Verdicts about rings of hand-made events: a slow operation does not count as a hang until its limit.

Ages are seconds before now. A rank's operations are in the order of issue.
"""

from dataclasses import replace

import pytest

from pipeproof.exec.monitor.check_job import check_job
from pipeproof.exec.monitor.job import JobNow, ProcessState, RankNow
from pipeproof.exec.monitor.ring import End, OpState, Ring, RingGroup, RingHeader, RingOp

NOW_NS = 10**15
HEADER = RingHeader(
    0, 4, 1, "", "host", "", "torch", 0, NOW_NS, 0, 0, End.NONE, 0, (), 0, "", 2048, "", None, None, None, 0
)  # fmt: skip


def op(name, state, issued, *, peer=None, number=0, waited=None, done=None, backend="nccl", batch=None, ranks=range(4)):
    issued_ns, waited_ns, done_ns = (0 if age is None else NOW_NS - int(age * 1e9) for age in (issued, waited, done))
    group = RingGroup("0" if backend == "nccl" else "1", tuple(ranks), backend, "")
    return RingOp(
        0, name, state, group, number, peer, 0, batch, "float32", (4,), 4, 4, "train.py:1", None, None, "", "", None,
        issued_ns, waited_ns, done_ns,
    )  # fmt: skip


def queued(name, age, **values):
    """An operation that the host has passed, and the device has not finished."""
    return op(name, OpState.QUEUED, age, waited=age, **values)


def done(name, age, **values):
    return op(name, OpState.DONE, age, waited=age, done=age, **values)


def waited(name, age, **values):
    """An operation that the host waits for."""
    return op(name, OpState.WAITED, age, waited=age, backend="gloo", **values)


def job(*ops_by_rank, later_s=0.0, states=(), heartbeats=()):
    """The job of these operations, ``later_s`` after their ages."""
    later_ns = int(later_s * 1e9)
    ranks = []
    for rank, ops in enumerate(ops_by_rank):
        numbered = tuple(replace(op, seq=seq) for seq, op in enumerate(ops))
        heartbeat_ns = NOW_NS + later_ns - int(dict(heartbeats).get(rank, 0) * 1e9)
        header = replace(
            HEADER, rank=rank, num_ranks=len(ops_by_rank), heartbeat_ns=heartbeat_ns, started_ns=NOW_NS - 30 * 10**9
        )  # fmt: skip
        ranks.append(RankNow(Ring(f"rank_{rank}.ring", header, numbered), dict(states).get(rank, ProcessState.RUNNING)))
    return JobNow(tuple(ranks), (), NOW_NS + later_ns)


def kind(*ops_by_rank, busy=frozenset(), **values):
    verdict = check_job(job(*ops_by_rank, **values), busy=busy)
    return str(verdict.status) if verdict.status != "hang" else str(verdict.kind)


def test_members_of_one_collective_do_not_wait_for_each_other_while_its_communicator_is_made():
    """Their hosts are in the first call, and their devices have messages before it; the first rank came 5.8 s ago."""
    opening = {"name": "all_reduce", "state": OpState.ISSUED}
    ranks = (
        [queued("send", 6.5, peer=1), op(**opening, issued=5.8)],
        [queued("recv", 6.4, peer=0), queued("send", 3.6, peer=2), op(**opening, issued=3.5)],
        [queued("recv", 3.4, peer=1), queued("send", 0.3, peer=3), op(**opening, issued=0.2)],
        [queued("recv", 0.2, peer=2), op(**opening, issued=0.1)],
    )
    assert kind(*ranks) == "running"
    assert kind(*ranks, later_s=59) == "running"
    verdict = check_job(job(*ranks, later_s=60))
    assert (verdict.kind, verdict.findings[0].code) == ("unfinished", "PP935")
    assert "all_reduce #0" in verdict.findings[0].message


def test_an_operation_that_all_ranks_have_just_issued_is_not_unfinished_because_another_rank_waits():
    """Rank 3 has waited for long while the communicator of ranks 1 and 2 was made; now their message is on its way."""
    ranks = (
        [done("send", 9, peer=1), op("all_reduce", OpState.ISSUED, 2.8)],
        [done("recv", 9, peer=0), queued("send", 0.1, peer=2), op("all_reduce", OpState.ISSUED, 0.0)],
        [queued("recv", 0.0, peer=1)],
        [op("recv", OpState.ISSUED, 8.8, peer=2)],
    )
    assert kind(*ranks) == "running"
    assert kind(*ranks, later_s=59.9) == "running"
    assert kind(*ranks, later_s=60.1) == "unfinished"


@pytest.mark.parametrize("state", [OpState.ISSUED, OpState.QUEUED])
def test_a_message_with_both_ends_may_be_slow(state):
    """A connection is made, or the network is slow; four ranks of one GPU need seconds for 1 GiB."""
    ranks = ([queued("send", 7, peer=1)], [op("recv", state, 9, peer=0, waited=9)])
    assert kind(*ranks) == "running"
    assert kind(*ranks, later_s=52) == "running"
    assert kind(*ranks, later_s=53) == "unfinished"


def test_connections_cannot_be_made_while_a_host_is_elsewhere():
    """Two groups are used first in different orders: neither communicator gets its members."""
    first, second = {"name": "all_reduce", "ranks": (0, 1)}, {"name": "barrier", "ranks": (1, 0)}
    ranks = ([op(**first, state=OpState.ISSUED, issued=4)], [op(**second, state=OpState.ISSUED, issued=4)])
    assert kind(*ranks) == "running"
    assert kind(*ranks, later_s=1.1) == "cycle"


@pytest.mark.parametrize("fresh", [0, 1, 2])
def test_a_cycle_needs_patience_with_each_of_its_operations(fresh):
    """Also if another rank has waited for long in an operation that waits for the cycle."""
    ages = [6 if rank != fresh else 1 for rank in range(3)]
    ring = [[waited("recv", age, peer=(rank + 1) % 3)] for rank, age in enumerate(ages)]
    waiting = [waited("recv", 9, peer=0)]
    assert kind(*ring, waiting) == "running"
    assert kind(*ring, waiting, later_s=4.5) == "cycle"


def test_a_host_that_issues_is_no_part_of_a_cycle():
    """The device of rank 0 waits for rank 1, whose host waits for an operation that the host of rank 0 may issue."""
    active = [queued("all_reduce", 8), op("send", OpState.LAUNCHED, 0.1, peer=2, backend="gloo")]
    ranks = (active, [waited("barrier", 8)], [waited("barrier", 8)], [waited("barrier", 8)])
    assert kind(*ranks) == "running"
    assert kind(*ranks, later_s=5) == "cycle"


def test_a_device_that_finishes_operations_is_no_part_of_a_cycle():
    crossed = ([queued("send", 9, peer=1), queued("recv", 8.9, peer=1)],
               [queued("send", 9, peer=0), queued("recv", 8.9, peer=0)])  # fmt: skip
    assert kind(*crossed) == "cycle"
    progress = op("all_gather", OpState.DONE, 10, waited=10, done=0.5)
    assert kind([progress, *crossed[0]], [progress, *crossed[1]]) == "running"
    assert kind([progress, *crossed[0]], [progress, *crossed[1]], later_s=5) == "cycle"


def test_a_device_is_known_until_the_last_heartbeat():
    """A computation that keeps Python's lock keeps the heartbeat from noting what the device has finished."""
    ranks = ([queued("send", 60, peer=1)], [queued("recv", 60, peer=0)])
    assert kind(*ranks) == "unfinished"
    assert kind(*ranks, heartbeats=[(0, 5), (1, 5)]) == "running"
    assert kind(*ranks, later_s=60, heartbeats=[(0, 60), (1, 60)]) == "unfinished"


def test_a_full_queue_of_launches_blocks_the_host_behind_the_device():
    """The hosts are in later calls, and their devices in messages that cross."""
    members = {"ranks": (0, 1)}
    ranks = [
        [
            done("all_reduce", 20, **members),
            queued("send", 9, peer=1 - rank, **members),
            queued("recv", 8.9, peer=1 - rank, **members),
            op("all_reduce", OpState.ISSUED, 6, number=1, **members),
        ]
        for rank in (0, 1)
    ]
    verdict = check_job(job(*ranks))
    assert (verdict.kind, verdict.causes) == ("cycle", (0, 1))
    assert "send" in verdict.findings[0].message


def test_a_batch_waits_for_all_of_its_messages():
    """The device is in a batch whose first message has both ends, and whose second one does not."""
    first = [queued("send", 9, peer=1, batch=0), queued("recv", 9, peer=1, batch=0)]
    half = [queued("recv", 9, peer=0, batch=0), done("all_reduce", 8)]
    assert kind(first, half, later_s=50) == "running"
    assert kind(first, half, later_s=52) == "unfinished"
    computing = [done("recv", 9, peer=0, batch=0)]
    assert kind(first, computing, busy=frozenset({1})) == "slow"
    assert kind(first, computing) == "absent"


def test_a_rank_that_has_just_left_an_operation_is_not_absent():
    """Rank 2 has waited long, but not for rank 0, which has left rank 1 for a moment."""
    ranks = (
        [done("send", 0.1, peer=1, backend="gloo")],
        [done("recv", 0.1, peer=0, backend="gloo"), waited("recv", 0.1, peer=0, number=1)],
        [waited("recv", 9, peer=1)],
    )
    assert kind(*ranks) == "running"
    assert kind(*ranks, later_s=4.8) == "running"
    assert kind(*ranks, later_s=5) == "absent"


def test_a_mismatch_of_messages_needs_patience_and_that_of_collectives_none():
    ranks = (
        [done("all_reduce", 9, backend="gloo"), waited("send", 1, peer=1)],
        [done("all_reduce", 9, backend="gloo"), replace(waited("recv", 1, peer=0), num_inputs=0, num_outputs=5)],
        [done("all_reduce", 9, backend="gloo"), waited("recv", 8, peer=0)],
    )
    assert kind(*ranks) == "running"
    assert kind(*ranks, later_s=4.5) == "mismatch"
    ranks = [[done("all_reduce", 9), op(name, OpState.ISSUED, 0.1, number=1)] for name in ("all_reduce", "all_gather")]
    assert kind(*ranks) == "error"


def test_sends_to_each_other_at_which_the_devices_fault_are_a_cycle_and_not_the_error_of_one():
    ranks = [[done("all_reduce", 9, ranks=(0, 1)), queued("send", 2, peer=1 - rank, ranks=(0, 1))] for rank in range(2)]
    raised = {"states": [(0, ProcessState.RAISED), (1, ProcessState.RAISED)], "heartbeats": [(0, 1.5), (1, 1.5)]}
    verdict = check_job(job(*ranks, **raised))
    assert (verdict.kind, verdict.causes) == ("cycle", (0, 1))
    assert [finding.code for finding in verdict.findings] == ["PP931", "PP953", "PP953"]
    assert kind(ranks[0], [ranks[1][0]], states=[(0, ProcessState.RAISED)], heartbeats=[(0, 1.5)]) == "raised"


def test_a_rank_that_waits_on_its_device_for_one_that_has_ended():
    """NCCL lets a collective pass that the other rank lacks: the last one of this rank has no partner."""
    calls = [done("all_reduce", 30 - number, number=number, ranks=(0, 1)) for number in range(20)]
    waits = [*calls, queued("all_reduce", 9, number=20, ranks=(0, 1))]
    for last in (done, queued):  # the heartbeat of a rank that ends may have missed the last end
        other = [*calls, last("all_reduce", 9, number=20, ranks=(0, 1))]
        ended = {"states": [(1, ProcessState.ENDED)], "heartbeats": [(1, 8.9)]}
        assert kind(waits, other, **ended) == "ended"
        assert kind(waits, other, **ended, later_s=-5) == "running"


@pytest.mark.parametrize("state", [ProcessState.STOPPED, ProcessState.SILENT])
def test_a_process_that_stops_for_a_moment_is_no_hang(state):
    """A process that py-spy reads, or whose heartbeat comes late over a file server, while another rank waits."""
    ranks = ([waited("recv", 9, peer=1)], [done("all_reduce", 9, backend="gloo", ranks=(1, 2))])
    assert kind(*ranks, states=[(1, state)], heartbeats=[(1, 3.5)], busy=frozenset({1})) == "running"
    assert kind(*ranks, states=[(1, state)], heartbeats=[(1, 5.5)], busy=frozenset({1})) == "stopped"


def test_a_heartbeat_that_stops_while_a_communicator_is_made_is_awaited():
    ranks = ([op("all_reduce", OpState.ISSUED, 9, ranks=(0, 1))], [op("all_reduce", OpState.ISSUED, 9, ranks=(0, 1))])
    silent = {"states": [(1, ProcessState.SILENT)], "heartbeats": [(1, 8)]}
    assert kind(*ranks, **silent) == "running"
    assert kind(*ranks, **silent, later_s=60) == "unfinished"


def test_a_hang_is_reported_although_another_rank_is_slow():
    crossed = [[waited("recv", 6, peer=1)], [waited("recv", 6, peer=0)]]
    slow = [[waited("recv", 9, peer=3)], [done("all_reduce", 10)]]
    assert kind(*crossed, *slow, busy=frozenset({3})) == "cycle"
