"""Replayed steps: executed operations, logged steps and reported progress; on a device of the test."""

import time

import pytest

from pipeproof.exec.rank.step_replay import POLL_S, ReplayedSteps, num_logged_steps
from pipeproof.schedule.ops import OpKind
from tests.plans import subject


class Device:
    """Launches are kept while it captures, and done when they are replayed."""

    def __init__(self, seconds=0.0):
        self.capturing, self.launched, self.number, self.seconds = None, [], -1, seconds

    def launch(self, work):
        if self.capturing is None:
            work()
        else:
            self.capturing.append(work)

    def captured(self, work):
        self.capturing = kept = []
        work()
        self.capturing = None

        def replay():
            for one in kept:
                one()
                time.sleep(self.seconds)

        return replay

    def write(self, op_id):
        self.launch(lambda: setattr(self, "number", op_id))

    def read(self):
        return self.number


class Adapter:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *step: self.calls.append((name, *step))


def run(device, num_steps):
    adapter, done, reports = Adapter(), [], []

    def program(step):
        for op_id, kind in ((0, OpKind.FORWARD), (1, OpKind.SEND_FORWARD), (2, OpKind.WAIT)):
            steps.enter(op_id, kind)
            device.launch(lambda op_id=op_id: done.append(op_id))

    steps = ReplayedSteps(adapter, program, device, lambda step, op_id: reports.append((step, op_id)))
    for step in range(num_steps):
        steps.run(step)
    return adapter.calls, done, reports


def test_every_step_is_executed_once():
    calls, done, _ = run(Device(), 4)
    assert done == [0, 1, 2] * 4
    assert calls == [("begin", 0), ("finish",), ("begin", 1), ("finish",)] + [
        call for step in (2, 3) for call in (("begin_again", step), ("finish",))
    ]


def test_a_replay_reports_the_computation_or_wait_that_it_reaches():
    _, _, reports = run(Device(seconds=3 * POLL_S), 2)
    assert reports == [(1, 0), (1, 2)]


@pytest.mark.parametrize(("steps", "layers", "logged"), [(1, False, 1), (2, False, 2), (9, False, 2), (9, True, 9)])
def test_what_has_a_log(steps, layers, logged):
    gpu = {"backend": "torch", "device": "gpu", "steps": steps}
    assert num_logged_steps(subject(run={**gpu, "replay": True}).plan.spec.run, layers=layers) == logged
    assert num_logged_steps(subject(run=gpu).plan.spec.run, layers=layers) == steps
