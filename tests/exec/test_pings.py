"""Round trips between two ranks with modelled message times, and the lines through them."""

import itertools
import queue
import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.exec.rank.group_endpoint import CHANNELS
from pipeproof.exec.rank.idle_messages import HostPingClock, Wire, one_way_us, way_back
from pipeproof.exec.rehearse.rehearsal_edges import fit_link
from pipeproof.schedule.op_table import Channel

FORWARD, BACKWARD = CHANNELS[0], CHANNELS[1]
WAIT_S = 10.0


@dataclass
class ModelledLink:
    """Both ranks' channels, arrays and clock: a message takes ``latency_us`` and its bytes at the rate of its channel.

    Nobody waits really: each rank has a time of its own, which the end of a message sets forward on both.
    """

    latency_us: float
    bytes_per_us: dict
    messages: dict = field(default_factory=lambda: {channel: queue.Queue() for channel in CHANNELS})

    def wire(self, rank):
        end = ModelledEnd(self, rank)
        return Wire(rank, end, end, end)

    def both(self, act):
        """Results of ``act`` on each rank."""
        found = [None, None]

        def run(rank):
            found[rank] = act(self.wire(rank))

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return found


@dataclass
class ModelledEnd:
    link: ModelledLink
    rank: int
    now_us: float = 0.0

    def empty(self, shape, dtype):
        assert dtype == "uint8"
        return shape[0]

    def post(self, channel, num_bytes):
        if self.rank == channel.src:
            arrives = self.now_us + self.link.latency_us + num_bytes / self.link.bytes_per_us[channel]
            self.link.messages[channel].put(arrives)
            return ModelledTransfer(self, channel, arrives)
        return ModelledTransfer(self, channel)

    def hold(self):
        self.now_us += 500 * (self.rank + 1)  # the ranks do not begin together

    def mark(self):
        return self.now_us

    def between_us(self, first, second):
        return second - first


@dataclass
class ModelledTransfer:
    end: ModelledEnd
    channel: Channel
    arrives_us: float | None = None

    def wait(self):
        if self.arrives_us is None:
            self.arrives_us = self.end.link.messages[self.channel].get(timeout=WAIT_S)
        self.end.now_us = max(self.end.now_us, self.arrives_us)


def link(forward=1000.0, backward=250.0, latency_us=30.0):
    return ModelledLink(latency_us, dict(zip(CHANNELS, (forward, backward, forward), strict=True)))


@pytest.mark.parametrize(("there", "back", "rate"), [(FORWARD, BACKWARD, 1000.0), (BACKWARD, FORWARD, 250.0)])
def test_a_message_takes_its_round_trip_without_the_way_back(there, back, rate):
    sizes = (8, 1000, 2**20)
    found = link().both(lambda wire: one_way_us(wire, there, back, sizes))
    times, others = found[there.src], found[there.dst]
    assert {size: len(times[size]) for size in sizes} == {8: 20, 1000: 20, 2**20: 10}
    for size in sizes:
        assert times[size] == pytest.approx([30 + size / rate] * len(times[size]), abs=0.02)  # of the token's bytes
    assert others == dict.fromkeys(sizes, ())


def test_a_message_never_takes_less_than_half_of_its_round_trip():
    """A busy machine may take 100 us for two tokens and 60 for a message and a token."""
    marks = itertools.accumulate([0, *[100] * 20, 0, *[60] * 20])

    def on_a_busy_machine(wire):
        if wire.rank == 0:
            wire.clock.mark = marks.__next__
        return one_way_us(wire, FORWARD, BACKWARD, [64])

    times = link().both(on_a_busy_machine)[0]
    assert times[64] == (30,) * 20


def test_the_hosts_clock_is_read_when_the_device_is_done():
    seen = []
    clock = HostPingClock(lambda: seen.append("settled"))
    clock.hold()
    first = clock.mark()
    assert seen == ["settled"]
    assert clock.between_us(first, first + 2500) == 2.5


def test_the_way_back_leads_from_the_receiver_to_the_sender():
    channels = [Channel("forward", 0, 1), Channel("forward", 1, 2), Channel("backward", 1, 0)]
    assert way_back(channels, channels[0]) == channels[2]
    assert way_back(channels, channels[1]) is None


# Lines

SIZES = (8, 4096, 2**18, 2**24, 2**28)


@settings(deadline=None, max_examples=50)
@given(latency=st.floats(0.5, 500), rate=st.floats(0.1, 900))
def test_a_line_is_found_again(latency, rate):
    found = fit_link([(size, latency + size / rate / 1000) for size in SIZES])
    assert (found.latency_us, found.bandwidth) == pytest.approx((latency, rate), rel=2e-3)
    assert found.residual < 0.01


def test_how_far_the_line_is_off_is_that_of_the_worst_point():
    found = fit_link([(size, (10 + size / 1000) * (1.6 if size == 4096 else 1)) for size in SIZES])
    assert (found.latency_us, found.bandwidth) == pytest.approx((10, 1), rel=1e-3)
    assert found.residual == pytest.approx(1 - 1 / 1.6, abs=0.001)


@pytest.mark.parametrize(
    ("points", "bandwidth"),
    [
        ([(1000, 50), (10**6, 30)], 10**6 / 30 / 1000),  # larger is faster: all of it is for the bytes
        ([(1000, 5), (10**6, 40_000)], 999_000 / 39_995 / 1000),  # the small message takes less than its bytes
        ([(1000, 7)], 1 / 7),
        ([(8, 0), (16, 0)], 16),
    ],
)
def test_neither_latency_nor_bandwidth_is_negative(points, bandwidth):
    found = fit_link(points)
    assert found.latency_us == 0
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)
