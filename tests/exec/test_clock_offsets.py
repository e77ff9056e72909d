"""Exchange of clock readings through a store: of threads in memory, of PyTorch and of Paddle."""

import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from pipeproof.exec.launch import host_clock
from pipeproof.exec.launch.host_clock import ROUNDS, ClockResponder, correction_by, exchange_clocks
from pipeproof.exec.measure.clock_correction import ClockDriftError, ClockExchange, correction_of, knot_of
from tests.train.fake_store import FakeStore, on_ranks, wait_until

SKEW_NS = 3_600 * 10**9
"""An hour per host."""


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No host loses its turn because its thread has to wait for a processor."""
    monkeypatch.setattr(host_clock, "TURN_S", 20.0)


def clock_of(host):
    """The clock of a simulated host; rank 0's is the machine's."""
    return lambda: time.monotonic_ns() - host * SKEW_NS


def measure_all(store_of, num_hosts, num_measurements=2):
    """Let each host, a thread with a store of its own, measure some times; check that the true offset is within."""
    responder = ClockResponder(store_of(0), num_hosts + 1)

    def measure(index):
        host, store = index + 1, store_of(index + 1)
        exchanges = [exchange_clocks(store, host, num_hosts + 1, 20, clock_of(host)) for _ in range(num_measurements)]
        correction = correction_of([*map(knot_of, exchanges)])
        knots = [correction.at(clock_of(host)()), *correction.knots]
        assert all(abs(knot.offset_ns - host * SKEW_NS) <= knot.error_ns for knot in knots)
        return [*map(len, exchanges)]

    results = on_ranks(num_hosts, measure)
    responder.close()
    assert results == [[1 + ROUNDS] * num_measurements] * num_hosts


def test_every_host_finds_its_offset_and_the_store_does_not_grow():
    store = FakeStore()
    measure_all(lambda _: store, num_hosts=5, num_measurements=3)
    assert store.keys() == {"tickets"}
    assert store.add("tickets") == 15


def test_hosts_that_end_lose_their_turn(monkeypatch):
    monkeypatch.setattr(host_clock, "TURN_S", 0.2)
    store = FakeStore()
    store.add("tickets", 1)  # took a ticket, and ended
    store.add("tickets", 1)
    store.set("ping/1", "1 0 2")  # ended after its first ping
    responder = ClockResponder(store, 3)
    assert exchange_clocks(store, 1, 3, 20, clock_of(1))
    responder.close()


def test_a_late_value_of_an_earlier_ticket_is_dropped():
    store = FakeStore()
    store.set("ping/0", "-2 1 1")
    store.set("pong/1", "-2 1 5 6")  # of a host that lost its turn
    responder = ClockResponder(store, 2)
    exchanges = exchange_clocks(store, 1, 2, 0.5, clock_of(1))
    responder.close()
    assert all(each.arrived_ns > 6 for each in exchanges)
    assert exchanges
    assert abs(knot_of(exchanges).offset_ns - SKEW_NS) <= knot_of(exchanges).error_ns


class SlowRemoval(FakeStore):
    """A store in which host 1 removes its last answer only when ``is_free`` is set."""

    def __init__(self):
        super().__init__()
        self.is_free, self._num_removed = threading.Event(), 0

    def remove(self, key):
        self._num_removed += key == "pong/1"
        if key == "pong/1" and self._num_removed == 1 + ROUNDS:
            assert self.is_free.wait(20)
        super().remove(key)


def test_a_host_that_is_slow_after_its_turn_removes_no_answer_of_another():
    store = SlowRemoval()
    responder = ClockResponder(store, 3)

    def measure(index):
        times = 1 if index == 0 else 7  # more tickets than slots
        counts = [len(exchange_clocks(store, index + 1, 3, 20, clock_of(index + 1))) for _ in range(times)]
        if index == 1:
            store.is_free.set()
        return set(counts)

    assert on_ranks(2, measure) == [{1 + ROUNDS}, {1 + ROUNDS}]
    responder.close()
    assert store.keys() == {"tickets"}


def test_a_host_that_is_not_answered_has_no_exchange():
    assert exchange_clocks(FakeStore(), 1, 2, 0.05) == []


def test_the_responder_ends_with_the_store():
    store = FakeStore()
    responder = ClockResponder(store, 2)
    store.end()
    wait_until(lambda: all(thread.name != "clock offsets" for thread in threading.enumerate()))
    responder.close()


@pytest.mark.needs_torch
def test_hosts_with_connections_to_a_store_of_torch():
    from torch.distributed import TCPStore

    from pipeproof.exec.store.torch_store import TorchStore

    server = TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)

    def connected(_):
        return TorchStore(TCPStore("127.0.0.1", server.port, None, is_master=False, wait_for_workers=False))

    measure_all(connected, num_hosts=8)
    assert server.num_keys() == 1  # of the counter


@pytest.mark.needs_paddle
def test_hosts_with_connections_to_a_store_of_paddle():
    import paddle

    from pipeproof.exec.store.paddle_store import PaddleStore, send_at_once

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = paddle.base.core.TCPStore("127.0.0.1", port, True, 1)

    def connected(_):
        client = paddle.base.core.TCPStore("127.0.0.1", port, False, 1)
        send_at_once({port})
        return PaddleStore(client, "clocks/")

    measure_all(connected, num_hosts=3)
    del server


def exchanges_at(own_ns, rate):
    """Four exchanges from a reading on; rank 0's clock runs ``rate`` times as fast, and a message takes 20 us."""

    def of_zero(reading):
        return 10**12 + int(reading * rate)

    found = []
    for number in range(4):
        sent = own_ns + number * 50_000
        found.append(ClockExchange(sent, of_zero(sent + 20_000), of_zero(sent + 20_000), sent + 40_000))
    return found


@pytest.mark.parametrize(("ppm", "assumed"), [(0, 200), (150, 200), (500, 1_000), (-5_000, 10_000), (80_000, 100_000)])
def test_a_clock_that_is_slewed_has_a_wider_bound_and_no_error(ppm, assumed):
    rate = 1 + ppm / 1e6
    correction = correction_by([exchanges_at(own_ns, rate) for own_ns in (10**9, 2 * 10**9, 10**10)])
    assert correction.drift_ppm == assumed
    for own_ns in (10**9, 3 * 10**9, 10**10):
        knot = correction.at(own_ns)
        assert abs(10**12 + own_ns * rate - own_ns - knot.offset_ns) <= knot.error_ns + 1


def test_a_clock_that_was_stepped_is_an_error():
    stepped = [replace(each, arrived_ns=each.arrived_ns + 10**10, answered_ns=each.answered_ns + 10**10)
               for each in exchanges_at(2 * 10**9, 1.0)]  # fmt: skip
    with pytest.raises(ClockDriftError, match="100000 ppm"):
        correction_by([exchanges_at(10**9, 1.0), stepped])
