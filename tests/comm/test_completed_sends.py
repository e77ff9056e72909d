"""A send is freed only where a message of its receiver proves that it has ended, and before the plan waits for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.comm.channel_models import completed_sends
from pipeproof.schedule.op_table import NONE, EdgeKind
from tests.features import schedule_of
from tests.plans import subject

KINDS = ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "looped_bfs", "dualpipe"]


def graph_of(kind, pp=2, num=4):
    schedule = {**schedule_of(kind), "num_micro_batches": num}
    layers = {"model": {"num_layers": 8}}
    return subject(topology={"pp": pp}, schedule=schedule, **layers).unfolded().graph


@given(kind=st.sampled_from(KINDS), pp=st.sampled_from([2, 4]), num=st.sampled_from([8, 12]))
def test_the_receiver_had_waited_before_it_sent_the_message_that_proves_it(kind, pp, num):
    graph = graph_of(kind, pp, num)
    receive_of = dict(graph.edges[EdgeKind.MATCH].tolist())
    send_of = {receive: send for send, receive in receive_of.items()}
    wait_of = {int(graph.waits_for[i]): i for i in range(graph.num_ops) if graph.waits_for[i] != NONE}
    for rank in range(graph.num_ranks):
        for wait, sends in completed_sends(graph, rank).items():
            answer = send_of[int(graph.waits_for[wait])]  # the peer's message, after which the sends are freed
            for send in sends:
                received = wait_of[receive_of[send]]
                assert int(graph.rank[received]) == int(graph.rank[answer])
                assert received < answer  # in the peer's program
                assert wait < wait_of[send]  # the plan waits later


@pytest.mark.parametrize(("kind", "kept"), [("1f1b", 2), ("gpipe", 4)])
def test_how_many_sends_of_gradients_the_plan_still_waits_for(kind, kept):
    graph = graph_of(kind, num=4)
    freed = {send for sends in completed_sends(graph, 1).values() for send in sends}
    late = [i for i in graph.rank_ops(1) if "SEND_B" in str(graph.ops[i]) and not str(graph.ops[i]).startswith("WAIT")]
    assert len(late) - len(freed & set(late)) == kept


def test_a_deadlocked_plan_frees_nothing_that_it_has_not_sent():
    programs = [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]]
    schedule = {"kind": "custom", "num_micro_batches": 2, "programs": programs}
    graph = subject(topology={"pp": 2}, schedule=schedule).unfolded().graph
    for rank in range(2):
        for wait, sends in completed_sends(graph, rank).items():
            assert all(send < wait for send in sends)
