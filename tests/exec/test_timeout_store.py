"""Calls of a store that does not answer, and the thread that makes them."""

import gc
import subprocess
import sys
import threading
import time

import pytest

from pipeproof.exec.store.store import TimeoutStore
from tests.train.fake_store import FakeStore, wait_until


class StoppedStore(FakeStore):
    """A store that stops answering, as if its process were stopped; ``resumed`` lets its calls end."""

    def __init__(self):
        super().__init__()
        self.is_stopped, self.resumed = False, threading.Event()

    def _require_there(self):
        if self.is_stopped:
            self.resumed.wait()
        super()._require_there()


def test_values_and_errors_are_those_of_the_store():
    inner = FakeStore()
    store = TimeoutStore(inner, 5.0).part("a/")
    store.set("key", "value")
    assert (store.get("key", 0.0), store.has("key"), store.has("none")) == ("value", True, False)
    assert (store.add("n", 2), store.add("n")) == (2, 2)
    assert inner.keys() == {"a/key", "a/n"}
    store.remove("key")
    with pytest.raises(TimeoutError):
        store.get("key", 0.01)
    assert store.add("n") == 2  # a missing value does not mean a lost store
    inner.end()
    with pytest.raises(ConnectionError, match="closed"):
        store.has("key")


def test_a_store_that_does_not_answer_has_gone_for_all_threads():
    inner = StoppedStore()
    store = TimeoutStore(inner, 0.2)
    part = store.part("a/")
    assert not store.has("key")
    inner.is_stopped = True
    for _ in range(2):
        with pytest.raises(ConnectionError, match=r"no answer within 0\.2 s"):
            store.has("key")
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        part.get("key", 60.0)  # not awaited: the connection is in the middle of a call
    assert time.monotonic() - began < 30.0
    inner.resumed.set()


def test_a_wait_is_longer_than_the_limit_of_an_answer():
    inner = FakeStore()
    store = TimeoutStore(inner, 0.5)
    threading.Timer(1.0, inner.set, ("key", "late")).start()
    assert store.get("key", 20.0) == "late"


def test_the_thread_ends_with_the_store():
    before = {*threading.enumerate()}
    store = TimeoutStore(FakeStore(), 5.0)
    store.has("key")
    (thread,) = {*threading.enumerate()} - before
    del store
    gc.collect()
    wait_until(lambda: not thread.is_alive())


def test_a_process_does_not_end_while_another_thread_is_in_a_call():
    program = (
        "import sys, threading, time\n"
        "from pipeproof.exec.store.store import TimeoutStore\n"
        "class Slow:\n"
        "    def has(self, key):\n"
        "        time.sleep(1.0)\n"
        "        print('answered', flush=True)\n"
        "store = TimeoutStore(Slow(), 20.0)\n"
        "threading.Thread(target=store.has, args=('key',), daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout == "answered\n"
