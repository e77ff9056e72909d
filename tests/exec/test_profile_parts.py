"""Profile of backwards with two parts, of ends that two ranks saw, and of a GPU's clock and memory."""

from dataclasses import replace

import pytest

from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.op_log import Timing
from pipeproof.specs.profile_file import Profile
from tests.plans import subject
from tests.profiles import COST, DIGEST, bare_of, logs_of


def profile_with(of, logs, timings=None):
    return measured_profile(of, DIGEST, logs, bare_of(of), 1, timings or {})


def with_entries(logs, change):
    return {rank: [change(entry) for entry in entries] for rank, entries in logs.items()}


def median_of(profile, stage, kind, *, own=False):
    op = next(op for op in profile.stages[stage].ops if op.kind == kind)
    return (op.own if own else op.whole).median_us


def test_a_whole_backward_with_a_known_split_gives_both_parts():
    of = subject(cost=COST)
    logs = with_entries(
        logs_of(of), lambda e: replace(e, split_ns=e.start_ns + 60_000) if e.op.split("B")[0].isdigit() else e
    )
    profile = profile_with(of, logs)
    assert [op.kind for op in profile.stages[0].ops] == ["F", "B", "I", "W", "STEP"]
    assert [median_of(profile, 0, kind) for kind in "BIW"] == [210, 60, 150]
    assert [median_of(profile, 1, kind) for kind in "BIW"] == [190, 60, 130]


def test_a_collective_inside_is_taken_off_the_part_that_it_began_in():
    of = subject(cost={"forward_us": 100, "backward_us": 200}, topology={"pp": 1, "tp": 2})
    logs = logs_of(of, num_steps=1)
    children = [e.op for e in logs[0] if e.op.startswith("0B0/")]
    assert len(children) >= 2
    first, second = children[:2]
    backward = next(e for e in logs[0] if e.op == "0B0")

    def change(entry):
        if entry.op == "0B0":
            return replace(entry, split_ns=backward.start_ns + 120_000)
        if entry.op == first:
            return replace(entry, start_ns=backward.start_ns, end_ns=backward.start_ns + 30_000)
        if entry.op == second:
            return replace(entry, start_ns=backward.start_ns + 120_000, end_ns=backward.start_ns + 125_000)
        if entry.op in children:
            return replace(entry, start_ns=backward.start_ns + 1, end_ns=backward.start_ns + 1)
        return entry

    profile = profile_with(of, with_entries(logs, change))
    assert (median_of(profile, 0, "I"), median_of(profile, 0, "W")) == (120, 80)
    assert (median_of(profile, 0, "I", own=True), median_of(profile, 0, "W", own=True)) == (90, 75)


def test_a_channel_is_free_when_the_first_of_both_ends_saw_that_it_is():
    of = subject(cost=COST)
    logs = logs_of(of)
    late = with_entries(  # the sender notes the end of one when the next has arrived, and waits for it later still
        logs, lambda e: replace(e, end_ns=e.end_ns + 330_000) if e.op == "1SEND_B0" else e
    )
    ends = {e.op: e.end_ns for rank in late for e in late[rank] if e.step == 1}
    assert ends["0RECV_B1"] < ends["1SEND_B0"] < ends["WAIT(1SEND_B0)"]
    assert profile_with(of, late).messages == profile_with(of, logs).messages


def test_times_of_gpus_have_their_accuracy_and_the_allocated_memory():
    of = subject(cost=COST)
    timings = {
        0: Timing("device", 3000, "Some GPU", 100, 200), 1: Timing("device", 5500, "Some GPU", 70, 80),
    }  # fmt: skip
    profile = profile_with(of, logs_of(of), timings)
    assert (profile.clock.name, profile.clock.accuracy_us) == ("device", 8.5)
    assert profile.machine.devices == ("Some GPU", "Some GPU")
    assert [(one.rank, one.allocated_bytes, one.reserved_bytes) for one in profile.memory] == [
        (0, 100, 200), (1, 70, 80),
    ]  # fmt: skip
    assert Profile.model_validate(profile.to_json()) == profile


@pytest.mark.parametrize("timings", [{}, {0: Timing(), 1: Timing()}], ids=["none", "of hosts"])
def test_times_of_hosts_are_of_one_clock(timings):
    of = subject(cost=COST)
    profile = profile_with(of, logs_of(of), timings)
    assert (profile.clock.name, profile.clock.accuracy_us, profile.memory, profile.machine.devices) == (
        "host", 0, (), (),
    )  # fmt: skip


def test_a_profile_from_before_clocks_were_named_is_read():
    of = subject(cost=COST)
    content = profile_with(of, logs_of(of)).to_json()
    old = {key: value for key, value in content.items() if key not in ("clock", "memory")}
    del old["machine"]["devices"]
    assert Profile.model_validate(old).clock.name == "host"
