"""``pipeproof simulate --engine fast``: each reason to leave a plan to the reference model, through the command."""

import json
from dataclasses import replace

import pytest

from pipeproof.comm.backends import declared_backend
from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.cli.commands import invoke
from tests.plans import plan_dict, plan_file

ON_A_QUEUE = """\
rank 0: 0F0 WAIT(0F0){queue=out} 0SEND_F0{queue=out} 0RECV_B0 WAIT(0RECV_B0) WAIT(0SEND_F0) 0B0
rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 WAIT(1SEND_B0)
"""
IN_A_BATCH = """\
rank 0: 0F0 0SEND_F0{batch=0} 0RECV_B0{batch=0} WAIT(0RECV_B0) WAIT(0SEND_F0) 0B0
rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 WAIT(1SEND_B0)
"""
NETWORK = {"ranks_per_node": 2, "node": {"bandwidth": 1, "latency_us": 0}}
REFUSED = {
    "one FIFO for all transfers of a rank": (
        {"transport": {"queue": "rank"}, "cost": {"p2p": "backend"}, "schedule": {"kind": "gpipe"}}, None,
        "the engine has no channel model one FIFO per rank at rendezvous",
    ),
    "a queue of another name": (
        {"schedule": {"kind": "file", "path": "steps.txt", "num_micro_batches": 1}}, ON_A_QUEUE,
        "operations are on named queues other than reductions and copies",
    ),
    "transfers in one call": (
        {"schedule": {"kind": "file", "path": "steps.txt", "num_micro_batches": 1}}, IN_A_BATCH,
        "operations are called in batches",
    ),
    "receives that slow computations down": (
        {"transport": {"recv_order": "prefetch_one"}, "cost": {"recv_slowdown": 0.1}}, None,
        "computations are slowed down by pending receives",
    ),
    "a message that may overtake the one before": (
        {"schedule": {"last_micro_batch_size": 1}, "cost": {"network": NETWORK}}, None,
        "messages of one channel take different times",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_the_fast_engine_says_why_and_auto_takes_the_model(name, tmp_path):
    sections, steps, reason = REFUSED[name]
    if steps is not None:
        (tmp_path / "steps.txt").write_text(steps)
    plan = plan_file(tmp_path / "plan.json", **sections)
    refused = invoke("simulate", plan, "--engine", "fast")
    assert refused.exit_code == 2, refused.output
    assert f"error[PP153]: the fast engine does not support this plan: {reason}" in " ".join(refused.stderr.split())
    assert "use the engine `auto`" in refused.stderr
    taken = invoke("simulate", plan, "--format", "json")
    assert taken.exit_code == 0, taken.output
    assert json.loads(taken.stdout)["engine"] == "simpy"


def test_what_a_rendezvous_does_not_refuse(tmp_path):
    """There, a message that is faster than the one before it begins after it."""
    sections = {"schedule": {"last_micro_batch_size": 1}, "cost": {"network": NETWORK, "p2p": "rendezvous"}}
    plan = plan_file(tmp_path / "plan.json", **sections)
    assert invoke("simulate", plan, "--engine", "fast").exit_code == 0


def test_bounded_buffers_are_left_to_the_model():
    """No backend's table has them; a table of one's own may."""
    plan = lower(plan_from_dict(plan_dict(cost={"p2p": "backend"})).spec)
    table = replace(declared_backend(plan.spec), send_completes="slots")
    assert simulate(plan, table).engine == "simpy"
    with pytest.raises(BadPlanAtError, match="with 1 slot"):
        simulate(plan, table, engine="fast")
