"""Times of operations with PyTorch: a GPU's events, gloo's transfers, and runs that write a profile."""

import json
import threading
import time
from contextlib import nullcontext

import pytest

from pipeproof.exec.rank.job_files import load_json, save_json
from pipeproof.exec.rank.op_log import HOST_QUEUE, HostClock, LogEntry, Timing
from pipeproof.schedule.op_table import Channel
from pipeproof.specs.profile_file import read_profile
from tests.docs.test_schemas import require_fit
from tests.exec.processes import Run
from tests.plans import plan_dict, subject

pytestmark = pytest.mark.needs_torch

TO_1 = Channel("pp", 0, 1)


# --- a GPU that is not there ---


class FakeGpu:
    """A device whose events take their times from ``ms``, by the stream that is current when they are recorded."""

    def __init__(self):
        self.ms = {"compute": 100.0, "side": 100.0}
        self.stream = "compute"

    def event(self, *, enable_timing):
        assert enable_timing
        return FakeEvent(self)

    def on(self, stream):
        gpu = self

        class Current(nullcontext):
            def __enter__(self):
                gpu.stream = stream

            def __exit__(self, *_):
                gpu.stream = "compute"

        return Current()


class FakeEvent:
    def __init__(self, gpu):
        self.gpu, self.at_ms = gpu, None

    def record(self):
        self.at_ms = self.gpu.ms[self.gpu.stream]

    def synchronize(self):
        """It has been passed."""

    def elapsed_time(self, other):
        return other.at_ms - self.at_ms


class FakeWork:
    def __init__(self):
        self.waited_on = []

    def wait(self):
        self.waited_on.append(GPU[0].stream)


GPU = [FakeGpu()]


@pytest.fixture
def gpu(monkeypatch):
    import torch

    GPU[0] = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", GPU[0].event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "stream", GPU[0].on)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    return GPU[0]


def made_clock():
    import torch

    from pipeproof.exec.rank.torch.op_timing import DeviceClock

    return DeviceClock(torch.device("cuda", 0))


def moment(gpu, clock, ms):
    gpu.ms["compute"] = ms
    return clock.now()


def test_operations_have_the_times_of_the_gpu_on_the_hosts_clock(gpu):
    clock, before = made_clock(), time.monotonic_ns()
    clock.begin()
    after = time.monotonic_ns()
    places = [moment(gpu, clock, ms) for ms in (102.0, 103.0, 107.5)]
    entry = LogEntry(3, HOST_QUEUE, "0B1", places[0], places[2], split_ns=places[1])
    forward = LogEntry(3, HOST_QUEUE, "0F1", places[0], places[1])
    timed_entries, other = clock.timed_entries([entry, forward])
    assert (timed_entries.split_ns - timed_entries.start_ns, timed_entries.end_ns - timed_entries.start_ns) == (
        1_000_000,
        5_500_000,
    )
    assert before <= timed_entries.start_ns - 2_000_000 <= after  # the event at 100 ms was recorded in between
    assert (timed_entries.op, timed_entries.step, other.op, other.split_ns) == ("0B1", 3, "0F1", 0)
    assert 0 < clock.accuracy_ns <= (after - before) // 2 + 1


def test_events_are_made_once_and_used_again_in_every_step(gpu, monkeypatch):
    import torch

    clock = made_clock()
    clock.begin()
    first = [clock.now() for _ in range(3)]
    clock.begin()
    monkeypatch.setattr(torch.cuda, "Event", None)  # no more of them
    assert [clock.now() for _ in range(3)] == first == [1, 2, 3]


def test_a_transfer_starts_when_its_channel_is_free_and_ends_on_its_own_stream(gpu):
    import torch

    from pipeproof.exec.rank.group_channels import PostedTransfer
    from pipeproof.exec.rank.torch.op_timing import DeviceChannels

    class Channels:
        def post(self, channel, buffer):
            return PostedTransfer(buffer, FakeWork(), 0)

    clock = made_clock()
    clock.begin()
    channels = DeviceChannels(Channels(), clock, torch.device("cuda", 0))
    entries = []
    for posted_ms, end_ms in ((101.0, 105.0), (102.0, 109.0), (120.0, 121.0)):
        gpu.ms |= {"compute": posted_ms, "side": end_ms}
        transfer = channels.post(TO_1, torch.zeros(2))
        assert transfer.work.waited_on == ["side"]
        transfer.wait()
        assert transfer.work.waited_on == ["side", "compute"]
        entries.append(
            LogEntry(0, str(TO_1), "0SEND_F0", transfer.start_ns, transfer.end_ns, posted_ns=transfer.posted_ns)
        )
    timed_entries = clock.timed_entries(entries)
    origin = timed_entries[0].posted_ns
    assert [(one.posted_ns - origin, one.start_ns - origin, one.end_ns - origin) for one in timed_entries] == [
        (0, 0, 4_000_000),
        (1_000_000, 4_000_000, 8_000_000),
        (19_000_000, 19_000_000, 20_000_000),
    ]


# --- gloo ---


class SlowWork:
    """A transfer whose end the test sets."""

    def __init__(self, error=None):
        self.may_end, self.error = threading.Event(), error

    def wait(self):
        assert self.may_end.wait(10)
        if self.error is not None:
            raise self.error


def watched(*works):
    import torch

    from pipeproof.exec.rank.group_channels import PostedTransfer
    from pipeproof.exec.rank.torch.op_timing import WatchedChannels

    class Channels:
        def __init__(self):
            self.left, self.is_closed = list(works), False

        def post(self, channel, buffer):
            return PostedTransfer(buffer, self.left.pop(0), time.monotonic_ns())

        def close(self):
            self.is_closed = True

    plain = Channels()
    channels = WatchedChannels(plain)
    return channels, plain, [channels.post(TO_1, torch.zeros(1)) for _ in works]


def test_a_transfers_end_is_known_before_the_wait_for_it():
    works = SlowWork(), SlowWork()
    channels, plain, transfers = watched(*works)
    for work in works:
        work.may_end.set()
    assert all(transfer.done.wait(10) for transfer in transfers)
    before_waiting = time.monotonic_ns()
    for transfer in transfers:
        transfer.wait()
    assert all(t.posted_ns == t.start_ns < t.end_ns <= before_waiting for t in transfers)
    channels.close()
    assert plain.is_closed


def test_a_transfer_that_fails_raises_in_its_wait():
    work = SlowWork(RuntimeError("connection closed by peer"))
    _, _, (transfer,) = watched(work)
    work.may_end.set()
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        transfer.wait()


# --- messages about times ---


def test_the_clock_of_a_rank_is_read_as_it_was_written(tmp_path):
    file = tmp_path / "timing.json"
    timing = Timing("device", 4200, "a GPU", 100, 200)
    save_json(file, timing, Timing)
    assert load_json(file, Timing) == timing


def test_the_hosts_clock_needs_no_dating():
    clock = HostClock()
    clock.begin()
    entries = [LogEntry(0, HOST_QUEUE, "0F0", clock.now(), clock.now())]
    assert clock.timed_entries(entries) == entries


# --- real processes ---


def plan(**changes):
    return plan_dict(run={"backend": "torch", "steps": 3}, **changes)


def test_a_run_over_gloo_writes_a_profile_with_both_parts_of_backwards(tmp_path):
    path = tmp_path / "profile.json"
    ended = Run(tmp_path, plan(), "--profile", str(path)).end()
    assert ended.status == 0, ended.output
    assert "bit for bit" in ended.output
    assert ended.report["clock"] == "host"
    require_fit("run", ended.report)
    profile = read_profile(path)
    assert profile.machine.framework.startswith("torch ")
    assert (profile.plan.backend, profile.clock.name, profile.machine.devices, profile.memory) == (
        "torch", "host", (), (),
    )  # fmt: skip
    for stage in profile.stages:
        times = {op.kind: op.whole for op in stage.ops}
        assert list(times) == ["F", "B", "I", "W", "STEP"]
        assert times["I"].count == times["W"].count == times["B"].count
        assert times["I"].mean_us + times["W"].mean_us == pytest.approx(times["B"].mean_us, abs=0.01)
    assert all(point.median_us > 0 for point in (*profile.messages, *profile.bare_messages))

    measured = tmp_path / "with_profile.json"
    split = {**plan(), "schedule": {**plan()["schedule"], "kind": "zb_h1"}, "cost": {"profile": "profile.json"}}
    measured.write_text(json.dumps(split))
    from pipeproof.comm.lower import lower_loaded
    from pipeproof.specs.load_plan import load_plan

    cost = lower_loaded(load_plan(measured)).spec.cost
    of_stage_0 = {op.kind: op.whole.median_us for op in profile.stages[0].ops}
    assert float(cost.backward_input_of(0)) == pytest.approx(of_stage_0["I"])
    assert float(cost.backward_weight_of(0)) == pytest.approx(of_stage_0["W"])


def test_a_profile_of_replayed_steps_is_refused(monkeypatch):
    from pipeproof.diagnostics.finding import PipeproofError
    from pipeproof.exec.launch.run_plan import RunOptions, require_runnable
    from pipeproof.exec.rank import gpu_assignment
    from pipeproof.verify.check_plan import check_subject

    monkeypatch.setattr(gpu_assignment, "num_gpus", lambda backend: 2)
    plan = plan_dict(run={"backend": "torch", "device": "gpu", "steps": 3, "replay": True})
    report = check_subject(subject(**plan))
    require_runnable(report, RunOptions())
    with pytest.raises(PipeproofError, match=r"PP909: --profile .* run\.replay") as error:
        require_runnable(report, RunOptions(profile=True))
    assert "replay: false" in error.value.findings[0].help


@pytest.mark.parametrize(
    ("device", "is_timed", "clock", "said"),
    [("cpu", True, "host", None), ("gpu", True, "device", "the GPU's"), ("gpu", False, "issue", "the host issued")],
)
def test_a_log_states_the_clock_of_its_times(device, is_timed, clock, said):
    from pipeproof.exec.launch.run_console import CLOCKS
    from pipeproof.exec.launch.run_report import clock_of

    run = subject(run={"backend": "torch", "device": device}).plan.spec.run
    assert clock_of(run, is_timed=is_timed) == clock
    assert (said is None and not CLOCKS[clock]) or said in CLOCKS[clock]


def test_a_peer_that_dies_while_times_are_taken_is_named(tmp_path):
    path = tmp_path / "profile.json"
    ended = Run(tmp_path, plan(), "--profile", str(path), "--inject", "1:1F2:die").end()
    assert ended.status == 3
    assert "rank 1 (pp 1) was killed by SIGKILL, at 1F2" in ended.output
    assert not path.exists()
