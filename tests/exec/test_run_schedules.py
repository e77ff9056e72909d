"""Kinds of schedules on all ranks, bit for bit; on real processes the memory of their messages; refusals."""

import pytest

from pipeproof.comm.accumulation_order import Accumulation, accumulation_of
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from tests.exec.processes import REPOSITORY, Run
from tests.exec.test_reference_bits import require_bits
from tests.exec.test_run import MATCHING
from tests.plans import plan_dict, subject

pytestmark = pytest.mark.needs_paddle

FILES = REPOSITORY / "tests" / "schedule" / "files"
SIZES = {"num_micro_batches": 4, "last_micro_batch_size": 1, "seq_lengths": [8, 4, 8, 6]}
TP = {"pp": 2, "tp": 2, "sequence_parallel": True}
PLANS = {
    "zb_v": {
        "topology": TP, "schedule": {"num_chunks": 2, **SIZES}, "loss": {"normalization": "mean_of_micro_batches"},
        "buffers": {"receive_slots": 4, "send_slots": 8, "free_output": "after_send_done"},
    },
    "dualpipe": {"schedule": SIZES},
    "chimera": {"topology": {"pp": 2, "dp": 2}, "run": {"dtype": "float64"}},
    "v_half": {"topology": TP, "transport": "full", "schedule": {"num_chunks": 2}},
    "zb_h2": {"topology": {"pp": 2, "tp": 2}, "transport": "partial", "schedule": SIZES},
    "dualpipe_v": {"schedule": {"num_chunks": 2}, "buffers": {"send_slots": 4, "receive_slots": 4}},
    "seq1f1b": {
        "topology": TP, "schedule": {"num_sequence_splits": 2, "last_micro_batch_size": 1, "seq_lengths": [8, 4, 8, 4]},
    },
    "interleaved_zb": {"schedule": {"num_chunks": 2}},
    "v_min": {"schedule": {"num_chunks": 2}},
    "optimal": {"schedule": {"num_chunks": 2}},
}  # fmt: skip
"""Sections of a kind's plan in addition to pp 2 and its name."""
ELSEWHERE = {plan.get("schedule", {}).get("kind", "1f1b") for plan in MATCHING.values()}
KINDS = sorted(SCHEDULE_KINDS.keys() - ELSEWHERE)


def ended(tmp_path, *options, **sections):
    return Run(tmp_path, plan_dict(**sections), *options).end()


def matched(tmp_path, **sections):
    """Return the report of a run that must match, in the order of sums of the plan, near the unpartitioned model."""
    run = ended(tmp_path, **sections)
    assert run.status == 0, run.output
    assert run.report["log_matches_graph"]
    assert all(step["bitwise"] for step in run.report["steps"])
    of_first_step = [gradient for gradient in run.report["gradients"] if gradient["step"] == 0]
    assert all(gradient["uncut_max_rel_diff"] <= run.report["parallel_bound"] for gradient in of_first_step)
    return run.report


@pytest.mark.slow(but=["zb_h2", "dualpipe_v"])
@pytest.mark.usefixtures("paddle_started")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_bits_of_the_reference_on_all_ranks(kind):
    sections = dict(PLANS.get(kind, {}))
    schedule = {"kind": kind, **sections.pop("schedule", {})}
    run = {"steps": 2, **sections.pop("run", {})}
    plan = subject(schedule=schedule, run=run, **sections).unfolded().plan
    steps = require_bits(plan)
    expected = {"dualpipe": "two_copies", "chimera": "two_copies", "seq1f1b": "reordered"}
    accumulation = accumulation_of(plan)
    assert accumulation == expected.get(kind, "in_order")
    if accumulation is Accumulation.TWO_COPIES:
        for gradient in (gradient for step in steps for gradient in step.gradients):
            assert {shard.rank for shard in gradient.shards} >= {0, 1}
            assert len({shard.md5 for shard in gradient.shards}) == 1, gradient.name


def test_slots_and_released_outputs_on_real_processes(tmp_path):
    sections = dict(PLANS["zb_v"])
    report = matched(tmp_path, schedule={"kind": "zb_v", **sections.pop("schedule")}, **sections)
    assert report["parallel_bound"] > 0.0


HEAD_ALONE = {
    "stages": [["embed", "layer.0", "layer.1", "layer.2", "layer.3", "norm"], ["head"]],
    "schedule": {"kind": "gpipe"},
    "run": {"steps": 1},
}  # fmt: skip
"""The weight gradient of the head reads the received tensor, after all forwards."""


@pytest.mark.slow
def test_slots_are_really_shared(tmp_path):
    """With one slot too few the check says so, and a run that does not listen computes with another's values."""
    run = ended(tmp_path, "--unsafe", **HEAD_ALONE, buffers={"receive_slots": 3})
    assert run.status == 1
    assert "error[PP504]" in run.output
    wrong = [g["name"] for g in run.report["gradients"] if g["md5"] != g["reference_md5"]]
    assert wrong == ["head.weight"]


BATCHED = """rank 0: 0F0 0SEND_F0 WAIT(0SEND_F0) 0F1 0SEND_F1{batch=0} 0RECV_B0{batch=0} WAIT(0SEND_F1) WAIT(0RECV_B0)
        0B0 0RECV_B1 WAIT(0RECV_B1) 0B1
rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{batch=0} 1RECV_F1{batch=0} WAIT(1SEND_B0) WAIT(1RECV_F1)
        1F1 1B1 1SEND_B1 WAIT(1SEND_B1)
"""


def refused(tmp_path, schedule, fact):
    run = ended(tmp_path, model={"num_layers": 8}, schedule=schedule)
    assert run.status == 2, run.output
    assert f"error[PP909]: {fact}, which is checked and simulated but not run yet" in run.output


@pytest.mark.slow
def test_transfers_in_batches_and_on_queues_of_other_names_match_the_reference(tmp_path):
    """The batch of rank 0 is on a separate queue together with the transfers after it."""
    file = tmp_path / "batched.txt"
    side = BATCHED.replace("0RECV_B1 ", "0RECV_B1{queue=side} ").replace(
        "{batch=0} WAIT(0", "{batch=0 queue=side} WAIT(0"
    )
    assert side.count("queue=side") == 2
    file.write_text(side)
    schedule = {"kind": "file", "path": str(file), "num_micro_batches": 2}
    assert matched(tmp_path, schedule=schedule)["accumulation"] == "in_order"


@pytest.mark.slow
def test_the_queue_of_a_stricter_runtime_is_executed(tmp_path):
    """Sends that cross hold each other up where all transfers of a pair share one FIFO; check says so, too."""
    schedule = {"kind": "1f1b", "num_micro_batches": 4}
    matched(tmp_path / "matches", schedule=schedule, transport={"queue": "direction"}, run={"steps": 1})
    run = ended(
        tmp_path / "hangs",
        "--unsafe",
        "--timeout",
        "5",
        schedule=schedule,
        transport={"queue": "pair"},
        run={"steps": 1},
    )
    assert run.status == 3, run.output
    assert "error[PP903]" in run.output


def test_queues_of_other_names_are_refused(tmp_path):
    schedule = {"kind": "file", "path": str(FILES / "zbv_2x2_comms.csv"), "num_chunks": 2}
    refused(tmp_path, schedule, "0UNSHARD runs on queue unshard")
