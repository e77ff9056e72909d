"""Verdicts from NCCL's RAS server: a fake server with output in the documented form."""

import json
import socketserver
import threading
from contextlib import contextmanager

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.exec.monitor.ras_verdict import check_ras
from pipeproof.interop.hang.nccl_ras import ask_ras, status_from_json
from tests.cli.commands import invoke


def ranks_json(counts, missing=(), size=None, hash_of="0x7c1f"):
    """A communicator of RAS's JSON: counts by rank and kind; process 100 + rank."""
    ok = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    place = {"host": "10.0.0.1", "nvml_dev": 0}
    return {
        "hash": hash_of, "secondary_hash": "0x1:0x2", "size": size or len(counts) + len(missing),
        "ranks_count": len(counts), "missing_ranks_count": len(missing),
        "ranks": [
            {"rank": index, "pid": 100 + rank, "cuda_dev": rank, **place, "status": ok, "collective_counts": launched}
            for index, (rank, launched) in enumerate(counts.items())
        ],
        "missing_ranks": [
            {"rank": rank, "pid": 100 + rank, "cuda_dev": rank, **place,
             "status": {"unresponsive": True, "considered_dead": dead}}
            for rank, dead in missing
        ],
    }  # fmt: skip


def status_of(*communicators):
    return status_from_json(json.dumps({"communicators": list(communicators)}), "test")


def verdict_of(*communicators):
    return check_ras(status_of(*communicators), status_of(*communicators), 5)


@contextmanager
def ras_server(output, *, json_works):
    """A server that answers as NCCL's does; yields its port."""
    answers = {"client protocol 2": "SERVER PROTOCOL 2", "set format json": "OK" if json_works else "ERROR: Unknown"}

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            for line in self.rfile:
                command = line.decode().strip().lower()
                if command.endswith("status"):
                    self.wfile.write(output.encode())
                    return
                self.wfile.write(f"{answers.get(command, 'OK')}\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def test_a_rank_that_launched_fewer_collectives_is_the_cause():
    verdict = verdict_of(ranks_json({0: {"AllReduce": 8}, 1: {"AllReduce": 7}, 2: {"AllReduce": 8}}))
    assert (verdict.status, verdict.kind, verdict.causes) == ("hang", "absent", (1,))
    assert [(wait.rank, wait.ranks) for wait in verdict.waits] == [(0, (1,)), (2, (1,))]
    assert "process 101" in verdict.findings[0].message


def test_counts_that_change_are_no_hang_and_equal_counts_neither():
    before = status_of(ranks_json({0: {"AllReduce": 8}, 1: {"AllReduce": 7}}))
    now = status_of(ranks_json({0: {"AllReduce": 9}, 1: {"AllReduce": 8}}))
    assert check_ras(before, now, 5).status == "running"
    assert verdict_of(ranks_json({0: {"AllReduce": 8}, 1: {"AllReduce": 8}})).status == "running"


def test_another_collective_on_one_rank_is_a_mismatch():
    counts = {rank: {"AllReduce": 8, "Broadcast": 1} for rank in range(3)}
    counts[1] = {"AllReduce": 7, "Broadcast": 2}
    verdict = verdict_of(ranks_json(counts))
    assert (verdict.kind, verdict.causes, verdict.findings[0].code) == ("mismatch", (1,), "PP932")
    extra = verdict_of(ranks_json({0: {"AllReduce": 8}, 1: {"AllReduce": 9}, 2: {"AllReduce": 8}}))
    assert (extra.kind, extra.causes) == ("mismatch", (1,))


def test_waits_are_followed_over_communicators_to_the_rank_that_waits_for_nobody():
    world = ranks_json({rank: {"AllReduce": 5 - (rank in (1, 3))} for rank in range(4)})
    pair = ranks_json({1: {"AllGather": 3}, 3: {"AllGather": 2}}, hash_of="0xab")
    verdict = verdict_of(world, pair)
    assert (verdict.kind, verdict.causes) == ("absent", (3,))


@pytest.mark.parametrize(("dead", "kind", "code"), [(False, "stopped", "PP954"), (True, "killed", "PP953")])
def test_a_process_that_does_not_answer(dead, kind, code):
    verdict = verdict_of(ranks_json({0: {"AllReduce": 8}}, missing=[(1, dead)]))
    assert (verdict.status, verdict.kind, verdict.causes, verdict.findings[0].code) == ("hang", kind, (1,), code)


def test_the_command_asks_the_server_twice(tmp_path):
    counts = {0: {"AllReduce": 8}, 1: {"AllReduce": 7}, 2: {"AllReduce": 8}}
    with ras_server(json.dumps({"communicators": [ranks_json(counts)]}), json_works=True) as port:
        result = invoke("job", "hang", "--ras", f"127.0.0.1:{port}", "--timeout", "0.5")
    assert (result.exit_code, "cause: rank" in result.stdout) == (1, True)


def test_an_address_without_a_server_and_other_output_are_refused():
    with ras_server("nothing", json_works=True) as port, pytest.raises(PlanFileError, match="JSON"):
        ask_ras("127.0.0.1", port)
    with ras_server("nothing", json_works=False) as port, pytest.raises(PlanFileError, match=r"2\.28\.7"):
        ask_ras("127.0.0.1", port)
    result = invoke("job", "hang", "--ras", f"127.0.0.1:{port}")
    assert (result.exit_code, "PP956" in result.output + result.stderr) == (2, True)
