"""The words of all ranks before a step: each rank learns all of them, and a rank that ends leaves nobody waiting."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.needs_torch


def run_ranks(work, num_ranks):
    """The results of ``work(rank)`` of all ranks, in threads side by side."""
    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(work, range(num_ranks)))


def connected(*arguments):
    """A rank's connections; the module needs PyTorch."""
    from pipeproof.exec.train.torch.roll_call import connected_rounds

    return connected_rounds(*arguments)


def roll_call(rounds, waits_for=lambda _: None):
    """The exchange over connections."""
    from pipeproof.exec.train.torch.roll_call import RollCall

    return RollCall(rounds, waits_for)


class Values:
    """A store in this process whose ``get`` waits."""

    def __init__(self):
        self._values, self._changed = {}, threading.Condition()

    def set(self, key, value):
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, 20)
            return self._values[key].encode()


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8, 13])
def test_every_rank_has_the_words_of_all_from_its_own_on(num_ranks):
    store = Values()

    def rank_main(rank):
        roll = roll_call(connected("127.0.0.1", rank, num_ranks, store, 20))
        return [roll.exchange(100 * step + rank + 1) for step in range(3)]

    for rank, steps in enumerate(run_ranks(rank_main, num_ranks)):
        for step, words in enumerate(steps):
            assert words == tuple(100 * step + (rank + place) % num_ranks + 1 for place in range(num_ranks))


def test_a_rank_that_waits_is_told_when_the_other_ends_or_gives_up():
    store, waits = Values(), threading.Event()

    def rank_main(rank):
        (own,) = rounds = connected("127.0.0.1", rank, 2, store, 20)
        if rank == 1:
            assert waits.wait(20)
            own.close()
            return ""
        with pytest.raises(RuntimeError) as error:
            roll_call(rounds, lambda _: waits.set()).exchange(5)
        return str(error.value)

    assert "rank 1" in run_ranks(rank_main, 2)[0]


def test_a_connection_that_is_none_of_the_pipeline_is_closed():
    store = Values()
    published = store.set

    def set_and_connect(key, value):
        address, port, _ = json.loads(value)
        stranger = socket.create_connection((address, port), 20)
        stranger.sendall(b"x" * 24)
        strangers.append(stranger)
        published(key, value)

    strangers = []
    store.set = set_and_connect

    def rank_main(rank):
        return roll_call(connected("127.0.0.1", rank, 2, store, 20)).exchange(rank + 1)

    assert run_ranks(rank_main, 2) == [(1, 2), (2, 1)]
    assert all(stranger.recv(1) == b"" for stranger in strangers)
