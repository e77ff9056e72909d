"""Names of recorded operations by the plan that the job executes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeproof.exec.monitor.check_job import check_job
from pipeproof.exec.monitor.follow import Follower, follow
from pipeproof.exec.monitor.hang_page import hang_html
from pipeproof.exec.monitor.job import JobNow, read_job, ring_files
from pipeproof.exec.monitor.plan_ops import PlanOps
from pipeproof.exec.monitor.ring_recorder import RingRecorder
from pipeproof.schedule.ops import TRANSFER_KINDS
from pipeproof.specs.load_plan import plan_from_dict

PLAN = {
    "pipeproof": 1,
    "model": {
        "kind": "layers",
        "layers": [
            {"name": "stage.0", "kind": "A", "out": [{"shape": ["b", 64], "dtype": "float32", "gradient": True}]},
            {"name": "stage.1", "kind": "B"},
        ],
    },
    "topology": {"pp": 2},
    "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 4},
    "run": {"backend": "torch", "device": "cpu", "dtype": "float32"},
    "loss": {"normalization": "mean_of_micro_batches"},
}


def ops_of(changes=None):
    return PlanOps(plan_from_dict(PLAN | (changes or {})))


class PlannedRank:
    """A rank that issues the messages of the plan, all done but the last one."""

    def __init__(self, directory, rank, names, *, capacity=64):
        self.graph, self.rank = names._graph, rank
        self.ring = RingRecorder(directory, rank, 2, "none 1.0", capacity=capacity)
        self.ring.group("0", range(2), "gloo")

    def issue(self, op, peer, size=256):
        sent, received = (size, 0) if op == "send" else (0, size)
        return self.ring.issue(op, "0", peer, 0, "float32", (size,), sent, received)

    def run(self, num_steps, until=None):
        """Issue the transfers of some steps; in the last one up to the operation ``until``, which stays open."""
        for step in range(num_steps):
            for op_id in self.graph.rank_ops(self.rank):
                op = self.graph.ops[op_id]
                if op.kind not in TRANSFER_KINDS:
                    continue
                seq = self.issue("send" if "SEND" in str(op) else "recv", 1 - self.rank)
                self.ring.waits((seq,))
                if step == num_steps - 1 and str(op) == until:
                    return
                self.ring.done((seq,))


def job_of(directory):
    now = read_job(ring_files(directory))
    return JobNow(now.ranks, now.missing, now.now_ns + 10**10)


@pytest.mark.parametrize("capacity", [64, 16])  # with 16 the ring has lost the first step
def test_a_wait_has_its_operation_of_the_plan_and_the_cause_its_position(tmp_path, capacity):
    names = ops_of()
    first, second = (PlannedRank(tmp_path, rank, names, capacity=capacity) for rank in range(2))
    first.run(3, until="0RECV_B2")
    second.run(2)
    for op in ("recv", "send") * 2 + ("recv",):  # of the third step, up to 1RECV_F2
        second.ring.done((second.issue(op, 0),))
    verdict = check_job(job_of(tmp_path), plan=names)
    assert (verdict.kind, verdict.causes) == ("absent", (1,))
    (wait,) = verdict.waits
    assert wait.meaning == "0RECV_B2 of the plan: gradient of micro-batch 2, stage 0, step 2"
    assert verdict.plan == ("rank 1: after 1RECV_F2 in step 2, before 1SEND_B2 it is in 1F2, 1B2",)
    assert "  by the plan, rank 1: after 1RECV_F2" in "\n".join(verdict.lines())
    assert verdict.to_json()["plan"] == list(verdict.plan)
    job = job_of(tmp_path)
    assert "0RECV_B2" in hang_html(verdict, job, names)
    assert ">0RECV_B2<" not in hang_html(verdict, job)


def test_an_operation_that_differs_from_the_plan_is_named_with_the_difference(tmp_path):
    names = ops_of()
    rank = PlannedRank(tmp_path, 0, names)
    rank.issue("send", 1, size=128)
    (op,) = job_of(tmp_path).ranks[0].ring.ops
    text = names.name(job_of(tmp_path).ranks[0].ring, op).text
    assert text.startswith("0SEND_F0 of the plan")
    assert text.endswith("with 256 elements in the plan, and the job has 128")


@pytest.mark.parametrize(
    ("issues", "reason"),
    [
        ([("send", 1, 128), ("send", 1, 256)], "send #0 before it is 0SEND_F0 with 256 elements"),
        ([("all_reduce", None, 1)], "the plan has no collective of ranks 0, 1"),
        ([("recv", None, 1)], "a receive from any rank"),
    ],
)
def test_a_name_that_is_not_certain_is_refused_with_its_reason(tmp_path, issues, reason):
    names = ops_of()
    rank = PlannedRank(tmp_path, 0, names)
    for issue in issues:
        rank.issue(*issue)
    ring = job_of(tmp_path).ranks[0].ring
    name = names.name(ring, ring.ops[-1])
    assert name.planned is None
    assert reason in name.text


def test_a_job_of_another_number_of_ranks_and_a_channel_of_both_directions(tmp_path):
    layers = [{"name": f"stage.{i}", "kind": "A", "out": [{"shape": ["b", 64], "dtype": "float32", "gradient": True}]}
              for i in range(3)]  # fmt: skip
    interleaved = PLAN | {
        "model": {"kind": "layers", "layers": [*layers, {"name": "stage.3", "kind": "B"}]},
        "schedule": {"kind": "interleaved", "num_micro_batches": 4, "micro_batch_size": 4, "num_chunks": 2},
    }
    names = PlanOps(plan_from_dict(interleaved))
    rank = PlannedRank(tmp_path, 1, names)
    rank.issue("recv", 0)
    ring = job_of(tmp_path).ranks[0].ring
    assert "both directions come from this rank" in names.name(ring, ring.ops[0]).text
    with rank.ring.mark(stage=3, micro_batch=2, kind="F"):
        rank.issue("recv", 0)
    ring = job_of(tmp_path).ranks[0].ring
    assert names.name(ring, ring.ops[1]).text.startswith("3RECV_F2 of the plan: activation of micro-batch 2, stage 3")
    other = PlanOps(plan_from_dict(PLAN | {"topology": {"pp": 2, "dp": 2}}))
    assert "the plan has 4 ranks, the job 2" in other.name(ring, ring.ops[0]).text


@pytest.mark.needs_torch
def test_a_script_that_knows_nothing_of_the_plan(tmp_path):
    root = Path(__file__).parents[3]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    rings = tmp_path / "rings"
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("planned_job.py")), str(rank), str(rings)],
            cwd=root, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        followed = follow(Follower(rings, 2.0, plan=ops_of()), report=lambda verdict, job: None, timeout_s=120)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert followed is not None
    verdict, _ = followed
    assert verdict.status == "hang"
    (wait,) = (wait for wait in verdict.waits if wait.rank == 0)
    assert wait.meaning.endswith("gradient of micro-batch 3, stage 0, step 2")
    assert verdict.causes == (1,)
    assert "after 1RECV_F3 in step 2, before 1SEND_B3 it is in 1F3" in verdict.plan[0]
