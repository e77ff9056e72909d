"""How far a device has come is told while it goes on, and no longer; on a device of the test."""

import time

from pipeproof.exec.progress import POLL_S, followed


class Device:
    def __init__(self):
        self.now = (-1, -1)

    def read(self):
        return self.now


def test_what_the_device_comes_to_is_told_once_each():
    device, told = Device(), []
    with followed(device.read, lambda step, op_id: told.append((step, op_id))):
        time.sleep(1.5 * POLL_S)
        for now in ((0, 3), (0, 7)):
            device.now = now
            time.sleep(2.5 * POLL_S)
    device.now = (1, 0)
    time.sleep(1.5 * POLL_S)
    assert told == [(0, 3), (0, 7)]


def test_without_a_device_nothing_is_told():
    told = []
    with followed(None, lambda *now: told.append(now)):
        time.sleep(1.5 * POLL_S)
    assert told == []
