"""Changes that end a deadlock: where several are needed, and what none of them may do."""

import pytest

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.verify.deadlock.deadlock_rules import CYCLE, RULES
from pipeproof.verify.deadlock.suggested_fix import _Draft, _Move, _Search, suggest_fix
from tests.verify.programs import group, program

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


def test_a_change_is_looked_for_up_to_a_size_and_at_that_size(monkeypatch):
    one = program(*crossing(0, 1))
    (rule,) = [rule for rule in RULES if rule.doc is CYCLE]

    def help_where_largest_is(size):
        monkeypatch.setattr("pipeproof.verify.deadlock.suggested_fix.LARGEST", size)
        (finding,) = rule.check(one)
        return finding.help

    assert "proved not to deadlock" in help_where_largest_is(one.graph.num_ops)
    assert suggest_fix(one, EDGE) is not None
    assert "check the plan with fewer micro-batches" in help_where_largest_is(one.graph.num_ops - 1)
    assert suggest_fix(one, EDGE) is None


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
    "the other rank if the first one computes what it sends from what it receives": (
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


NEIGHBOURS = {
    "two sends of a channel": ("0SEND_F0{peer=1} 0SEND_F1{peer=1}", False),
    "two receives of a channel": ("0RECV_F0{peer=1} 0RECV_F1{peer=1}", False),
    "sends on two channels": ("0SEND_F0{peer=1} 0SEND_F1{peer=1 communicator=x}", True),
    "a send and a receive": ("0SEND_F0{peer=1} 0RECV_B0{peer=1}", True),
    "both ends of a channel to oneself": ("0SEND_F0{peer=0} 0RECV_F0{peer=0}", True),
    "two calls of a group": ("0BARRIER:tp{group=0} 1BARRIER:tp{group=0}", False),
    "calls of two groups": ("0BARRIER:tp{group=0} 1BARRIER:cp{group=1}", True),
    "a receive and its wait": ("0RECV_F0{peer=1} WAIT(0RECV_F0)", False),
    "the wait for another receive": ("0RECV_F0{peer=1 queue=a} WAIT(0RECV_F1)", True),
    "a wait and the work on that micro-batch": ("WAIT(0RECV_F0) 0F0", False),
    "a wait and the work on another micro-batch": ("WAIT(0RECV_F0) 0F1", True),
    "a receive and the work on that micro-batch": ("0RECV_F0{peer=1} 0F0", False),
    "a receive and the work on another micro-batch": ("0RECV_F0{peer=1} 0F1", True),
    "a send and a step": ("0SEND_F0{peer=1} 0STEP", False),
    "a send and the reduction of gradients": ("0SEND_F0{peer=1} 0REDUCE_GRAD", False),
    "a receive into what a send reads": ("0SEND_F0{peer=1 reads=a} 0RECV_B0{peer=1 writes=a}", False),
    "a receive next to what a send reads": ("0SEND_F0{peer=1 reads=a} 0RECV_B0{peer=1 writes=b}", True),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_what_may_pass_what(name):
    text, may_pass = NEIGHBOURS[name]
    graph = program(text, "", groups=[group("tp", 0, 1), group("cp", 0, 1)]).graph
    rows = [row for rows in graph.rows() for row in rows]
    draft = _Draft(((0, 1), ()), {})
    for moved, anchor in ((0, 1), (1, 0)):
        after = _Move(graph, rows, moved, anchor).past(draft, everywhere=False)
        assert (after is not None) == may_pass
        assert after is None or after.programs == ((1, 0), ())


def test_a_change_carries_one_operation_next_to_another_on_either_side():
    graph = program("0SEND_F0{peer=1} 0F4 0F5 0RECV_B0{peer=1} 0F6", "").graph
    rows = [row for rows in graph.rows() for row in rows]
    draft = _Draft(((0, 1, 2, 3, 4), ()), {})
    assert _Move(graph, rows, 0, 3).past(draft, everywhere=False).programs[0] == (1, 2, 3, 0, 4)
    assert _Move(graph, rows, 0, 3).up_to(draft).programs[0] == (1, 2, 0, 3, 4)
    assert _Move(graph, rows, 3, 0).past(draft, everywhere=False).programs[0] == (3, 0, 1, 2, 4)
    assert _Move(graph, rows, 3, 0).up_to(draft).programs[0] == (0, 3, 1, 2, 4)


def test_a_change_everywhere_carries_each_operation_of_a_kind_next_to_the_nearest_of_another():
    """The first receive is before all sends, so it has none to be put before."""
    graph = program(
        "0RECV_B0{peer=1} 0SEND_F0{peer=1} 0F7 0RECV_B1{peer=1} 0SEND_F1{peer=1} 0F8 0RECV_B2{peer=1} 0SEND_F2{peer=1}",
        "",
    ).graph
    rows = [row for rows in graph.rows() for row in rows]
    draft = _Draft((tuple(range(8)), ()), {})
    assert _Move(graph, rows, 3, 1).past(draft, everywhere=True).programs[0] == (0, 3, 1, 2, 6, 4, 5, 7)
    assert _Move(graph, rows, 3, 1).past(draft, everywhere=False).programs[0] == (0, 3, 1, 2, 4, 5, 6, 7)


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
