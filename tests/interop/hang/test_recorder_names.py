"""Names of operations in Flight Recorder dumps: each is the operation that a ring of the same program has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeproof.exec.monitor.ring import OPS, read_ring
from pipeproof.interop.hang.diagnose_hang import diagnose_dumps
from pipeproof.interop.hang.flight_recorder import read_dumps
from pipeproof.interop.hang.recorder_names import op_of
from tests.interop.hang.written import recorders

PROGRAM = Path(__file__).with_name("every_collective.py")
NAMES = {
    "all_reduce": "all_reduce", "allreduce_coalesced": "all_reduce", "sparse_all_reduce": "all_reduce",
    "all_gather": "all_gather", "_all_gather_base": "all_gather", "all_gather_single": "all_gather",
    "all_gather_v": "all_gather", "all_gather_into_tensor_coalesced": "all_gather", "ALLGATHER_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter", "reduce_scatter_v": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "REDUCE_SCATTER_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all", "all_to_all_single": "all_to_all", "all_to_all_v_single": "all_to_all",
    "alltoall": "all_to_all", "alltoall_base": "all_to_all",
    "broadcast": "broadcast", "_broadcast_oop": "broadcast", "reduce": "reduce", "_reduce_oop": "reduce",
    "gather": "gather", "scatter": "scatter", "barrier": "barrier", "all_reduce_barrier": "barrier",
}  # fmt: skip
NOT_IN_RINGS = {"split", "new_window"}


def read(tmp_path, *ranks):
    for recorder in ranks:
        recorder.write(tmp_path)
    return read_dumps(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_an_operation_of_rings(tmp_path, name):
    a, b = recorders(2)
    for recorder in (a, b):
        recorder.collective(name, "started")
    dump, _ = read(tmp_path, a, b)
    (entry,) = dump.launches[0].entries
    assert (entry.op, entry.kind) == (NAMES[name], name)
    assert entry.op in OPS
    assert entry.text == f"{NAMES[name]} #1 of group 0 (default_pg)"


@pytest.mark.needs_torch
def test_the_installed_pytorch_has_no_other_name():
    from torch.distributed.flight_recorder.components.types import COLLECTIVES, P2P

    assert {name for name in COLLECTIVES if op_of(name) not in OPS} == NOT_IN_RINGS
    assert set(P2P) == {"send", "recv"}


@pytest.mark.parametrize(
    ("first", "second"),
    [("_all_gather_base", "all_gather"), ("reduce_scatter", "_reduce_scatter_base"), ("all_to_all", "alltoall_base")],
)
def test_two_functions_of_one_operation_agree(tmp_path, first, second):
    a, b = recorders(2)
    a.collective(first, "completed")
    b.collective(second, "completed")
    read(tmp_path, a, b)
    assert diagnose_dumps(tmp_path).findings == ()


def test_collectives_of_a_block_match_by_their_position(tmp_path):
    a, b = recorders(2)
    for recorder, second in ((a, (6,)), (b, (5,))):
        recorder.collective("all_reduce", "completed")
        recorder.coalesced([("all_reduce", ((4,),)), ("_all_gather_base", (second,))], "started")
    dump, _ = read(tmp_path, a, b)
    assert [[entry.op for entry in launch.entries] for launch in dump.launches] == [
        ["all_reduce"], ["all_reduce", "all_gather"],
    ]  # fmt: skip
    assert [entry.number for entry in dump.launches[1].entries] == [2, 2]
    (finding,) = diagnose_dumps(tmp_path).findings
    assert finding.code == "PP932"
    assert "differs in size: 6 on rank 0, 5 on rank 1" in finding.message


def test_a_block_that_a_rank_left_a_collective_out_of_is_named(tmp_path):
    a, b = recorders(2)
    a.coalesced([("all_reduce", ((4,),)), ("all_reduce", ((4,),))], "started")
    b.coalesced([("all_reduce", ((4,),))], "completed")
    read(tmp_path, a, b)
    (finding,) = diagnose_dumps(tmp_path).findings
    assert (finding.code, finding.message.splitlines()[0]) == (
        "PP933",
        "rank 1 never issued its part of batch of 2 (all_reduce #1 of group 0 (default_pg), ..)",
    )


def test_a_block_whose_beginning_is_lost_is_not_compared(tmp_path):
    a, b = recorders(2)
    for recorder in (a, b):
        recorder.coalesced([("broadcast", ((4,),)), ("all_reduce", ((8,),))], "completed")
        recorder.collective("all_reduce", "completed")
    del a.entries[0]  # the buffer of rank 0 was full
    read(tmp_path, a, b)
    assert diagnose_dumps(tmp_path).findings == ()


def test_a_batch_of_messages_is_one_launch(tmp_path):
    a, b = recorders(2)
    a.batch([("send", 1), ("recv", 1)], "started")
    b.batch([("recv", 0), ("send", 0)], "started")
    dump, other = read(tmp_path, a, b)
    (launch,) = dump.launches
    assert [entry.text for entry in launch.entries] == ["send 0->1 #0", "recv 0<-1 #0"]
    assert all(entry.batched for entry in launch.entries)
    assert [entry.text for entry in other.launches[0].entries] == ["recv 1<-0 #0", "send 1->0 #0"]


def test_messages_without_their_ends_are_no_collectives(tmp_path):
    a, b = recorders(2)
    a._entry("recvAnySource", "0", "started", ((4,),), "Float")
    for recorder in (a, b):
        recorder.collective("all_reduce", "completed")
    dump, _ = read(tmp_path, a, b)
    assert [launch.text for launch in dump.launches] == ["all_reduce #1 of group 0 (default_pg)"]
    assert diagnose_dumps(tmp_path).findings == ()


@pytest.mark.needs_torch
def test_a_dump_and_a_ring_of_one_program_have_the_same_collectives(tmp_path):
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    ranks = [
        subprocess.Popen([sys.executable, str(PROGRAM), str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    dumps = read_dumps(tmp_path / "dumps")
    for dump in dumps:
        ring = read_ring(tmp_path / "rings" / f"rank_{dump.rank}.ring")
        recorded = [entry.op for launch in dump.launches for entry in launch.entries if entry.channel is None]
        issued = [op.op for op in ring.ops if not op.is_message]
        assert set(issued) == {*OPS} - {"send", "recv"}
        # gloo reduces whole tensors in place of a reduce-scatter, and records that
        assert recorded == ["all_reduce" if op == "reduce_scatter" else op for op in issued]
    assert diagnose_dumps(tmp_path / "dumps").findings == ()
