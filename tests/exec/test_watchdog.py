"""Findings on a rank that dies, raises or hangs; events are given by the test, no process is started."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import OpsWitness
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import TRANSFER_KINDS, parse_op
from tests.plans import subject

PP2 = subject()
PP3 = subject(topology={"pp": 3})
TP2 = subject(topology={"pp": 2, "tp": 2})


class Feed:
    """A job's state, its events in order of time."""

    def __init__(self, one, *, ready=True):
        self.graph, self.state, self.now_s = one.graph, JobState(one), 0.0
        for rank in range(one.graph.num_ranks):
            self.tell(rank, "setup", what="joining the world group")
        if ready:
            for rank in range(one.graph.num_ranks):
                self.tell(rank, "ready", threads=1)

    def tell(self, rank, kind, **content):
        self.now_s += 1.0
        self.state.handle(rank, {"kind": kind, **content}, self.now_s)

    def at(self, rank, text, step=0):
        op_id = next(i for i in self.graph.rank_ops(rank) if str(self.graph.ops[i]) == text)
        self.tell(rank, "at", step=step, op=op_id)

    def follow(self, events):
        """Tell events such as ``"1 1F0 2"``: rank 1 has come to 1F0 of step 2."""
        for event in events:
            rank, what, *step = event.split()
            if what == "finished":
                self.tell(int(rank), what)
            else:
                self.at(int(rank), what, *map(int, step))
        return self


def test_the_state_of_a_rank_follows_its_events():
    feed = Feed(PP2, ready=False)
    assert not feed.state.all_ready
    feed.tell(0, "ready", threads=1)
    feed.tell(1, "ready", threads=2)
    assert feed.state.all_ready
    assert feed.state.threads == 2
    feed.tell(0, "step", step=0)
    assert [rank.steps_done for rank in feed.state.ranks] == [1, 0]
    feed.tell(0, "finished")
    assert not feed.state.all_finished
    feed.tell(1, "finished")
    assert feed.state.all_finished
    assert feed.state.last_heard_s == feed.now_s == 7.0


# --- deaths ---


def test_death_names_rank_operation_peer_and_what_the_graph_expected():
    feed = Feed(PP2)
    feed.at(0, "WAIT(0RECV_B0)")
    feed.at(1, "1F0", step=0)
    found = feed.state.died(1, "was killed by SIGKILL")
    assert found.code == "PP902"
    position, expectation, work, others = found.message.split("; ")
    assert position == "rank 1 (pp 1) was killed by SIGKILL, at 1F0 of step 0"
    assert re.search(r"1SEND_B0, .* rank 0 .* 0RECV_B0$", expectation)
    assert re.search(r"micro-batch 0 on stage 1, .* 1RECV_F0 brought from rank 0$", work)
    assert others == "meanwhile rank 0 running at WAIT(0RECV_B0)"
    assert isinstance(found.witness, OpsWitness)
    assert [(op.rank, op.op) for op in found.witness.ops] == [(1, "1F0"), (0, "WAIT(0RECV_B0)")]
    assert "--logs" in found.help


def test_raise_carries_the_message():
    feed = Feed(PP2)
    feed.at(0, "0B1", step=3)
    feed.tell(0, "error", message="ValueError: no such thing", at_ns=5)
    found = feed.state.died(0, "raised")
    assert "rank 0 (pp 0) raised: ValueError: no such thing, at 0B1 of step 3" in found.message
    assert feed.state.ranks[0].failure.at_ns == 5


DEATHS = {
    "at a wait: its peer and its counterpart": (
        PP2, ["1 WAIT(1RECV_F2)"], 1, ["the graph expects its peer rank 0 to issue 0SEND_F2"],
    ),
    "in a collective: its members": (
        TP2, ["3 1F0/0.ALL_REDUCE:tp"], 3,
        ["rank 3 (pp 1, tp 1) raised", "the graph expects ranks [2, 3] to join this tp collective"],
    ),
    "after the last transfer": (
        PP2, ["0 0STEP 1"], 0, ["the graph expects no more transfers of this rank in this step"],
    ),
    "after others have finished": (PP2, ["0 0STEP 1", "0 finished"], 1, ["meanwhile rank 0 finished at 0STEP"]),
}  # fmt: skip
"""Progress of ranks, one after the other: the operation that a rank has reached, and its step."""


@pytest.mark.parametrize("name", DEATHS)
def test_death_names_what_the_graph_expects(name):
    one, events, rank, texts = DEATHS[name]
    message = Feed(one).follow(events).state.died(rank, "raised").message
    assert all(text in message for text in texts), message


def test_death_during_set_up_names_what_was_set_up():
    feed = Feed(PP2, ready=False)
    feed.tell(1, "setup", what="connecting forward 0->1")
    found = feed.state.died(1, "ended with status 1")
    assert found.message == (
        "rank 1 (pp 1) ended with status 1, while connecting forward 0->1; meanwhile rank 0 joining the world group"
    )
    assert found.witness is None


def test_death_before_anything_was_heard():
    state = JobState(PP2)
    message = state.died(0, "ended with status 1").message
    assert message.startswith("rank 0 (pp 0) ended with status 1, while starting; ")
    assert "nothing is known here" in message


def test_death_of_the_only_rank():
    state = JobState(subject(topology={"pp": 1}))
    assert state.died(0, "raised").message == "rank 0 raised, while starting; it was the only rank"


# --- hangs ---


def blamed(feed, **stopped):
    found = feed.state.hung(60.0, **stopped)
    assert found.code == "PP903"
    assert "hangs: no rank has made progress for 60 s" in found.message
    assert "--timeout" in found.help
    return found.message


HANGS = {
    "compute, through a chain of waits": (
        PP3, ["0 WAIT(0RECV_B0)", "1 WAIT(1RECV_B0)", "2 2F0"], "rank 2 (pp 2)",
        [
            r"it is at 2F0 of step 0; the graph expects it to \D*2SEND_B0",
            r"meanwhile rank 0 running at WAIT\(0RECV_B0\), rank 1 running at WAIT\(1RECV_B0\)",
        ],
    ),
    "the first stage starves the others": (PP3, ["2 WAIT(2RECV_F1)", "1 WAIT(1RECV_F1)", "0 0F1"], "rank 0 (pp 0)", []),
    "a later step of a slow one": (PP2, ["0 0STEP", "1 WAIT(1RECV_F0) 1"], "rank 0 (pp 0)", ["at 0STEP of step 0"]),
    "who never came to the collective": (
        TP2,
        [
            "0 0F0/1.ALL_REDUCE:tp", "1 0F0/0.ALL_REDUCE:tp", "1 0F0", "2 WAIT(1RECV_F0)", "3 WAIT(1RECV_F0)",
        ],
        "rank 1 (pp 0, tp 1)", [],
    ),
    "a chain over a wait and a collective": (
        TP2, ["0 0F2/0.ALL_REDUCE:tp", "2 WAIT(1RECV_F2)", "3 WAIT(1RECV_F2)", "1 0F2"], "rank 1 (pp 0, tp 1)", [],
    ),
    "a collective that all have joined": (
        TP2,
        ["0 0F0/1.ALL_REDUCE:tp", "1 0F0/1.ALL_REDUCE:tp", "2 WAIT(1RECV_F0)", "3 WAIT(1RECV_F0)"],
        "rank 0 (pp 0, tp 0)",
        [
            r"at 0F0/1.ALL_REDUCE:tp of step 0; the graph expects ranks \[0, 1\] to join this tp collective",
            "rank 1 running at 0F0/1.ALL_REDUCE:tp",
        ],
    ),
    "not a finished rank": (
        PP2, ["0 0STEP 1", "0 finished", "1 1B3 1"], "rank 1 (pp 1)", ["meanwhile rank 0 finished at 0STEP"],
    ),
    "a wait whose transfer both have posted": (  # 0 waits for 1SEND_B0, after rank 1's wait for what 0 has sent
        PP2, ["0 0F1", "1 WAIT(1RECV_F0)", "0 WAIT(0RECV_B0)"], "rank 1 (pp 1)",
        ["the graph expects its peer rank 0 to issue 0SEND_F0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HANGS)
def test_the_rank_for_which_all_wait_is_blamed(name):
    one, events, rank, patterns = HANGS[name]
    message = blamed(Feed(one).follow(events))
    assert message.startswith(f"{rank} hangs")
    assert all(re.search(pattern, message) for pattern in patterns), message


def test_a_stopped_process_is_blamed_even_if_others_wait_for_another_rank():
    message = blamed(Feed(PP3).follow(["0 WAIT(0RECV_B0)", "1 WAIT(1RECV_F0)", "2 2F0"]), stopped=1)
    assert message.startswith("rank 1 (pp 1) hangs")
    assert "its peer rank 0 to issue 0SEND_F0" in message


def test_a_circle_ends_at_one_of_its_ranks():
    """Both wait for their send before they post the receive that the other needs."""

    def move_wait(rows, text):
        wait = rows.pop(next(i for i, row in enumerate(rows) if row.op == parse_op(f"WAIT({text})")))
        rows.insert(next(i for i, row in enumerate(rows) if row.op == parse_op(text)) + 1, wait)

    rows = PP2.graph.rows()
    move_wait(rows[0], "0SEND_F1")
    move_wait(rows[1], "1SEND_B0")
    feed = Feed(PP2.with_graph(build_graph(rows, PP2.graph.tensors, PP2.graph.groups)))
    feed.at(0, "WAIT(0SEND_F1)")
    feed.at(1, "WAIT(1SEND_B0)")
    message = blamed(feed)
    assert (
        "; ranks 0, 1 wait for each other: rank 0 waits in WAIT(0SEND_F1) for rank 1; "
        "rank 1 waits in WAIT(1SEND_B0) for rank 0; meanwhile" in message
    )


def test_an_unmatched_transfer_hangs_its_own_rank():
    rows = PP2.graph.rows()
    rows[1] = [row for row in rows[1] if str(row.op) not in ("1RECV_F3", "WAIT(1RECV_F3)")]
    feed = Feed(PP2.with_graph(build_graph(rows, PP2.graph.tensors, PP2.graph.groups)))
    feed.tell(1, "finished")
    feed.at(0, "WAIT(0SEND_F3)")
    assert blamed(feed).startswith("rank 0 (pp 0) hangs")


# --- hangs during set-up ---


@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_is_a_phase_behind_is_blamed(late):
    feed = Feed(PP3, ready=False)
    for rank in range(3):
        if rank != late:
            feed.tell(rank, "setup", what="connecting forward 0->1")
    message = blamed(feed)
    assert message.startswith(f"rank {late} (pp {late}) hangs")
    assert "it is joining the world group; meanwhile" in message


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_never_got_ready_is_blamed_though_others_run(late):
    feed = Feed(PP3, ready=False)
    for rank in range(3):
        feed.tell(rank, "setup", what="connecting backward 2->1")
    stuck_at = {0: {1: "WAIT(1RECV_F0)", 2: "WAIT(2RECV_F0)"}, 1: {0: "WAIT(0RECV_B0)", 2: "WAIT(2RECV_F0)"}}
    stuck_at[2] = {0: "WAIT(0RECV_B0)", 1: "WAIT(1RECV_B0)"}
    for rank, op in stuck_at[late].items():
        feed.tell(rank, "ready", threads=1)
        feed.at(rank, op)
    assert blamed(feed).startswith(f"rank {late} (pp {late}) hangs")


def test_a_rank_that_never_even_started_is_blamed():
    state = JobState(PP2)
    for rank in state.ranks:
        rank.heard_s = 1.0  # as the launcher does when it has started them
    state.handle(0, {"kind": "setup", "what": "joining the world group"}, 2.0)
    message = state.hung(60.0).message
    assert message.startswith("rank 1 (pp 1) hangs: no rank has made progress for 60 s; it is starting")


def test_all_in_one_phase_blames_the_first():
    feed = Feed(PP3, ready=False)
    assert blamed(feed).startswith("rank 0 (pp 0) hangs")


# --- in general ---


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_one_hanging_rank_among_honest_ones_is_found(data):
    """All ranks run until none can move, but for one that stops before some host operation: that one is blamed."""
    one = data.draw(st.sampled_from([PP2, PP3, TP2]))
    graph = one.graph
    guilty = data.draw(st.integers(0, graph.num_ranks - 1))
    hosts = [
        [i for i in graph.rank_ops(rank) if graph.ops[i].kind not in TRANSFER_KINDS] for rank in range(graph.num_ranks)
    ]
    compute = [place for place, i in enumerate(hosts[guilty]) if str(graph.ops[i].kind) in ("F", "B", "STEP")]
    stop_at = data.draw(st.sampled_from(compute))
    feed, cursor = Feed(one), [0] * graph.num_ranks

    def has_come(rank, op_id):
        return cursor[rank] >= len(hosts[rank]) or hosts[rank][cursor[rank]] > op_id

    def is_at_or_past(rank, op_id):
        return has_come(rank, op_id) or hosts[rank][cursor[rank]] == op_id

    def can_end(rank, op_id):
        if rank == guilty and cursor[rank] == stop_at:
            return False
        if graph.waits_for[op_id] >= 0:
            partner = graph.match_of[int(graph.waits_for[op_id])]
            return has_come(int(graph.rank[partner]), partner)
        return all(is_at_or_past(int(graph.rank[member]), member) for member in graph.members_of(op_id))

    for rank in range(graph.num_ranks):
        feed.tell(rank, "at", step=0, op=hosts[rank][0])
    moved = True
    while moved:
        moved = False
        for rank in data.draw(st.permutations(range(graph.num_ranks))):
            if cursor[rank] < len(hosts[rank]) and can_end(rank, hosts[rank][cursor[rank]]):
                cursor[rank] += 1
                moved = True
                if cursor[rank] < len(hosts[rank]):
                    feed.tell(rank, "at", step=0, op=hosts[rank][cursor[rank]])
                else:
                    feed.tell(rank, "finished")
    assert feed.state.hung(60.0).message.startswith(one.coords_text(guilty) + " hangs")


# --- hosts that run ahead of a GPU ---


def device_at(feed, rank, text, step=0):
    op_id = next(i for i in feed.graph.rank_ops(rank) if str(feed.graph.ops[i]) == text)
    feed.tell(rank, "device", step=step, op=op_id)


def test_a_hang_is_named_at_the_operation_of_the_gpu_if_the_host_is_ahead():
    feed = Feed(PP2)
    for rank, text in ((0, "0STEP"), (1, "1STEP")):
        feed.at(rank, text)
    device_at(feed, 0, "WAIT(0RECV_B1)")
    device_at(feed, 1, "1F1")
    found = feed.state.hung(5.0)
    assert found.message.startswith("rank 1 (pp 1) hangs: no rank has made progress for 5 s; it is at 1F1 of step 0")
    assert re.search(r"on its GPU \([^)]* 1STEP of step 0\); the graph expects it to \D*1SEND_B1", found.message)
    assert "meanwhile rank 0 running at WAIT(0RECV_B1)" in found.message
    assert [str(op.op) for op in found.witness.ops] == ["1F1", "WAIT(0RECV_B1)"]


def test_a_gpu_at_the_hosts_operation_changes_nothing_and_set_up_resets_it():
    feed = Feed(PP2)
    feed.at(1, "1F0")
    before = feed.state.died(1, "ended")
    device_at(feed, 1, "1F0")
    assert feed.state.died(1, "ended") == before
    feed.at(1, "1F0", step=1)
    assert "1F0 of step 0 on its GPU" in feed.state.died(1, "ended").message
    feed.tell(1, "setup", what="saving the state after step 0")
    assert "while saving the state after step 0" in feed.state.died(1, "ended").message


def test_out_of_memory_has_a_separate_code_and_reports_the_held_memory():
    feed = Feed(PP2)
    feed.at(1, "1F2")
    feed.tell(1, "error", message="MemoryError: ..", at_ns=3, memory="it held 1 GiB, and 2 GiB more were asked for")
    found = feed.state.died(1, "raised")
    assert found.code == "PP922"
    assert found.message.startswith(
        "rank 1 (pp 1) ran out of memory: it held 1 GiB, and 2 GiB more were asked for, at 1F2 of step 0"
    )
    assert re.search(r"micro-batch 2 on stage 1, .* 1RECV_F2 brought from rank 0", found.message)
    assert "memory.recompute" in found.help
