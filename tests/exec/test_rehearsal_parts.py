"""Parts of a rehearsal: elements with an identity, arrivals, smaller plans, edges."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeproof.exec.launch.supervisor import Host
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rank.idle_messages import EdgeTimes
from pipeproof.exec.rank.job_files import Job, RunOptions, dump_plan, save_json
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.exec.rehearse.element_identity import (
    FoundRange,
    Source,
    addends,
    decoded,
    elements,
    encoded,
    found_ranges,
)
from pipeproof.exec.rehearse.rehearsal_arrivals import ArrivalChecks, ArrivalFault
from pipeproof.exec.rehearse.rehearsal_edges import edges_of, network_of
from pipeproof.exec.rehearse.rehearsal_report import RankRehearsal, merged_rehearsal, rank_rehearsal
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.exec.logs import faithful_log
from tests.plans import plan_dict, subject

OURS, THEIRS = (Source((0, batch, 1, 0), 0, 200, f"message {batch}") for batch in (0, 1))


@settings(deadline=None)
@given(
    st.sampled_from(["bool", "bfloat16", "float32", "int64"]),
    st.integers(0, 90),
    st.integers(100, 200),
    st.integers(0, 80),
)
def test_a_range_of_another_tensor_is_found_with_its_position(dtype, start, stop, shift):
    wanted = FoundRange(0, 200, OURS, 0)
    size = dtype_bytes(dtype)
    content = OURS.content(0, 200, dtype)
    length = stop - start
    # Where its ends are by chance the same in both, they count as right.
    other = np.array(THEIRS.content(shift, min(200, shift + length), dtype))
    stop = start + len(other) // size
    content[start * size : stop * size] = other
    found = found_ranges(content, dtype, [wanted], lambda: [THEIRS])
    assert [part.start for part in found][1:] == [part.stop for part in found][:-1]
    for part in found:
        arrived = content[part.start * size : part.stop * size]
        if part.source is not None:
            sent = part.source.content(part.source_start, part.source_start + part.stop - part.start, dtype)
            assert np.array_equal(arrived, sent)
    named = sum(part.stop - part.start for part in found if part.source == THEIRS)
    if size > 1 and stop - start >= 16:
        assert named >= stop - start - 4
        assert next(part for part in found if part.source == THEIRS).text.endswith("of message 1")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("by", [1, 64, 2**16])
def test_no_shift_of_a_tensor_has_the_same_bytes(dtype, by):
    source = Source((3, 1, 4), 0, 2**17, "")
    assert not np.array_equal(source.content(0, 1000, dtype), source.content(by, by + 1000, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "int64"])
@pytest.mark.parametrize("num_members", [2, 7, 300])
def test_sums_of_whole_numbers_are_exact_in_every_order(dtype, num_members):
    sources = [Source((place,), place, 50, "") for place in range(num_members)]
    parts = addends(sources, dtype)
    for part in parts:
        assert np.array_equal(decoded(encoded(part, dtype), dtype), part.astype(np.float64))
    total = np.sum(parts, axis=0)
    assert np.array_equal(decoded(encoded(total, dtype), dtype), total.astype(np.float64))
    assert all(part.any() for part in parts) or num_members == 300
    assert total.all() or num_members < 7


def test_bytes_are_those_of_the_type():
    assert encoded(np.array([0, 1, 3, 200]), "bfloat16").view("<u2").tolist() == [0, 0x3F80, 0x4040, 0x4348]
    assert len(elements(OURS.content(3, 10, "float64"), "float64")) == 7


def times_of(graph, time_us):
    """Times of messages of three sizes on every channel, by their bytes."""
    sizes = (1000, 100_000, 1_000_000)
    return {str(channel): {size: (time_us(size, channel),) * 2 for size in sizes} for channel in graph.channels}


def test_latency_and_bandwidth_of_an_edge_are_those_of_its_messages():
    graph = subject(topology={"pp": 3}).graph
    times = times_of(graph, lambda size, channel: 20 + size / (2000 if channel.src == 1 else 4000))
    found = {edge.channel: (edge.link.latency_us, edge.link.bandwidth) for edge in edges_of(graph, times)}
    assert found["forward 0->1"] == pytest.approx((20, 4), rel=1e-3)
    assert found["forward 1->2"] == pytest.approx((20, 2), rel=1e-3)
    assert [message.num_bytes for message in edges_of(graph, times)[0].messages] == [1000, 100_000, 1_000_000]
    assert [edge.channel for edge in edges_of(graph, {"forward 0->1": times["forward 0->1"]})] == ["forward 0->1"]


def test_the_simulator_takes_what_was_measured_of_each_edge():
    """One micro-batch forth and back, one edge slow: the step is computations and both messages, to the nanosecond."""
    from pipeproof.sim.simulate import simulate

    sections = {"schedule": {"kind": "gpipe", "num_micro_batches": 1}}
    graph = subject(**sections).graph
    times = times_of(graph, lambda size, channel: (900 if channel.src == 1 else 20) + size / 4000)
    network = network_of(["a", "a"], edges_of(graph, times), times)
    assert network["ranks_per_node"] == 2
    assert network["edges"] == [
        {"source": 0, "destination": 1, "latency_us": 20.0, "bandwidth": 4.0},
        {"source": 1, "destination": 0, "latency_us": 900.0, "bandwidth": 4.0},
    ]
    cost = {"forward_us": 100, "backward_us": 200, "network": network}
    step = simulate(subject(**sections, cost=cost).plan).timeline.makespan_us
    num_bytes = 8 * 2 * 16 * 4  # sequence, micro-batch, hidden, float32
    assert float(step) == pytest.approx(2 * 300 + 20 + 900 + 2 * num_bytes / 4000, abs=0.01)
    assert network_of(["a"], (), {}) is None


FOUR = {"topology": {"pp": 4}, "schedule": {"kind": "gpipe", "num_micro_batches": 1}}


@pytest.mark.parametrize(
    ("hosts", "per_node", "node_us", "between_us"),
    [
        ("aaaa", 4, 100, None),
        ("aabb", 2, 10, 100),
        ("abcd", 1, 100, 100),
        ("abab", 1, 100, 100),
        ("abba", 1, 100, 10),
        ("aaab", 1, 10, 100),
    ],
)
def test_links_within_hosts_and_between_them_are_two_lines(hosts, per_node, node_us, between_us):
    """The edges 1-2 are slow, 100 us; the median of all edges is the value of most."""
    graph = subject(**FOUR).graph
    slow = {(a, b) for a in range(4) for b in range(4) if hosts[a] != hosts[b]}
    if hosts in ("aaaa", "abba"):
        slow = {(a, b) for a in range(4) for b in range(4)} if hosts == "aaaa" else {(1, 2), (2, 1)}
    times = times_of(graph, lambda size, channel: (100 if (channel.src, channel.dst) in slow else 10) + size / 1000)
    network = network_of(list(hosts), edges_of(graph, times), times)
    found = network.get("between")
    assert (network["ranks_per_node"], network["node"]["latency_us"]) == (per_node, node_us)
    assert (None if found is None else found["latency_us"]) == between_us
    assert len(network["edges"]) == 6
    plan = plan_from_dict(plan_dict(**FOUR, cost={"forward_us": 100, "backward_us": 200, "network": network}))
    assert plan.spec.cost.network.ranks_per_node == per_node


def test_without_an_edge_between_hosts_there_is_no_line_for_them():
    graph = subject(**FOUR).graph
    times = times_of(graph, lambda size, channel: 10 + size / 1000)
    inside = {str(c): times[str(c)] for c in graph.channels if c.src // 2 == c.dst // 2}
    network = network_of(list("aabb"), edges_of(graph, inside), inside)
    assert "between" not in network
    assert {(edge["source"], edge["destination"]) for edge in network["edges"]} == {(0, 1), (1, 0), (2, 3), (3, 2)}


def rehearsed(directory, one, ranks, faulty):
    """The job of a host after its ranks have rehearsed."""
    directory.mkdir()
    report = check(plan_from_dict(plan_dict(**FOUR)))
    job = Job(directory, dump_plan(one.loaded), report.conclusion, RunOptions(rehearses=True))
    times = times_of(one.graph, lambda size, channel: 10 + size / 1000)
    for rank in ranks:
        log = [
            replace(entry, start_ns=entry.start_ns + rank, end_ns=entry.end_ns + rank)
            for entry in faithful_log(one.graph, rank, num_steps=one.plan.spec.run.steps)
        ]
        checks = ArrivalChecks(10 + rank, 2, 100)
        if rank == faulty:
            checks.add_fault(ArrivalFault(rank, 0, "1F0", 3, "forward 0->1", "elements 0..8 are zeros"))
            log[0] = replace(log[0], op="0F9")
        save_json(job.rank_file(rank, "log"), log, list[LogEntry])
        save_json(job.rank_file(rank, "checks"), checks, ArrivalChecks)
        own = {str(c): times[str(c)] for c in one.graph.channels if c.src == rank}
        save_json(job.rank_file(rank, "edges"), own, EdgeTimes)
    return job


@pytest.mark.parametrize("faulty", [None, 1, 3])
def test_parts_of_ranks_on_two_hosts_make_the_report_of_a_rehearsal(tmp_path, faulty):
    report = check(plan_from_dict(plan_dict(**FOUR)))
    report = replace(report, subject=report.subject.unfolded())
    job, adapter = rehearsed(tmp_path / "job", report.subject, range(4), faulty), TypeAdapter(RankRehearsal)
    parts = [rank_rehearsal(report, job, rank) for rank in range(4)]
    assert [adapter.validate_json(adapter.dump_json(part)) for part in parts] == parts
    whole = merged_rehearsal(report, parts, [Host("a", (0, 1, 2, 3))])
    merged = merged_rehearsal(report, parts, [Host("a", (0, 1)), Host("b", (2, 3))])
    assert merged.findings == whole.findings
    assert [finding.code for finding in merged.findings] == ([] if faulty is None else ["PP901", "PP914"])
    assert (merged.edges, merged.checked) == (whole.edges, whole.checked)
    ends = [(part.start_ns, part.end_ns) for part in parts]
    of_hosts = {
        name: (max(end for _, end in own) - min(start for start, _ in own)) / 1e9
        for name, own in (("a", ends[:2]), ("b", ends[2:]))
    }
    of_merged, of_whole = merged.to_json(), whole.to_json()
    assert of_merged.pop("seconds_by_host") == of_hosts
    assert of_merged["seconds"] == max(of_hosts.values())
    assert {**of_merged, "seconds": 0} == {**of_whole, "seconds": 0}
    assert (merged.network["ranks_per_node"], whole.network["ranks_per_node"]) == (2, 4)


def test_of_several_channels_between_two_ranks_the_slowest_is_their_edge():
    graph = subject(schedule={"kind": "interleaved", "num_chunks": 2}).graph
    assert [(c.src, c.dst) for c in graph.channels].count((0, 1)) == 2
    times = times_of(graph, lambda size, channel: (50 if channel.communicator == "backward" else 10) + size / 1000)
    edges = network_of(["a", "a"], edges_of(graph, times), times)["edges"]
    assert [(edge["source"], edge["destination"], edge["latency_us"]) for edge in edges] == [(0, 1, 50), (1, 0, 50)]


def test_a_rank_that_hangs_while_edges_are_timed_is_reported_so():
    state = JobState(subject())
    for rank in (0, 1):
        state.handle(rank, {"kind": "ready", "threads": 1}, 1.0)
        state.handle(rank, {"kind": "at", "step": 1, "op": 0}, 2.0)
    state.handle(0, {"kind": "setup", "what": "timing forward 0->1"}, 3.0)
    state.handle(1, {"kind": "setup", "what": "timing backward 1->0"}, 4.0)
    assert "rank 0 (pp 0) hangs: no rank has made progress for 60 s; it is timing forward 0->1; " in (
        state.hung(60.0).message
    )
