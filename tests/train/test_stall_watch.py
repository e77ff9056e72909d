"""The thread that sees a step stand still, by a store in memory and ranks that are objects of one process."""

import os
import sys
import threading
import time

import pytest

from pipeproof.exec.rank import stall_watch as module
from pipeproof.exec.rank.pipeline_failures import PipelineFailures
from pipeproof.exec.rank.stall_watch import StallWatch
from pipeproof.exec.store.agreement import STORE_LOST, Agreement
from pipeproof.exec.store.train_errors import PipelineError
from tests.train.fake_store import FakeStore, wait_until

OPS = {
    3: {"op": "WAIT(0RECV_B1)", "stage": 0, "micro_batch": 1, "peer": 1},
    4: {"op": "1F1", "stage": 1, "micro_batch": 1, "peer": -1},
}


class Ranks:
    """The watches of some ranks; they note the processes that they would end."""

    def __init__(self, num_ranks, timeout_s=0.3, read_device=None):
        self.store, self.aborted, self.exits = FakeStore(), [], []
        self.agreements = [Agreement(self.store, rank, num_ranks, timeout_s) for rank in range(num_ranks)]
        self.watches = [
            StallWatch(
                own, timeout_s, lambda: OPS.__getitem__, lambda rank=rank: self.aborted.append(rank), read_device
            )
            for rank, own in enumerate(self.agreements)
        ]

    def close(self):
        for watch in self.watches:
            watch.close()


@pytest.fixture
def ranks(monkeypatch):
    made = []

    def make(*args, **options):
        made.append(Ranks(*args, **options))
        return made[-1]

    def end(status):
        for each in made:
            each.exits.append(int(status))
        sys.exit()  # of the watch's thread

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    monkeypatch.setattr(module, "OUTSIDE_S", 1.0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    yield make
    for each in made:
        each.close()


def test_a_stall_names_the_op_the_peer_and_the_line_of_every_rank(ranks, capsys):
    two = ranks(2)
    two.watches[0].enter(7, 3)
    two.watches[1].enter(7, 4)
    wait_until(lambda: two.watches[0].failure)
    text = two.watches[0].failure
    assert text.startswith("the pipeline made no progress for 0.3 s\n")
    assert (
        f"rank 0 waits in step 7 for rank 1: WAIT(0RECV_B1), at {__file__.removesuffix('test_stall_watch.py')}" in text
    )
    assert "rank 1 is in step 7, 1F1 (stage 1, micro-batch 1), at " in text
    assert text.splitlines()[-1] == "  the waits end at rank 1"
    wait_until(lambda: two.watches[1].failure)
    assert two.watches[1].failure == text
    wait_until(lambda: set(two.aborted) == {0, 1})


def test_a_watch_ends_and_releases_once_its_pipeline_is_gone(ranks):
    released, own = [], ranks(1).agreements[0]
    pipelines = [OPS.__getitem__]
    watch = StallWatch(own, 0.3, lambda: next(iter(pipelines), None), lambda: None, release=lambda: released.append(1))
    time.sleep(0.1)
    assert not watch.is_closed
    pipelines.clear()
    wait_until(lambda: watch.is_closed and released)
    watch.close()
    assert released == [1]


def test_a_watch_releases_when_it_is_closed(ranks):
    released, own = [], ranks(1).agreements[0]
    watch = StallWatch(own, 30, lambda: OPS.__getitem__, lambda: None, release=lambda: released.append(1))
    watch.close()
    watch.close()
    assert released == [1]


def test_a_rank_outside_of_a_step_is_named(ranks):
    two = ranks(2)
    two.watches[0].enter(0, 3)
    wait_until(lambda: two.watches[0].failure)
    assert "rank 1 is outside of step(), at " in two.watches[0].failure


def test_a_rank_that_does_not_answer_is_named(ranks):
    two = ranks(2)
    two.watches[1].close()
    two.watches[0].enter(0, 3)
    wait_until(lambda: two.watches[0].failure)
    assert "rank 1 does not answer" in two.watches[0].failure


def test_a_call_for_all_ranks_is_watched_by_its_name(ranks):
    one = ranks(1)
    with one.watches[0].calling("clip_grad_norm_"):
        wait_until(lambda: one.watches[0].failure)
    assert "rank 0 is in clip_grad_norm_, at " in one.watches[0].failure


def test_progress_is_no_stall(ranks):
    one = ranks(1, timeout_s=1.0)
    for _ in range(20):
        one.watches[0].enter(0, 4)
        time.sleep(0.1)
    one.watches[0].leave()
    time.sleep(0.3)
    assert one.watches[0].failure is None


def test_a_rank_that_never_comes_back_is_ended_with_the_text(ranks, capsys):
    one = ranks(1)
    one.watches[0].enter(0, 4)
    wait_until(lambda: one.exits == [3])
    assert "pipeproof: rank 0 ends while it is in step 0, 1F1" in capsys.readouterr().err


def test_a_failure_elsewhere_ends_a_rank_outside_of_its_step_later(ranks, capsys):
    two = ranks(2, timeout_s=10.0)
    two.agreements[0].fail("rank 0: it broke")
    wait_until(lambda: two.exits)
    assert "ends while it is outside of step()" in capsys.readouterr().err


def test_a_script_that_has_got_the_failure_is_not_ended(ranks):
    two = ranks(2, timeout_s=5.0)
    two.agreements[0].fail("rank 0: it broke")
    wait_until(lambda: all(watch.failure for watch in two.watches))
    for watch in two.watches:
        watch.acknowledge()
    time.sleep(1.5)
    assert two.exits == []


def test_rank_0_leaves_once_all_ranks_know_of_the_failure(ranks, monkeypatch):
    """The store may end with its process, and a rank that is outside of a step would hear of nothing."""
    two = ranks(2, timeout_s=10.0)  # a poll of the watch takes a second
    two.agreements[0].fail("rank 0: it broke")
    two.watches[0].acknowledge()
    assert two.watches[1].failure == "rank 0: it broke"
    monkeypatch.setattr(module, "_NOTICE_S", 0.2)
    three = ranks(3, timeout_s=10.0)
    three.watches[2].close()  # its process has ended
    three.agreements[0].fail("rank 2: it broke")
    begin = time.monotonic()
    three.watches[0].acknowledge()
    assert time.monotonic() - begin >= 0.2
    assert three.agreements[0].num_noticed() < 3


def test_a_device_behind_the_host_is_watched_after_the_step(ranks):
    at = [(-1, -1)]
    one = ranks(1, read_device=lambda: at[0])
    watch = one.watches[0]
    watch.enter(0, 3, on_device=True)
    watch.enter(0, 4, on_device=True)
    watch.leave()
    at[0] = (0, 3)
    wait_until(lambda: watch.failure)
    assert "rank 0 waits in step 0 for rank 1: WAIT(0RECV_B1)" in watch.failure
    assert one.aborted == []  # later results of the device would be wrong


def test_a_device_that_has_ended_is_no_stall(ranks):
    one = ranks(1, read_device=lambda: (0, 4))
    one.watches[0].enter(0, 4, on_device=True)
    one.watches[0].leave()
    time.sleep(1.0)
    assert one.watches[0].failure is None


def test_the_end_of_the_script_waits_for_a_device_behind_it(ranks):
    at = [(0, 3)]
    one = ranks(1, read_device=lambda: at[0])
    one.watches[0].enter(0, 4, on_device=True)
    one.watches[0].leave()
    end = threading.Thread(target=one.close)
    end.start()
    time.sleep(0.1)
    assert end.is_alive()
    at[0] = (0, 4)
    end.join(5)
    assert not end.is_alive()
    assert one.exits == []


def test_a_device_that_never_gets_there_ends_the_rank_at_the_end_of_its_script(ranks, capsys):
    one = ranks(1, read_device=lambda: (0, 3))
    one.watches[0].enter(0, 4, on_device=True)
    one.watches[0].leave()
    one.close()
    assert len(one.exits) == 1
    assert "WAIT(0RECV_B1)" in capsys.readouterr().err


def test_a_rank_ends_though_its_transfers_cannot_be_ended(ranks, monkeypatch):
    monkeypatch.setattr(module, "_ABORT_S", 0.1)
    one, blocked = ranks(1), threading.Event()
    monkeypatch.setattr(one.watches[0], "_abort", blocked.wait)  # as NCCL's may
    one.watches[0].enter(0, 3)
    wait_until(lambda: one.exits)
    blocked.set()


def test_without_the_store_only_a_stall_ends_the_rank(ranks):
    one = ranks(1)
    one.store.end()
    time.sleep(0.5)
    assert one.watches[0].failure is None
    one.watches[0].enter(0, 4)
    wait_until(lambda: one.watches[0].failure)
    assert one.watches[0].failure.endswith(STORE_LOST)


# --- failures ---


def test_a_failure_is_reported_before_transfers_are_ended():
    own = Agreement(FakeStore(), 1, 2, 1.0)
    seen = []
    failures = PipelineFailures(own, lambda: seen.append(own.failure()))
    failures.fail("bad batch")
    assert seen == ["rank 1: bad batch"]
    assert failures.is_broken
    assert failures.is_own
    with pytest.raises(PipelineError, match=r"failed before.*rank 1: bad batch"):
        failures.require_sound()


def test_an_ended_transfer_is_explained_by_the_rank_that_failed():
    store = FakeStore()
    Agreement(store, 1, 2, 1.0).fail("rank 1: bad batch")
    failures = PipelineFailures(Agreement(store, 0, 2, 1.0), lambda: None)
    assert failures.elsewhere(RuntimeError("Connection closed by peer"), "waits") == "rank 1: bad batch"
    assert not failures.is_own


def test_an_ended_transfer_that_nobody_explains_names_what_waited(monkeypatch):
    monkeypatch.setattr("pipeproof.exec.rank.pipeline_failures._REPORT_S", 0.05)
    own = Agreement(FakeStore(), 0, 2, 1.0)
    error = RuntimeError("[/build/gloo/pair.cc:1] Connection closed by peer [::1]:1. This is typically caused by a\nx")
    text = PipelineFailures(own, lambda: None).elsewhere(error, "waits in step 2 for rank 1: WAIT(0RECV_B1)")
    assert text == (
        "rank 0: its communication ended while it waits in step 2 for rank 1: WAIT(0RECV_B1); the peer's process has "
        "probably ended (Connection closed by peer [::1]:1)"
    )
    assert own.failure() == text


def test_another_error_is_not_called_a_communication(monkeypatch):
    monkeypatch.setattr("pipeproof.exec.rank.pipeline_failures._REPORT_S", 0.05)
    failures = PipelineFailures(Agreement(FakeStore(), 0, 1, 1.0), lambda: None)
    assert failures.elsewhere(RuntimeError("odd"), "is in F") == "rank 0: RuntimeError while it is in F: odd"


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "PADDLE_LOCAL_SIZE"])
def test_the_end_of_a_launcher_is_the_failure_of_all_its_ranks(name, ranks, monkeypatch):
    monkeypatch.setenv(name, "1")
    one = ranks(2, timeout_s=60.0)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    wait_until(lambda: all(watch.failure for watch in one.watches))
    assert one.watches[0].failure == one.watches[1].failure
    assert one.watches[0].failure.endswith("has ended before it")
    wait_until(lambda: one.exits == [3, 3])


def test_a_shell_that_started_a_rank_may_end_before_it(ranks, monkeypatch):
    one = ranks(1, timeout_s=0.3)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    time.sleep(0.5)
    assert one.watches[0].failure is None
