"""Changes that end a deadlock: several where they are needed, and forbidden effects."""

import pytest

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.verify.deadlock.suggested_fix import _Search, suggest_fix
from tests.verify.programs import program

EDGE = ChannelModel("directed_edge")


def crossing(first, second):
    """The programs of two ranks that both wait for their sends before they receive."""
    return (
        f"{first}SEND_F1{{peer={second}}} WAIT({first}SEND_F1) {first}RECV_B0{{peer={second}}} WAIT({first}RECV_B0)",
        f"{second}SEND_B0{{peer={first}}} WAIT({second}SEND_B0) {second}RECV_F1{{peer={first}}} WAIT({second}RECV_F1)",
    )


def test_two_deadlocks_take_two_changes():
    text = suggest_fix(program(*crossing(0, 1), *crossing(2, 3)), EDGE)
    changes = text.split("; ")
    assert len(changes) == 2
    assert {change.split(",")[0] in {"on rank 0", "on rank 1"} for change in changes} == {True, False}
    assert {change.split(",")[0] in {"on rank 2", "on rank 3"} for change in changes} == {True, False}


def test_more_deadlocks_than_changes_worth_telling_are_not_fixed():
    six, seven = ([text for k in range(n) for text in crossing(2 * k, 2 * k + 1)] for n in (6, 7))
    assert suggest_fix(program(*six), EDGE).count("; ") == 5
    assert suggest_fix(program(*seven), EDGE) is None


def test_the_search_ends_after_its_share_of_work(monkeypatch):
    """Each try costs as much as the graph has operations; two deadlocks take more than one try."""
    two = program(*crossing(0, 1), *crossing(2, 3))

    def fix_with(work):
        monkeypatch.setattr("pipeproof.verify.deadlock.suggested_fix._MOST_WORK", work)
        return suggest_fix(two, EDGE)

    assert fix_with(two.graph.num_ops - 1) is None
    assert fix_with(two.graph.num_ops) is None
    assert fix_with(100 * two.graph.num_ops) is not None


ONE_QUEUE = ChannelModel("rank")
SEND_FIRST = (
    "0SEND_F1{peer=1 reads=a} 0RECV_B0{peer=1 writes=b} WAIT(0RECV_B0) WAIT(0SEND_F1)",
    "1SEND_B0{peer=0} 1RECV_F1{peer=0} WAIT(1SEND_B0) WAIT(1RECV_F1)",
)

FIXES = {
    "the same change at two places": (
        EDGE,
        (*crossing(0, 1), *crossing(2, 3)),
        "on rank 1, move WAIT(1SEND_B0) behind 1RECV_F1; on rank 3, move WAIT(3SEND_B0) behind 3RECV_F1",
    ),
    "a rank that sends to itself": (
        EDGE,
        ("0SEND_F0{peer=0} WAIT(0SEND_F0) 0RECV_F0{peer=0}",),
        "on rank 0, move WAIT(0SEND_F0) behind 0RECV_F0",
    ),
    "two ranks that both receive first": (
        EDGE,
        (
            "0RECV_B0{peer=1} WAIT(0RECV_B0) 0SEND_F1{peer=1} WAIT(0SEND_F1)",
            "1RECV_F1{peer=0} WAIT(1RECV_F1) 1SEND_B0{peer=0} WAIT(1SEND_B0)",
        ),
        "on rank 0, move WAIT(0RECV_B0) behind 0SEND_F1",
    ),
    "the other rank if the first one computes its sent tensor from the received one": (
        EDGE,
        (
            "0RECV_B0{peer=1 writes=g} WAIT(0RECV_B0) 0F0{reads=g writes=a} 0SEND_F0{peer=1 reads=a} WAIT(0SEND_F0)",
            "1RECV_F0{peer=0} WAIT(1RECV_F0) 1SEND_B0{peer=0} WAIT(1SEND_B0)",
        ),
        "on rank 1, move WAIT(1RECV_F0) behind 1SEND_B0",
    ),
    "a batch where transfers cross": (ONE_QUEUE, SEND_FIRST, "on rank 0, issue 0SEND_F1 and 0RECV_B0 as one batch"),
    "two batches": (
        ONE_QUEUE,
        (*SEND_FIRST, SEND_FIRST[0].replace("peer=1", "peer=3"), SEND_FIRST[1].replace("peer=0", "peer=2")),
        "on rank 0, issue 0SEND_F1 and 0RECV_B0 as one batch; on rank 2, issue 0SEND_F1 and 0RECV_B0 as one batch",
    ),
    "no batch of transfers that share a buffer": (
        ONE_QUEUE,
        (SEND_FIRST[0].replace("writes=b", "writes=a"), SEND_FIRST[1]),
        "on rank 1, issue 1SEND_B0 and 1RECV_F1 as one batch",
    ),
    "a batch apart from one that is there already": (
        ONE_QUEUE,
        (
            "0SEND_F5{peer=1 batch=0} 0RECV_B5{peer=1 batch=0} WAIT(0RECV_B5) 0F5 " + SEND_FIRST[0],
            "1SEND_B5{peer=0 batch=0} 1RECV_F5{peer=0 batch=0} WAIT(1RECV_F5) " + SEND_FIRST[1],
        ),
        "on rank 0, issue 0SEND_F1 and 0RECV_B0 as one batch",
    ),
    "no second batch of a transfer that is in one": (
        ONE_QUEUE,
        (
            "0SEND_F1{peer=1 batch=0} 0SEND_F2{peer=1 batch=0} 0RECV_B0{peer=1}",
            "1SEND_B0{peer=0} 1RECV_F1{peer=0} 1RECV_F2{peer=0}",
        ),
        "on rank 0, issue 0RECV_B0 before 0SEND_F1",
    ),
}


@pytest.mark.parametrize("name", FIXES)
def test_which_change_is_suggested(name):
    model, ranks, text = FIXES[name]
    assert suggest_fix(program(*ranks), model) == text


def test_a_change_that_is_not_proved_is_not_suggested(monkeypatch):
    monkeypatch.setattr(_Search, "_proved", lambda self, graph: False)
    assert suggest_fix(program(*crossing(0, 1)), EDGE) is None


def test_a_change_is_proved_if_nothing_deadlocks_and_messages_match_as_before():
    deadlocked = crossing(0, 1)
    early = deadlocked[1].replace(" 1RECV_F1{peer=0} WAIT(1RECV_F1)", "")
    fixed = "1RECV_F1{peer=0} WAIT(1RECV_F1) " + early
    search = _Search(program(*deadlocked), EDGE)
    assert search._proved(program(deadlocked[0], fixed).graph)
    assert not search._proved(program(*deadlocked).graph)
    assert not search._proved(program(deadlocked[0], fixed.replace("1RECV_F1", "1RECV_F2")).graph)


@pytest.mark.parametrize(("forward", "is_fixed"), [("0F1{reads=g writes=a}", False), ("0F1{reads=x writes=a}", True)])
def test_a_wait_is_not_moved_past_a_reader_of_what_it_waits_for(forward, is_fixed):
    text = suggest_fix(
        program(
            f"0RECV_B0{{peer=1 writes=g}} WAIT(0RECV_B0) {forward} 0SEND_F1{{peer=1 reads=a}}",
            "1RECV_F1{peer=0 writes=y} WAIT(1RECV_F1) 1SEND_B0{peer=0 reads=y}",
        ),
        EDGE,
    )
    assert (text is not None) == is_fixed, text
