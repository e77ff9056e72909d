"""Rings of a rank's last operations, written and read by one process."""

import os
import threading

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.exec.monitor.ring import HEADER_BYTES, STRINGS_BYTES, End, OpState, read_header, read_ring
from pipeproof.exec.monitor.ring_recorder import RingRecorder


def recorder(directory, **options):
    ring = RingRecorder(directory, 1, 4, "none 1.0", **options)
    ring.group("g", [1, 3], "gloo", "data")
    return ring


def test_operations_have_their_numbers_shapes_states_and_lines(tmp_path):
    ring = recorder(tmp_path)
    first = ring.issue("send", "g", 3, 7, "float32", (2, 3), 6, 0, {"kind": "F", "stage": 1, "micro_batch": 4})
    ring.issued(first)
    ring.waits((first,))
    ring.done((first,))
    second = ring.issue("send", "g", 3, 7, "float32", (1, 2, 3, 4, 5), 120, 0)
    ring.issued(second)
    ring.waits((second,))
    third = ring.issue("all_reduce", "g", None, 0, "bfloat16", (4,), 4, 4, blocks=True)
    ring.issued(third)
    ring.failed((third,), ValueError("x"))
    a, b, c = read_ring(tmp_path / "rank_1.ring").ops
    assert [a.state, b.state, c.state] == [OpState.DONE, OpState.WAITED, OpState.FAILED]
    assert [a.number, b.number, c.number] == [0, 1, 0]
    assert (a.op, a.peer, a.tag, a.shape, a.num_inputs, a.dtype) == ("send", 3, 7, (2, 3), 6, "float32")
    assert (a.kind, a.stage, a.micro_batch) == ("F", 1, 4)
    assert (b.kind, b.stage, b.micro_batch, b.shape, b.num_inputs) == ("", None, None, (), 120)
    assert (c.op, c.peer, c.num_outputs) == ("all_reduce", None, 4)
    assert a.group.ranks == (1, 3)
    assert a.at.rpartition(":")[0].endswith("test_ring.py")
    assert a.issued_ns <= a.waited_ns <= a.done_ns
    assert b.done_ns == 0


def test_a_ring_keeps_the_last_operations(tmp_path):
    ring = recorder(tmp_path, capacity=8)
    for _ in range(21):
        ring.done((ring.issue("all_reduce", "g", None, 0, "float32", (4,), 4, 4),))
    content = read_ring(tmp_path / "rank_1.ring")
    assert [op.number for op in content.ops] == list(range(13, 21))
    assert not content.is_whole


def test_only_the_named_groups_are_recorded(tmp_path):
    ring = recorder(tmp_path, only=frozenset({"h"}))
    ring.group("h", [0, 1], "gloo")
    assert ring.issue("barrier", "g", None, 0, "", (), 0, 0) == -1
    assert ring.issue("barrier", "h", None, 0, "", (), 0, 0) == 0
    assert [op.group.name for op in read_ring(tmp_path / "rank_1.ring").ops] == ["h"]


def test_the_heartbeat_shows_the_line_of_a_rank_without_progress_and_the_end_its_error(tmp_path):
    ring = recorder(tmp_path)
    ring.start()
    never = threading.Event()
    path = tmp_path / "rank_1.ring"
    for _ in range(600):
        never.wait(0.1)
        if read_header(path).stack:
            break
    header = read_header(path)
    assert any(line.startswith("*") and "test_ring.py" in line for line in header.stack)
    assert header.stack_ns > header.started_ns
    try:
        {}["loss"]
    except KeyError as error:
        ring.raised(error)
        ring.close(error)
    header = read_header(path)
    assert header.end is End.RAISED
    assert header.error.startswith("KeyError: 'loss' at ")
    assert "test_ring.py:" in header.error


def test_texts_beyond_the_table_are_left_out(tmp_path):
    ring = recorder(tmp_path)
    for number in range(STRINGS_BYTES // 1000):
        ring._ring.intern(str(number) + "x" * 1000)
    for number in range(300):  # the last thousand bytes
        ring._ring.intern(f"{number}")
    ring.issue("all_reduce", "g", None, 0, "float64", (4,), 4, 4)
    (op,) = read_ring(tmp_path / "rank_1.ring").ops
    assert (op.dtype, op.group.name) == ("", "g")


@pytest.mark.parametrize(
    "damage", [lambda raw: b"", lambda raw: b"x" * len(raw), lambda raw: raw[: HEADER_BYTES + 100]]
)
def test_files_that_are_no_rings_are_refused(tmp_path, damage):
    recorder(tmp_path)
    path = tmp_path / "rank_1.ring"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PlanFileError) as raised:
        read_ring(path)
    assert raised.value.findings[0].code == "PP952"


@pytest.mark.parametrize(
    ("place", "number", "reason"),
    [
        (28, 2**31, "a job has at most 1,048,576 ranks"),  # the number of ranks
        (24, 4, "it is of rank 4 of 4"),
        (552, 9, "its end has the unknown value 9"),
        (12, 2**24, "it is truncated, or has more than 268,435,456 bytes"),  # the number of records
    ],
)
def test_a_number_beyond_its_bound_is_refused_before_anything_is_made_of_it(tmp_path, place, number, reason):
    recorder(tmp_path)
    path = tmp_path / "rank_1.ring"
    raw = bytearray(path.read_bytes())
    raw[place : place + 4] = number.to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(PlanFileError, match=reason):
        read_ring(path)


def test_a_large_hole_and_a_pipe_are_refused(tmp_path):
    recorder(tmp_path)
    path = tmp_path / "rank_1.ring"
    with path.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(PlanFileError, match="it has more than"):
        read_ring(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PlanFileError, match="not a regular file"):
        read_ring(path)
