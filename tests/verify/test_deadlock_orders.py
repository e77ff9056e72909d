"""Effect of each promise of a channel model: small programs with their verdict, the same in both writings."""

import pytest

from pipeproof.comm.channel_models import QUEUES, ChannelModel
from pipeproof.verify.deadlock.deadlock_verdict import (
    DeadlockChecker,
    Verdict,
    blamed,
    cycle_of,
    deadlocks,
)
from tests.verify.deadlock_definition import done, events_of, stuck_events
from tests.verify.programs import group, program, tensor

ALL = frozenset(QUEUES)

TWO_SENDS_FIRST = (
    "0SEND_F0{peer=1 tensor=0 range=0..5} 0SEND_F1{peer=1 tensor=0 range=0..5} WAIT(0SEND_F1) 0SEND_B0{peer=1}",
    "1RECV_B0{peer=0} WAIT(1RECV_B0) 1RECV_F0{peer=0 tensor=0 range=0..5} 1RECV_F1{peer=0 tensor=0 range=0..5}",
)
"""Two messages of 5 bytes are on their way before the peer takes the first."""

THREE_RANKS = (
    "0SEND_F0{peer=1} 0SEND_F1{peer=2}",
    "1RECV_F2{peer=2} WAIT(1RECV_F2) 1RECV_F0{peer=0}",
    "2RECV_F1{peer=0} WAIT(2RECV_F1) 2SEND_F2{peer=1}",
)
"""Rank 0 sends to rank 1 first, which wants to hear of rank 2 first, which waits for rank 0's second message."""

OPPOSITE = (
    "0BARRIER:tp{group=0 queue=a} 0BARRIER:cp{group=1 queue=b}",
    "0BARRIER:cp{group=1 queue=b} 0BARRIER:tp{group=0 queue=a}",
)

SECOND_CHANNEL_IN_A_BATCH = (
    "0SEND_F0{peer=1} 0SEND_F1{peer=1 batch=0} 0RECV_B0{peer=1 batch=0} 0SEND_F2{peer=1 communicator=x}",
    "1RECV_F0{peer=0} 1RECV_F1{peer=0} 1RECV_F2{peer=0 communicator=x} WAIT(1RECV_F2) 1SEND_B0{peer=0}",
)

CASES = {
    "two sends on a queue of one name, next to transfers without a queue": (
        (THREE_RANKS[0].replace("}", " queue=a}"), *THREE_RANKS[1:]),
        {},
        ALL,
    ),
    "a message on a named queue is held, and with it the next one of its channel": (
        (
            "0SEND_F5{peer=2 queue=a} 0SEND_F0{peer=1 queue=a} 0SEND_F1{peer=1}",
            "1RECV_F0{peer=0 queue=b} 1RECV_F1{peer=0} WAIT(1RECV_F1) 1SEND_F2{peer=2}",
            "2RECV_F2{peer=1} WAIT(2RECV_F2) 2RECV_F5{peer=0}",
        ),
        {},
        ALL,
    ),
    "the same where every transfer is on a named queue": (
        (
            "0SEND_F5{peer=2 queue=a} 0SEND_F0{peer=1 queue=a} 0SEND_F1{peer=1 queue=c}",
            "1RECV_F0{peer=0 queue=b} 1RECV_F1{peer=0 queue=c} WAIT(1RECV_F1){queue=host} 1SEND_F2{peer=2 queue=c}",
            "2RECV_F2{peer=1 queue=c} WAIT(2RECV_F2){queue=host} 2RECV_F5{peer=0 queue=a}",
        ),
        {},
        ALL,
    ),
    "each host waits before it issues the send that the other waits for": (
        (
            "0RECV_F0{peer=1} WAIT(0RECV_F0){queue=host} 0SEND_B0{peer=1 queue=side}",
            "1RECV_B0{peer=0} WAIT(1RECV_B0){queue=host} 1SEND_F0{peer=0 queue=side}",
        ),
        {},
        ALL,
    ),
    "each compute queue waits, which holds nothing of a side queue": (
        (
            "0RECV_F0{peer=1 queue=in} WAIT(0RECV_F0) 0SEND_B0{peer=1 queue=side}",
            "1RECV_B0{peer=0 queue=in} WAIT(1RECV_B0) 1SEND_F0{peer=0 queue=side}",
        ),
        {},
        {"device"},
    ),
    "a group call that is closed behind a later message of its channel": (
        (
            "0SEND_F0{peer=1 batch=0} 0SEND_F1{peer=1} 0SEND_F2{peer=1 batch=0}",
            "1RECV_F0{peer=0} 1RECV_F1{peer=0} 1RECV_F2{peer=0}",
        ),
        {},
        ALL,
    ),
    "a group call of receives that is closed behind a later message of its channel": (
        (
            "0SEND_F0{peer=1 batch=0} 0SEND_F1{peer=1 batch=0} 0SEND_F2{peer=1 batch=0}",
            "1RECV_F0{peer=0 batch=0} 1RECV_F1{peer=0} 1RECV_F2{peer=0 batch=0}",
        ),
        {},
        ALL,
    ),
    "a group call that a transfer of another channel closes behind a later message": (
        (
            "0SEND_F0{peer=1 batch=0} 0SEND_F1{peer=1} 0RECV_B0{peer=1 batch=0}",
            "1RECV_F0{peer=0} 1RECV_F1{peer=0} 1SEND_B0{peer=0}",
        ),
        {"completes": "eager"},
        ALL,
    ),
    "a group call that is closed behind a message of another channel": (
        (
            "0SEND_F0{peer=1 batch=0} 0SEND_F1{peer=1 communicator=x} 0RECV_B0{peer=1 batch=0}",
            "1RECV_F0{peer=0 batch=0} 1RECV_F1{peer=0 communicator=x} 1SEND_B0{peer=0 batch=0}",
        ),
        {},
        frozenset(),
    ),
    "a group call in the order of its channel": (
        (
            "0SEND_F0{peer=1 batch=0} 0SEND_F1{peer=1 batch=0} 0SEND_F2{peer=1}",
            "1RECV_F0{peer=0} 1RECV_F1{peer=0} 1RECV_F2{peer=0}",
        ),
        {},
        frozenset(),
    ),
    "a group call is over when all of it is": (
        (
            "0SEND_F0{peer=1 batch=0} 0RECV_B0{peer=1 batch=0} WAIT(0SEND_F0) 0SEND_F1{peer=1}",
            "1RECV_F0{peer=0} 1RECV_F1{peer=0} WAIT(1RECV_F1) 1SEND_B0{peer=0}",
        ),
        {},
        ALL,
    ),
    "two sends to two ranks on one communicator": (THREE_RANKS, {}, {"device", "rank", "direction", "communicator"}),
    "two sends to two ranks on a communicator each": (
        tuple(text.replace("F1{", "F1{communicator=x ") for text in THREE_RANKS),
        {},
        {"device", "rank", "direction"},
    ),
    "two ranks that both send first, on one communicator": (
        ("0SEND_F0{peer=1} 0RECV_F1{peer=1}", "1SEND_F1{peer=0} 1RECV_F0{peer=0}"),
        {},
        {"device", "rank", "communicator", "pair"},
    ),
    "two ranks that both send first, each way on a communicator of its own": (
        ("0SEND_F0{peer=1} 0RECV_B0{peer=1}", "1SEND_B0{peer=0} 1RECV_F0{peer=0}"),
        {},
        {"device", "rank", "pair"},
    ),
    "collectives in opposite orders on queues of their own": (OPPOSITE, {}, {"device"}),
    "collectives in opposite orders on one queue": (
        tuple(text.replace("queue=a", "queue=b") for text in OPPOSITE),
        {},
        ALL,
    ),
    "collectives in opposite orders whose groups open at first use": (OPPOSITE, {"connections": "lazy"}, ALL),
    "two sends ahead with one slot": (TWO_SENDS_FIRST, {"completes": "slots", "slots": 1}, ALL),
    "two sends ahead with two slots": (
        TWO_SENDS_FIRST,
        {"completes": "slots", "slots": 2},
        frozenset(),
    ),
    "two sends ahead with room for one and a half": (TWO_SENDS_FIRST, {"completes": "eager", "eager_bytes": 9}, ALL),
    "two sends ahead with room for both": (TWO_SENDS_FIRST, {"completes": "eager", "eager_bytes": 10}, frozenset()),
    "two sends ahead with room for all": (TWO_SENDS_FIRST, {"completes": "eager"}, frozenset()),
    "a first use within a group call": (SECOND_CHANNEL_IN_A_BATCH, {"connections": "lazy"}, ALL),
    "the same with open connections": (SECOND_CHANNEL_IN_A_BATCH, {}, {"device", "rank", "direction", "pair"}),
    "receives before sends whose posts hold the host": (
        ("0RECV_B0{peer=1} 0SEND_F0{peer=1}", "1RECV_F0{peer=0} 1SEND_B0{peer=0}"),
        {"host_blocks": True},
        ALL,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_which_models_a_small_program_deadlocks_under(name):
    ranks, changes, expected = CASES[name]
    graph = program(*ranks, tensors=[tensor(dtype="int8")], groups=[group("tp", 0, 1), group("cp", 0, 1)]).graph
    for queue in QUEUES:
        model = ChannelModel(queue, **changes)
        events = events_of(graph, model)
        assert not events.never
        assert bool(stuck_events(events)) == deadlocks(graph, model) == (queue in expected), queue


@pytest.mark.parametrize(
    ("ranks", "opened"),
    [
        (("0SEND_F0{peer=1} 0F0", "1F0"), False),
        (("0SEND_F0{peer=1} 0F0", "1F0 1RECV_F0{peer=0}"), True),
        (("0BARRIER:tp{group=0 queue=side} 0F0", "1F0"), False),
        (("0BARRIER:tp{group=0 queue=side} 0F0", "1F0 0BARRIER:tp{group=0}"), True),
    ],
)
def test_a_connection_that_one_side_never_uses_is_never_opened_and_holds_the_other(ranks, opened):
    graph = program(*ranks, groups=[group("tp", 0, 1)]).graph
    compute = done(graph.rank_ops(0)[1])
    for connections, happens in (("lazy", opened), ("warm", True)):
        model = ChannelModel("directed_edge", "eager", connections=connections)
        assert (compute not in stuck_events(events_of(graph, model))) == happens


CROSSING = (
    "0SEND_F1{peer=1} WAIT(0SEND_F1) 0RECV_B0{peer=1} WAIT(0RECV_B0)",
    "1SEND_B0{peer=0} WAIT(1SEND_B0) 1RECV_F1{peer=0} WAIT(1RECV_F1)",
)
EARLY = (
    "0RECV_B0{peer=1} 0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) WAIT(0RECV_B0) 0B0",
    "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{peer=0} WAIT(1SEND_B0)",
)


@pytest.mark.parametrize(
    ("ranks", "queue", "connections", "shown", "fault"),
    [
        (CROSSING, "directed_edge", "warm", ("directed_edge", "warm"), "queue"),
        (CROSSING, "directed_edge", "lazy", ("directed_edge", "warm"), "queue"),
        (CROSSING, "device", "warm", ("device", "warm"), "queue"),
        (CROSSING, "device", "lazy", ("device", "warm"), "queue"),
        (EARLY, "directed_edge", "lazy", ("directed_edge", "lazy"), "connections"),
        (OPPOSITE, "device", "warm", ("device", "warm"), "device"),
        (OPPOSITE, "device", "lazy", ("device", "warm"), "device"),
    ],
)
def test_a_promise_is_blamed_only_where_the_deadlock_goes_without_it(ranks, queue, connections, shown, fault):
    graph = program(*ranks, groups=[group("tp", 0, 1), group("cp", 0, 1)]).graph
    model = ChannelModel(queue, connections=connections)
    assert deadlocks(graph, model)
    assert blamed(graph, model) == (ChannelModel(shown[0], connections=shown[1]), fault)


def test_collectives_of_an_unknown_group_do_not_meet():
    graph = program(
        "0ALL_REDUCE0:tp 0SEND_F0{peer=1} WAIT(0SEND_F0)", "1RECV_F0{peer=0} WAIT(1RECV_F0) 1ALL_REDUCE0:tp"
    ).graph
    assert not deadlocks(graph, ChannelModel("device"))


def test_receives_without_a_send_do_not_wait_for_each_other():
    """The wait never ends, but without a cycle; another rule reports it."""
    graph = program("0RECV_B0{peer=1} WAIT(0RECV_B0) 0RECV_B1{peer=1}", "").graph
    assert not deadlocks(graph, ChannelModel("directed_edge"))
    assert done(0) in stuck_events(events_of(graph, ChannelModel("directed_edge")))


def test_a_buffered_send_without_a_receive_waits_for_nothing():
    graph = program("0SEND_F0{peer=1}", "").graph
    eager = ChannelModel("directed_edge", "eager")
    assert not deadlocks(graph, eager)
    assert stuck_events(events_of(graph, eager)) == []


# --- the beginning of a large graph ---


# --- the shortest cycle ---


def test_a_cycle_far_behind_is_found_where_a_rank_has_no_program(monkeypatch):
    monkeypatch.setattr("pipeproof.verify.deadlock.deadlock_verdict._SEARCHED_WHOLE", 100)
    computes = " ".join(f"0F{k}" for k in range(400))
    graph = program(
        f"{computes} 0RECV_B0{{peer=1}} WAIT(0RECV_B0) 0SEND_F0{{peer=1}}",
        f"{computes} 1RECV_F0{{peer=0}} WAIT(1RECV_F0) 1SEND_B0{{peer=0}}",
        "",
    ).graph
    assert {int(graph.rank[op_id]) for op_id in cycle_of(graph, ChannelModel("directed_edge"))} == {0, 1}


def test_a_large_graph_whose_first_rows_have_no_waits_is_safe(monkeypatch):
    monkeypatch.setattr("pipeproof.verify.deadlock.deadlock_verdict._SEARCHED_WHOLE", 10)
    computes = " ".join(f"0F{k}" for k in range(40))
    graph = program(f"{computes} 0SEND_F0{{peer=1}}", f"{computes} 1RECV_F0{{peer=0}}").graph
    assert not deadlocks(graph, ChannelModel("directed_edge"))


RECEIVE_FIRST = (
    "0RECV_B0{peer=1} WAIT(0RECV_B0) 0SEND_F0{peer=1}",
    "1RECV_F0{peer=0} WAIT(1RECV_F0) 1SEND_B0{peer=0}",
)


@pytest.mark.parametrize("searched_whole", [1, 100])
@pytest.mark.parametrize(
    "declared", [ChannelModel("directed_edge"), ChannelModel("directed_edge", "eager", eager_bytes=2**20)]
)
def test_what_deadlocks_under_every_model_deadlocks_as_declared(monkeypatch, declared, searched_whole):
    """In a large graph as in a small one; no buffer helps two ranks that both receive first."""
    monkeypatch.setattr("pipeproof.verify.deadlock.deadlock_verdict._SEARCHED_WHOLE", searched_whole)
    monkeypatch.setattr("pipeproof.verify.deadlock.deadlock_verdict._PART", 1)
    assert DeadlockChecker(program(*RECEIVE_FIRST).graph).verdict(declared) == Verdict(declared=True, failing=())


def test_a_model_that_no_other_one_covers_is_checked_itself():
    """Connections that are opened at first use hold more than any model of the table, but not here."""
    graph = program("0SEND_F0{peer=1}", "1RECV_F0{peer=0}").graph
    lazy = ChannelModel("directed_edge", connections="lazy")
    assert DeadlockChecker(graph).verdict(lazy) == Verdict(declared=False, failing=())


def test_of_a_large_graph_the_beginning_is_shown_and_not_a_shorter_cycle_far_behind_it(monkeypatch):
    size, filler = 3, 400
    begin = [
        f"{r}SEND_F0{{peer={(r + 1) % size}}} WAIT({r}SEND_F0) {r}RECV_F0{{peer={(r - 1) % size}}} WAIT({r}RECV_F0) "
        + " ".join(f"{r}F{k}" for k in range(1, filler))
        for r in range(size)
    ]
    begin[0] += f" 0SEND_F{filler}{{peer=1}} WAIT(0SEND_F{filler}) 0RECV_B0{{peer=1}} WAIT(0RECV_B0)"
    begin[1] += f" 1SEND_B0{{peer=0}} WAIT(1SEND_B0) 1RECV_F{filler}{{peer=0}} WAIT(1RECV_F{filler})"
    graph = program(*begin).graph
    model = ChannelModel("directed_edge")
    assert {int(graph.rank[op_id]) for op_id in cycle_of(graph, model)} == {0, 1}
    monkeypatch.setattr("pipeproof.verify.deadlock.deadlock_verdict._SEARCHED_WHOLE", 100)
    assert {int(graph.rank[op_id]) for op_id in cycle_of(graph, model)} == {0, 1, 2}
