"""Paths of NCCL, from logs in the formats of its versions."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from pipeproof.exec.measure.link_curve import fit_link
from pipeproof.exec.placement.nccl_paths import NcclLog, nccl_paths
from pipeproof.exec.rehearse import rehearsal_console
from pipeproof.exec.rehearse.rehearsal_edges import Edge
from pipeproof.exec.rehearse.rehearsal_report import Rehearsal
from tests.plans import subject

# One H200 with PyTorch 2.11: two processes that NCCL takes for two hosts, shortened.
V2_28 = """\
vm:527:527 [0] NCCL INFO NCCL version 2.28.9+cuda13.0
vm:527:527 [0] NCCL INFO ncclCommSplit comm 0x302fa8c0 rank 1 nranks 2 cudaDev 0 nvmlDev 0 busId 60 - Init START
vm:527:527 [0] NCCL INFO Channel 00/02 : 0 1
vm:527:527 [0] NCCL INFO Channel 01/02 : 0 1
vm:527:527 [0] NCCL INFO Trees [0] 1/-1/-1->0->-1 [1] -1/-1/-1->0->1
vm:527:527 [0] NCCL INFO Ring 00 : 1 -> 0 -> 1
vm:527:527 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[0] [receive] via NET/Socket/0/Shared
vm:527:527 [0] NCCL INFO Connected to proxy localRank 0 -> connection 0x7f8f28004fb8
vm:527:527 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [send] via NET/Socket/0
vm:527:527 [0] NCCL INFO Channel 01/0 : 1[0] -> 0[0] [send] via NET/Socket/0
vm:527:527 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 0
"""
V2_21 = """\
node-a:1:9 [1] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
node-a:1:9 [1] NCCL INFO Channel 01/0 : 3[1] -> 2[0] via P2P/CUMEM/read
node-a:1:9 [1] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [receive] via NET/IB/2/GDRDMA
node-a:1:9 [1] NCCL INFO Channel 01/0 : 1[1] -> 3[1] [receive] via NET/IBext_v8/0(3)/GDRDMA/Shared
node-a:1:9 [1] NCCL INFO Channel 00 : 3[1] -> 7[5] via SHM/direct/direct
"""
V2_9 = """\
node-a:1:9 [1] NCCL INFO Channel 00/02 :    0   1   2   3
node-a:1:9 [1] NCCL INFO Channel 00 : 2[c7000] -> 0[87000] [send] via NET/IB/5/GDRDMA
node-a:1:9 [1] NCCL INFO Channel 00 : 0[87000] -> 1[8d000] via P2P/IPC/read
node-a:1:9 [1] NCCL INFO Channel 01 : 1[8d000] -> 3[ca000] via P2P/indirect/2[c7000]
node-a:1:9 [1] NCCL INFO Channel 01 : 3[ca000] -> 1[8d000] via direct shared memory
"""
V2_4 = """\
node-a:1:9 [0] NCCL INFO Channel 00 :    0   1
node-a:1:9 [0] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/Socket/0
node-a:1:9 [0] NCCL INFO Ring 01 : 1[1] -> 2[2] via P2P/direct pointer
"""


@pytest.mark.parametrize(
    ("log", "paths"),
    [
        (V2_28, {(0, 1): ("NET/Socket/0/Shared",), (1, 0): ("NET/Socket/0",)}),
        (
            V2_21,
            {
                (3, 2): ("P2P/CUMEM", "P2P/CUMEM/read"),
                (1, 3): ("NET/IB/2/GDRDMA", "NET/IBext_v8/0(3)/GDRDMA/Shared"),
                (3, 7): ("SHM/direct/direct",),
            },
        ),
        (
            V2_9,
            {
                (2, 0): ("NET/IB/5/GDRDMA",),
                (0, 1): ("P2P/IPC/read",),
                (1, 3): ("P2P/indirect/2[c7000]",),
                (3, 1): ("direct shared memory",),
            },
        ),
        (V2_4, {(0, 1): ("NET/Socket/0",), (1, 2): ("P2P/direct pointer",)}),
        ("", {}),
    ],
    ids=["2.28", "2.21", "2.9", "2.4", "empty"],
)
def test_connections_of_each_version(log, paths):
    assert nccl_paths(log) == paths


@pytest.mark.parametrize(
    "line",
    [
        "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send]",
        "NCCL INFO Channel 00/0 : 0[0] => 1[0] via P2P/IPC",
        "NCCL INFO Ring 00 : a -> b via P2P/IPC",
    ],
)
def test_a_channel_in_an_unknown_format_is_refused(line):
    with pytest.raises(ValueError, match="line 2 "):
        nccl_paths(f"NCCL INFO something else\nh:1:1 [0] {line}\n")


def test_lines_belong_to_the_channel_that_was_connecting(tmp_path):
    environment, file = {}, tmp_path / "50%.nccl"
    log = NcclLog.start(file, environment)
    assert environment["NCCL_DEBUG_FILE"].endswith("/50%%.nccl")
    assert environment["NCCL_DEBUG"] == "INFO"
    log.begin("joining")
    file.write_text(V2_9)
    log.begin("connecting forward 0->1")
    with file.open("a") as stream:
        stream.write(V2_28)
    log.begin("connecting backward 1->0")
    log.begin("connecting forward 1->2")
    with file.open("a") as stream:
        stream.write("NCCL INFO Channel 00/0 : new\n")
    phases = [f"connecting {name}" for name in ("forward 0->1", "backward 1->0", "forward 1->2")]
    assert log.transports(phases) == {"connecting forward 0->1": "NET/Socket/0/Shared, NET/Socket/0"}


def test_a_user_who_reads_the_log_keeps_it(tmp_path):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"):
        environment = {name: "VERSION"}
        assert NcclLog.start(tmp_path / "log", environment) is None
        assert environment == {name: "VERSION"}


def rehearsed(paths):
    """A rehearsal of two ranks with one measured edge."""
    plan = subject().unfolded()
    edge = Edge("forward 0->1", 0, 1, fit_link([(8, 10.0), (10**6, 1000.0)]), ())
    return Rehearsal(plan, "0" * 64, True, 1, {}, (), (edge,), None, {"n0": 1.0}, paths)


def test_edges_have_a_column_for_paths_where_there_are_some():
    for paths, headings in (({}, ["GB/s", "fit error"]), ({"forward 0->1": "P2P/CUMEM"}, ["fit error  path"])):
        console = Console(file=io.StringIO(), width=200)
        rehearsal_console._print_edges(rehearsed(paths), console)
        text = console.file.getvalue()
        assert all(heading in text for heading in headings)
        assert ("path" in text) is ("P2P/CUMEM" in text) is bool(paths)


def test_paths_are_in_the_report():
    result = rehearsed({"forward 0->1": "P2P/CUMEM"})
    assert result.to_json()["paths"] == {"forward 0->1": "P2P/CUMEM"}
    assert "paths" not in replace(result, paths={}).to_json()
