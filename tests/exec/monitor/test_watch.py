"""Watched programs of both frameworks over gloo: the content of their rings."""

from pathlib import Path

import pytest

from pipeproof.exec.monitor.ring import End, OpState, read_ring
from tests.interop.record.processes import run_ranks, world

PROGRAMS = str(Path(__file__).with_name("watched_programs.py"))


@pytest.mark.needs_torch
def test_a_torch_program_is_watched_until_the_block_ends(tmp_path):
    run_ranks(PROGRAMS, "torch_ops", 2, tmp_path / "rings")
    first, second = (read_ring(tmp_path / "rings" / f"rank_{rank}.ring") for rank in range(2))
    ops = ["all_reduce", "send", "all_gather", "all_reduce", "barrier"]
    assert [op.op for op in first.ops] == ops
    assert [op.op for op in second.ops] == ["recv" if op == "send" else op for op in ops]
    assert {op.state for op in first.ops} == {OpState.DONE}
    assert [op.number for op in first.ops] == [0, 0, 1, 2, 3]
    send, receive = first.ops[1], second.ops[1]
    assert (send.peer, send.tag, send.num_inputs, send.shape, send.dtype) == (1, 4, 6, (2, 3), "float32")
    assert (receive.peer, receive.tag, receive.num_outputs, receive.stage, receive.micro_batch) == (0, 4, 6, 1, 5)
    assert (first.ops[2].num_inputs, first.ops[2].num_outputs) == (6, 12)
    assert first.header.end is End.ENDED
    assert {op.at.rpartition(":")[0] for op in first.ops} == {"tests/exec/monitor/watched_programs.py"}


@pytest.mark.needs_paddle
def test_a_paddle_program_is_watched(tmp_path):
    run_ranks(PROGRAMS, "paddle_ops", 2, tmp_path / "rings", environment=world())
    first, second = (read_ring(tmp_path / "rings" / f"rank_{rank}.ring") for rank in range(2))
    assert [op.op for op in first.ops][:2] == ["all_reduce", "send"]
    assert [op.op for op in second.ops][:2] == ["all_reduce", "recv"]
    assert {op.state for op in first.ops} == {OpState.DONE}
    assert second.ops[1].shape == (2, 3)
