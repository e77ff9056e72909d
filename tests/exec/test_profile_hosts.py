"""Profile of ranks on two hosts: wrong by the skew of their clocks without a correction, within the bound with one."""

from dataclasses import replace

import pytest

from pipeproof.exec.compare.compare_log import compare_times
from pipeproof.exec.launch.run_report import measured_timeline
from pipeproof.exec.measure.clock_correction import Knot, corrected, corrected_ends, correction_of, largest_error_ns
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.op_log import Timing, accuracy_between_ns
from pipeproof.views.chrome_trace import trace_json
from pipeproof.views.html.timeline_page import timeline_html
from tests.plans import subject
from tests.profiles import COST, DIGEST, bare_of, logs_of

SKEW_NS = 40_000
"""Lead of rank 1's clock over rank 0's."""
LATER_NS = 10**9
"""Shift of all clocks, so that no time is 0."""
EARLY_NS = 60_000
"""Time by which receives are posted before their sends; longer than the skew, so that all messages count."""
ERROR_NS = 1_500
MESSAGE_US = 7
NUM_MATCHES, NUM_MESSAGES, NUM_IDLE_MESSAGES = 8, 14, 4
"""Messages of a step, those of two steps whose receiver was ready, and idle ones."""


def moved(entries, by):
    """Entries of a log, or ends of idle messages, at other readings."""
    times = ("start_ns", "end_ns", "posted_ns") if hasattr(entries[0], "op") else ("end_ns", "posted_ns")
    return [replace(entry, **{name: getattr(entry, name) + by for name in times}) for entry in entries]


def early(entries):
    """A log, or ends of idle messages, with receives posted earlier."""

    def is_receive(entry):
        return "RECV_" in entry.op and not entry.op.startswith("WAIT") if hasattr(entry, "op") else not entry.is_send

    return [replace(e, posted_ns=e.posted_ns - EARLY_NS) if is_receive(e) else e for e in entries]


def skewed(of):
    """Logs and idle messages of two ranks on hosts with different clocks."""
    shifts = {0: LATER_NS, 1: LATER_NS + SKEW_NS}
    return tuple(
        {rank: moved(early(each), shifts[rank]) for rank, each in part.items()} for part in (logs_of(of), bare_of(of))
    )


def on_rank_0s_clock(logs, idle, offset_ns=-SKEW_NS):
    """Rank 1's part corrected with a measured offset, and the timings of both hosts."""
    correction = correction_of([Knot(LATER_NS, offset_ns, ERROR_NS)], drift_ppm=0)
    logs, idle = (
        {0: part[0], 1: change(part[1], correction)}
        for part, change in ((logs, corrected), (idle, corrected_ends))
    )  # fmt: skip
    error = largest_error_ns(logs[1], correction)
    return logs, idle, {0: Timing(), 1: Timing(host=1, offset_error_ns=error)}


def test_without_correction_times_are_wrong_by_the_skew():
    of = subject(cost=COST)
    profile = measured_profile(of, DIGEST, *skewed(of), 1)
    (messages,) = profile.messages
    assert (messages.count, messages.q1_us, messages.q3_us) == (NUM_MESSAGES, 0, MESSAGE_US + SKEW_NS / 1000)
    assert [round(2 * point.mean_us) for point in profile.bare_messages] == [5 + 40, 9 + 40]  # and 0 the other way


@pytest.mark.parametrize("off_ns", [0, ERROR_NS, -ERROR_NS])
def test_with_correction_times_are_within_the_error(off_ns):
    of = subject(cost=COST)
    logs, idle, timings = on_rank_0s_clock(*skewed(of), offset_ns=-SKEW_NS + off_ns)
    profile = measured_profile(of, DIGEST, logs, idle, 1, timings)
    assert profile.clock.name == "host"
    assert profile.clock.accuracy_us == ERROR_NS / 1000
    (messages,) = profile.messages
    assert profile.clock.undecided + messages.count + sum(point.count for point in profile.bare_messages) == (
        NUM_MESSAGES + NUM_IDLE_MESSAGES
    )
    for point, length in ((messages, MESSAGE_US), *zip(profile.bare_messages, (5, 9), strict=True)):
        assert all(abs(time - length) <= ERROR_NS / 1000 for time in (point.q1_us, point.median_us, point.q3_us))


def test_a_message_that_is_shorter_than_the_error_is_undecided():
    of = subject(cost=COST)
    logs, idle, timings = on_rank_0s_clock(*skewed(of))
    for error_ns, lengths in ((4_999, {64, 4096}), (5_000, {4096}), (9_000, set())):
        timings = {0: Timing(), 1: Timing(host=1, offset_error_ns=error_ns)}
        profile = measured_profile(of, DIGEST, logs, idle, 1, timings)
        assert {point.num_bytes for point in profile.bare_messages} == lengths
        one_host = {0: Timing(), 1: Timing(offset_error_ns=error_ns)}
        clock = measured_profile(of, DIGEST, logs, idle, 1, one_host).clock
        assert (clock.undecided, clock.accuracy_us) == (0, 0)
    assert profile.messages == ()
    assert profile.clock.undecided == NUM_MESSAGES + NUM_IDLE_MESSAGES


def test_a_receiver_that_was_perhaps_late_is_undecided():
    of = subject(cost=COST)
    logs, idle, timings = on_rank_0s_clock(*skewed(of))
    before = measured_profile(of, DIGEST, logs, idle, 1, timings)
    for posted_ns, change in ((-ERROR_NS, (0, 0)), (0, (-1, 1)), (ERROR_NS, (-1, 1)), (1 + ERROR_NS, (-1, 0))):
        late = {
            rank: [
                replace(e, posted_ns=e.posted_ns + EARLY_NS + posted_ns) if (e.step, e.op) == (1, "1RECV_F2") else e
                for e in log
            ]
            for rank, log in logs.items()
        }
        profile = measured_profile(of, DIGEST, late, idle, 1, timings)
        changes = profile.messages[0].count - before.messages[0].count, profile.clock.undecided
        assert changes == change


def test_an_idle_message_whose_receiver_was_perhaps_late_is_undecided():
    of = subject(cost=COST)
    logs, _ = skewed(of)
    timings = {0: Timing(), 1: Timing(host=1, offset_error_ns=ERROR_NS)}
    for posted_ns, undecided in ((10_000 - ERROR_NS, 0), (10_000 + ERROR_NS, 4), (10_001 + ERROR_NS, 0)):
        idle = {
            rank: [end if end.is_send else replace(end, posted_ns=posted_ns) for end in ends]
            for rank, ends in bare_of(of).items()
        }
        clocks = [measured_profile(of, DIGEST, logs, each, 1, timings).clock for each in (idle, {0: [], 1: []})]
        assert clocks[0].undecided - clocks[1].undecided == undecided


def test_collectives_between_hosts_are_undecided_below_the_error():
    of = subject(cost={"forward_us": 110}, topology={"pp": 1, "tp": 2})
    logs = {
        rank: [replace(e, end_ns=e.start_ns + 4_000) if "/" in e.op else e for e in log]
        for rank, log in logs_of(of).items()
    }
    idle = bare_of(of)
    counts = {}
    for error_ns in (0, 3_999, 4_000):
        timings = {0: Timing(), 1: Timing(host=1, offset_error_ns=error_ns)}
        profile = measured_profile(of, DIGEST, logs, idle, 1, timings)
        counts[error_ns] = (sum(point.count for point in profile.collectives), profile.clock.undecided)
    measured, undecided = counts[0]
    assert counts[3_999] == (measured, undecided) == (measured, 0)
    assert measured > 0
    assert counts[4_000] == (0, measured)


def test_the_accuracy_is_that_of_the_worst_two_ranks():
    first, second = Timing("device", 30, "GPU", host=0), Timing("device", 50, "GPU", host=0)
    third = Timing("device", 10, "GPU", host=1, offset_error_ns=200)
    assert accuracy_between_ns(first, second) == 80
    assert accuracy_between_ns(second, third) == 260
    of = subject(cost=COST)
    gpus = {rank: Timing("device", 10**6, "GPU") for rank in (0, 1)}  # of one host
    assert measured_profile(of, DIGEST, logs_of(of), bare_of(of), 1, gpus).clock.undecided == 0
    for timings, worst_us in (({0: first, 1: second}, 0.08), ({0: first, 1: third}, 0.24)):
        clock = measured_profile(of, DIGEST, logs_of(of), bare_of(of), 1, timings).clock
        assert (clock.name, clock.accuracy_us) == ("device", worst_us)


# --- order ---


def test_a_receive_that_ends_before_its_send_is_an_error_beyond_the_bound():
    of = subject(cost=COST)
    logs, _, timings = on_rank_0s_clock(*skewed(of))
    assert not [*compare_times(of.graph, logs, timings)]
    early = {0: logs[0], 1: moved(logs[1], -MESSAGE_US * 1000 - ERROR_NS)}
    assert not [*compare_times(of.graph, early, timings)]
    early[1] = moved(early[1], -1)
    (finding,) = compare_times(of.graph, early, timings)
    assert finding.code == "PP901"
    assert "rank 1, step " in finding.message
    assert "ended 1.501 us before rank 0 posted" in finding.message
    assert "at most 1.5 us" in finding.message
    assert [op.rank for op in finding.witness.ops] == [0, 1]


def test_the_order_of_one_host_is_not_compared():
    of = subject(cost=COST)
    logs = logs_of(of)
    late = {0: moved(logs[0], 10**6), 1: logs[1]}
    assert not [*compare_times(of.graph, late, {0: Timing(), 1: Timing()})]
    assert len([*compare_times(of.graph, late, {0: Timing(), 1: Timing(host=1)})]) == 1


def test_a_timeline_shows_a_receive_that_appears_to_end_before_its_send():
    of = subject(cost=COST)
    logs = logs_of(of)
    timeline = measured_timeline(of, {0: moved(logs[0], LATER_NS), 1: moved(logs[1], LATER_NS - 8_000)})
    ends = {(span.step, span.op): (span.start, span.end) for span in timeline.spans}
    assert ends[1, "1RECV_F0"][1] == ends[1, "0SEND_F0"][0] - 1_000
    assert trace_json(timeline).count('"ph":"f"') == 3 * NUM_MATCHES
    assert "1RECV_F0" in timeline_html([("measured", timeline, of.graph)])
