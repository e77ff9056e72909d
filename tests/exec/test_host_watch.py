"""The cause of a stop, by the positions of all hosts."""

import pytest

from pipeproof.exec.launch.host_watch import cause_of
from pipeproof.exec.launch.hosts import Host
from pipeproof.exec.launch.watchdog import JobState, RankState
from pipeproof.exec.rank.failures import Failure
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.subject import make_subject
from tests.plans import plan_dict

HOSTS = (Host("a", (0, 1)), Host("b", (2, 3)))
SUBJECT = make_subject(plan_from_dict(plan_dict(topology={"pp": 4}, model={"num_layers": 4})))


def at(op, reason="stop", **changes):
    """Position of the rank that has an operation of step 0."""
    op_id = next(i for i, each in enumerate(SUBJECT.graph.ops) if str(each) == op)
    state = RankState("running", 0, op_id, heard_s=1.0, threads=1, **changes)
    return int(SUBJECT.graph.rank[op_id]), {"reason": reason, "state": state.content(0)}


WAITING = dict([at("0F3"), at("WAIT(1RECV_F1)"), at("WAIT(2RECV_F0)"), at("WAIT(3RECV_F0)")])


def cause(silent=(), **reasons):
    """Finding where ranks ``r0`` to ``r3`` have another reason, and the others only stop."""
    positions = {rank: dict(position) for rank, position in WAITING.items()}
    for name, reason in reasons.items():
        positions[int(name[1:])]["reason"] = reason
    return cause_of(JobState(SUBJECT), positions, silent, HOSTS, 8.0)


def raised(rank, at_ns):
    """Position of a rank that raised."""
    op = ("0F3", "WAIT(1RECV_F1)", "WAIT(2RECV_F0)", "WAIT(3RECV_F0)")[rank]
    return at(op, "raised", failure=Failure(f"error of rank {rank}", at_ns))


def test_a_hang_is_traced_to_the_rank_for_which_the_others_wait():
    finding = cause(r2="hang", r3="hang")
    assert finding.code == "PP903"
    assert finding.message.startswith("rank 0 (pp 0) hangs: no rank has made progress for 8 s")


@pytest.mark.parametrize(
    ("reasons", "code", "text"),
    [
        ({"r1": "stopped", "r0": "hang"}, "PP903", "rank 1 (pp 1) hangs"),
        ({"r1": "stopped", "r2": "launcher"}, "PP902", "the launcher on b (ranks 2 to 3) has ended before its ranks"),
        ({"r3": "ended", "r2": "launcher"}, "PP902", "rank 3 (pp 3) ended without a report"),
        ({"r2": "terminated"}, "PP902", "rank 2 (pp 2) was ended by a signal from outside"),
        ({"r2": "terminated", "r3": "ended"}, "PP902", "rank 3 (pp 3) ended without a report"),
        ({"r2": "terminated", "r1": "stopped"}, "PP903", "rank 1 (pp 1) hangs"),
    ],
)
def test_the_cause_and_not_its_consequence_is_named(reasons, code, text):
    finding = cause(**reasons)
    assert finding.code == code
    assert text in finding.message


def test_the_earliest_error_is_named_since_peers_fail_because_of_it():
    positions = {**WAITING, **dict([raised(1, 2_000), raised(2, 1_000), raised(3, 3_000)])}
    finding = cause_of(JobState(SUBJECT), positions, (), HOSTS, 8.0)
    assert finding.message.startswith("rank 2 (pp 2) raised: error of rank 2, at WAIT(2RECV_F0) of step 0")


def test_an_ended_process_comes_before_the_errors_of_its_peers():
    positions = {**WAITING, **dict([raised(1, 2_000)])}
    positions[3] = {"reason": "ended"}
    finding = cause_of(JobState(SUBJECT), positions, (), HOSTS, 8.0)
    assert finding.message.startswith("rank 3 (pp 3) ended without a report")


def test_a_host_that_does_not_answer_comes_first():
    positions = dict([raised(0, 1), raised(1, 2)])
    finding = cause_of(JobState(SUBJECT), positions, [HOSTS[1]], HOSTS, 8.0)
    assert finding.code == "PP902"
    assert finding.message.startswith("host b (ranks 2 to 3) does not answer")
    assert "meanwhile rank 0 was at 0F3 of step 0" in finding.message


def test_times_of_a_state_are_moved_to_another_clock():
    state = RankState("running", 3, 1, heard_s=5.0, failure=Failure("e", 7))
    moved = RankState.of(state.content(2_000_000_000))
    assert (moved.heard_s, moved.failure.at_ns) == (7.0, 2_000_000_007)
    assert RankState.of(RankState().content(5)).heard_s == 0.0
    with pytest.raises(ValueError, match="phase"):
        RankState.of({"phase": ["a"]})
