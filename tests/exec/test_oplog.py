"""The log of a run compared with the graph: a correct log is accepted, every change is found at its position."""

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeproof.cli.main import main
from pipeproof.diagnostics.finding import Severity
from pipeproof.exec.compare.compare_log import compare_log, expected_facts
from pipeproof.exec.launch import run_console
from pipeproof.exec.rank.job_files import LogFile, LogWriter, load_json
from pipeproof.exec.rank.op_log import HOST_QUEUE, LogEntry, op_ids_of
from tests.exec.logs import faithful_log, on_queue
from tests.plans import subject

NUM_STEPS = 2
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_pp4.yaml"
ONE = subject(topology={"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True})
GRAPH = ONE.graph
RANK = 1
"""pp 0, tp 1, dp 0: it sends forward to rank 5."""
SENDS = "forward 1->5"
RECEIVES = "backward 5->1"


def differences(entries, rank=RANK, graph=GRAPH):
    return list(compare_log(graph, rank, entries, num_steps=NUM_STEPS, dtype="float32"))


def log():
    return faithful_log(GRAPH, RANK, num_steps=NUM_STEPS)


def only(findings):
    (found,) = findings
    assert found.code == "PP901"
    assert found.severity is Severity.ERROR
    return found.message


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["gpipe", "1f1b"]),
    pp=st.integers(1, 3),
    tp=st.sampled_from([1, 2]),
    transport=st.sampled_from(["full", "partial"]),
)
def test_the_faithful_log_of_every_rank_is_accepted(kind, pp, tp, transport):
    graph = subject(topology={"pp": pp, "tp": tp}, schedule={"kind": kind}, transport=transport).graph
    for rank in range(graph.num_ranks):
        assert differences(faithful_log(graph, rank, num_steps=NUM_STEPS), rank, graph) == []


def test_the_log_survives_json():
    adapter = TypeAdapter(list[LogEntry])
    again = adapter.validate_json(adapter.dump_json(log()))
    assert again == log()
    assert differences(again) == []


def test_the_file_of_a_log_is_written_and_read_a_step_at_a_time(tmp_path):
    path = tmp_path / "rank1.log.json"
    writer = LogWriter(path)
    for step in range(NUM_STEPS):
        writer.write([entry for entry in log() if entry.step == step])
        writer.write([])
    assert not path.exists()
    writer.finish()
    assert [*LogFile(path)] == load_json(path, list[LogEntry]) == log()
    assert differences(LogFile(path)) == differences(LogFile(path)) == []
    assert max(map(len, path.read_text().splitlines())) < path.stat().st_size * 0.6


def test_the_file_of_a_log_without_entries(tmp_path):
    LogWriter(tmp_path / "log").finish()
    assert [*LogFile(tmp_path / "log")] == load_json(tmp_path / "log", list[LogEntry]) == []


def test_a_log_is_compared_a_step_at_a_time():
    read = []
    wrong = (read.append(entry.step) or dataclasses.replace(entry, op="9F9") for entry in log())
    next(compare_log(GRAPH, RANK, wrong, num_steps=NUM_STEPS, dtype="float32"))
    assert read.count(1) == 1  # the entry after which step 0 had ended


@pytest.mark.parametrize(
    ("files", "expected"), [([], False), (["--report"], True), (["-o"], True), (["--profile"], True)]
)
def test_a_run_keeps_its_timeline_where_a_file_has_it(files, expected, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(run_console, "run_command", lambda report, options, *_, **__: given.append(options) or 0)
    arguments = [argument for option in files for argument in (option, str(tmp_path / "out.json"))]
    assert CliRunner().invoke(main, ["run", str(EXAMPLE), *arguments]).exit_code == 0
    assert [options.timeline for options in given] == [expected]


def test_every_queue_of_the_rank_is_expected():
    assert set(expected_facts(GRAPH, RANK, "float32")) == {HOST_QUEUE, SENDS, RECEIVES}


@pytest.mark.parametrize("queue", [HOST_QUEUE, SENDS, RECEIVES])
@pytest.mark.parametrize("step", [0, 1])
def test_dropped(queue, step):
    entries = log()
    places = on_queue(entries, queue, step)
    dropped, following = entries[places[2]], entries[places[3]]
    del entries[places[2]]
    message = only(differences(entries))
    assert message.startswith(f"rank {RANK}, step {step}, queue {queue}, position 2: the graph has {dropped.op}")
    assert f"the log has {following.op}" in message


@pytest.mark.parametrize("queue", [HOST_QUEUE, SENDS, RECEIVES])
def test_the_last_dropped(queue):
    entries = log()
    places = on_queue(entries, queue, 1)
    dropped = entries.pop(places[-1])
    message = only(differences(entries))
    assert f"queue {queue}, position {len(places) - 1}: the graph has {dropped.op}" in message
    assert message.endswith("the log has nothing more")


@pytest.mark.parametrize("queue", [HOST_QUEUE, SENDS, RECEIVES])
def test_doubled(queue):
    entries = log()
    places = on_queue(entries, queue, 0)
    doubled = entries[places[1]]
    entries.insert(places[1], doubled)
    message = only(differences(entries))
    assert f"step 0, queue {queue}, position 2: the graph has {entries[places[2] + 1].op}" in message
    assert f"the log has {doubled.op}" in message


@pytest.mark.parametrize("queue", [HOST_QUEUE, SENDS, RECEIVES])
def test_one_more_at_the_end(queue):
    entries = log()
    places = on_queue(entries, queue, 1)
    entries.append(dataclasses.replace(entries[places[0]], start_ns=10**9, end_ns=10**9))
    message = only(differences(entries))
    assert f"step 1, queue {queue}, position {len(places)}: the graph has nothing more" in message


@pytest.mark.parametrize("queue", [HOST_QUEUE, SENDS, RECEIVES])
def test_swapped(queue):
    """The operation that ran first is first and has the earlier time."""
    entries = log()
    first, second = on_queue(entries, queue, 1)[1:3]
    a, b = entries[first], entries[second]
    entries[first] = dataclasses.replace(b, start_ns=a.start_ns, end_ns=a.end_ns)
    entries[second] = dataclasses.replace(a, start_ns=b.start_ns, end_ns=b.end_ns)
    message = only(differences(entries))
    assert f"step 1, queue {queue}, position 1: the graph has {a.op}" in message
    assert f"the log has {b.op}" in message


def test_a_channel_that_executed_in_another_order_than_the_host_waited_is_found():
    """The entries are in the order of the waits, as the adapter writes them; their times differ."""
    entries = log()
    first, second = on_queue(entries, SENDS, 0)[:2]
    a, b = entries[first], entries[second]
    entries[first] = dataclasses.replace(a, start_ns=b.start_ns, end_ns=b.end_ns)
    entries[second] = dataclasses.replace(b, start_ns=a.start_ns, end_ns=a.end_ns)
    assert "position 0: the graph has 0SEND_F0" in only(differences(entries))


def test_waits_in_another_order_than_the_channel_are_no_fault_of_the_channel():
    entries = log()
    first, second = on_queue(entries, SENDS, 0)[:2]
    entries[first], entries[second] = entries[second], entries[first]
    assert differences(entries) == []


@pytest.mark.parametrize(
    ("queue", "change", "wanted", "seen"),
    [
        (SENDS, {"numel": 7}, "128 elements", "7 elements"),
        (SENDS, {"dtype": "float64"}, "elements float32", "elements float64"),
        (SENDS, {"ranks": (1, 6)}, "over ranks [1, 5]", "over ranks [1, 6]"),
        (SENDS, {"op": "0SEND_F9"}, "0SEND_F0", "0SEND_F9"),
        (RECEIVES, {"numel": 0}, "128 elements", "0 elements"),
        (HOST_QUEUE, {"op": "0B0"}, "the graph has 0F0", "the log has 0B0"),
    ],
)
def test_tampered_fact(queue, change, wanted, seen):
    entries = log()
    first = on_queue(entries, queue, 0)[0]
    entries[first] = dataclasses.replace(entries[first], **change)
    message = only(differences(entries))
    assert f"step 0, queue {queue}, position 0" in message
    in_graph, in_log = message.split("; ")[-1].split(": ", 1)[-1].split(", the log has ")
    assert wanted.removeprefix("the graph has ") in in_graph
    assert seen.removeprefix("the log has ") in in_log


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"numel": 1}, "1 elements float32"),
        ({"dtype": "float64"}, "elements float64"),
        ({"ranks": (0, 1, 2, 3)}, "over ranks [0, 1, 2, 3]"),
        ({"ranks": (1, 0)}, "over ranks [1, 0]"),
    ],
)
def test_tampered_collective(change, seen):
    entries = log()
    places = on_queue(entries)
    place = next(p for p, i in enumerate(places) if "REDUCE_SCATTER" in entries[i].op)
    entries[places[place]] = dataclasses.replace(entries[places[place]], **change)
    message = only(differences(entries))
    assert f"queue compute, position {place}" in message
    assert seen in message


def test_an_entry_on_a_channel_that_the_rank_has_not():
    entries = log()
    sent = entries[on_queue(entries, SENDS)[0]]
    entries.append(dataclasses.replace(sent, queue="forward 1->6"))
    assert "queue forward 1->6, position 0: the graph has nothing more" in only(differences(entries))


@pytest.mark.parametrize("step", [2, -1])
def test_an_entry_of_a_step_that_the_run_has_not(step):
    entries = log()
    entries.append(dataclasses.replace(entries[0], step=step))
    assert f"step {step}, queue compute, position 0: the graph has nothing more" in only(differences(entries))


def test_an_empty_log_differs_on_every_queue_of_every_step():
    assert len(differences([])) == NUM_STEPS * len(expected_facts(GRAPH, RANK, "float32"))


def test_collectives_carry_the_runs_dtype():
    found = list(compare_log(GRAPH, RANK, log(), num_steps=NUM_STEPS, dtype="float64"))
    assert [f.message.split(", ")[2] for f in found] == ["queue compute"] * NUM_STEPS


def test_the_witness_names_both_operations():
    entries = log()
    del entries[on_queue(entries, SENDS)[0]]
    (found,) = differences(entries)
    assert [(op.rank, op.op) for op in found.witness.ops] == [(RANK, "0SEND_F0"), (RANK, "0SEND_F1")]


def test_messages_of_one_operation_are_distinguished_by_their_position_on_the_channel():
    boundaries = [{"name": "hidden", "dims": "sbh"}, {"name": "labels", "dims": "bs", "dtype": "int64"}]
    graph = subject(boundaries=boundaries, schedule={"num_micro_batches": 1}).graph
    rows = list(graph.rank_ops(1))
    entries = [LogEntry(step, _queue_of(graph, i), str(graph.ops[i]), 0, 0) for step in (0, 1) for i in rows]
    assert [str(graph.ops[i]) for i in rows].count("1RECV_F0") == 2
    assert op_ids_of(graph, 1, entries) == rows * 2
    assert op_ids_of(graph, 1, [*entries, entries[0], LogEntry(0, HOST_QUEUE, "9F9", 0, 0)])[-2:] == [None, None]


def _queue_of(graph, op_id):
    return str(graph.channels[int(graph.channel[op_id])]) if graph.channel[op_id] >= 0 else HOST_QUEUE
