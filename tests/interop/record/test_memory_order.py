"""PP312 from the recorded strides: messages, and collectives that use the caller's memory."""

from __future__ import annotations

import pytest

from pipeproof.interop.traces.check_traces import check_log
from pipeproof.interop.traces.recorder import Call
from tests.interop.record.logs import end, ranks
from tests.interop.record.processes import run_ranks


def found(directory):
    return [(finding.code, finding) for finding in check_log(directory).findings]


def codes(directory):
    return [code for code, _ in found(directory)]


def message(directory, sent, wanted):
    """One message; each end is a shape and its strides, by default in C order."""
    first, second = ranks(directory, backend="nccl")
    first.wait(first.send(1, first.tensor(*sent[0], strides=sent[1])))
    second.wait(second.recv(0, second.tensor(*wanted[0], strides=wanted[1])))
    end(first, second)
    return found(directory)


ROWS, TRANSPOSED = ((8, 4), ()), ((8, 4), (1, 8))
EVERY_OTHER = ((8, 4), (8, 2))


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (ROWS, ROWS),
        (ROWS, ((32,), ())),  # another shape of the same elements in one order
        (TRANSPOSED, TRANSPOSED),
        (((8, 1, 4), (4, 99, 1)), ROWS),  # the stride of a dim of one element means nothing
        (((2, 4, 4), (1, 8, 2)), ((2, 16), (1, 2))),  # equal once adjacent dims are joined
    ],
)
def test_ends_that_store_their_elements_in_one_order(tmp_path, sent, wanted):
    assert message(tmp_path, sent, wanted) == []


@pytest.mark.parametrize(
    ("sent", "wanted", "line"),
    [(TRANSPOSED, ROWS, "rank_0"), (ROWS, TRANSPOSED, "rank_1"), (((32,), ()), TRANSPOSED, "rank_1"),
     (EVERY_OTHER, EVERY_OTHER, "rank_0"), (((8, 4), (0, 1)), ROWS, "rank_0")],
)  # fmt: skip
def test_ends_that_do_not(tmp_path, sent, wanted, line):
    ((code, finding),) = message(tmp_path, sent, wanted)
    assert code == "PP312"
    assert line in finding.location.file
    assert [op.rank for op in finding.witness.ops] == [0, 1]


def test_the_finding_names_the_call_its_shape_and_its_strides(tmp_path):
    ((_, finding),) = message(tmp_path, EVERY_OTHER, ROWS)
    first, second = finding.message.splitlines()
    assert first.startswith("rank 0: send 0->1 of float32[8, 4] at ")
    assert first.endswith("has shape [8, 4] and strides [8, 2] with holes")
    assert second.startswith("rank 1: recv 1<-0 of float32[8, 4] at ")
    assert second.endswith("has shape [8, 4] and strides [4, 1]")


def test_a_message_of_another_size_is_left_to_its_own_rule(tmp_path):
    assert [code for code, _ in message(tmp_path, TRANSPOSED, ((4, 4), ()))] == ["PP303"]


@pytest.mark.parametrize("op", ["all_reduce", "broadcast"])
@pytest.mark.parametrize(
    ("strides", "expected"),
    [([(), (), ()], []), ([(1, 8)] * 3, []), ([(), (1, 8), (1, 8)], ["PP312"]), ([(8, 2)] * 3, ["PP312"])],
)
def test_members_of_a_collective(tmp_path, op, strides, expected):
    for rank, strides_of_rank in zip(ranks(tmp_path, 3), strides, strict=True):
        tensor = rank.tensor(8, 4, strides=strides_of_rank)
        about = {"peer": 0} if op == "broadcast" else {"reduction": "sum"}
        rank.wait(rank.issue(Call(op, rank.group(), (tensor,), (tensor,), **about)))
        rank.end()
    assert codes(tmp_path) == expected


def test_a_collective_that_the_framework_copies(tmp_path):
    """``all_gather`` copies its tensors; a functional all_reduce has an input and no output of the caller."""
    for rank in ranks(tmp_path):
        turned = rank.tensor(8, 4, strides=(1, 8))
        rank.wait(rank.issue(Call("all_gather", rank.group(), (turned,), (rank.tensor(16, 4),))))
        rank.wait(rank.issue(Call("all_reduce", rank.group(), (rank.tensor(8, 4, strides=(8, 2)),), reduction="sum")))
        rank.end()
    assert codes(tmp_path) == []


@pytest.mark.needs_torch
def test_real_collectives_of_pytorch(tmp_path):
    """PyTorch's gloo sums the memory between the elements of a slice: the program asserts it."""
    run_ranks("torch_programs.py", "strided", 2, tmp_path / "logs")
    ((code, finding),) = found(tmp_path / "logs")
    assert code == "PP312"
    assert "all_reduce on group 0 [0, 1] of float32[4] at tests/interop/record/torch_programs.py:" in finding.message
    assert finding.message.count("has shape [4] and strides [2] with holes") == 2
