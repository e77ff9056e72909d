"""Progress of a device is reported while it works, and no longer; on a device of the test."""

import threading
from queue import SimpleQueue

from pipeproof.exec.rank.step_replay import follow_device

PATIENCE_S = 60


class Device:
    def __init__(self):
        self.now = (-1, -1)
        self._reads = threading.Semaphore(0)

    def read(self):
        self._reads.release()
        return self.now

    def await_reads(self, count):
        """Wait for so many more reads: the result of the first is reported before the second begins."""
        while self._reads.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self._reads.acquire(timeout=PATIENCE_S)


def test_what_the_device_comes_to_is_told_once_each():
    device, reports = Device(), SimpleQueue()
    with follow_device(device.read, lambda step, op_id: reports.put((step, op_id))):
        device.await_reads(2)
        for now in ((0, 3), (0, 7)):
            device.now = now
            assert reports.get(timeout=PATIENCE_S) == now
            device.await_reads(2)
    device.now = (1, 0)
    assert reports.empty()
    assert "device progress" not in [thread.name for thread in threading.enumerate()]


def test_without_a_device_nothing_is_told():
    reports, before = [], threading.active_count()
    with follow_device(None, lambda *now: reports.append(now)):
        assert threading.active_count() == before
    assert reports == []
