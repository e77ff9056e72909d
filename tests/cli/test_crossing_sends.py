"""A schedule whose sends cross: PyTorch's own checks accept it, and on its runtime over NCCL it hangs."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import invoke
from tests.plans import plan_file

pytestmark = pytest.mark.usefixtures("known_notes")

FILES = Path(__file__).parents[1] / "schedule" / "files"


def crossing():
    """PyTorch's zero-bubble schedule, but rank 0 receives behind its second send: both ranks now send first."""
    first, second = ((FILES / "zero_bubble_2x2_comms.csv").read_text()).splitlines()
    actions = first.split(",")
    actions.remove("2RECV_F0")
    actions.insert(actions.index("0SEND_F1") + 1, "2RECV_F0")
    return [actions, second.split(",")]


def check(tmp_path, lines, **transport):
    """(exit status, findings) of a plan with these actions."""
    (tmp_path / "s.csv").write_text("\n".join(map(",".join, lines)))
    schedule = {"kind": "file", "path": "s.csv", "num_chunks": 2, "num_micro_batches": 4}
    plan = plan_file(tmp_path / "plan.json", topology={"pp": 2}, schedule=schedule, transport=transport)
    result = invoke("check", "--format", "json", plan)
    return result.exit_code, json.loads(result.stdout)["findings"]


def test_crossing_sends_deadlock_where_two_ranks_share_a_fifo(tmp_path):
    status, findings = check(tmp_path, crossing(), queue="pair")
    assert status == 1
    (finding,) = (f for f in findings if f["severity"] == "error")
    assert finding["code"] == "PP401"
    assert Path(finding["location"]["file"]).name == "s.csv"
    assert {(op["rank"], op["op"]) for op in finding["witness"]["ops"]} == {
        (0, "2RECV_F0"), (0, "0SEND_F1"), (1, "1RECV_F1"), (1, "1SEND_F0"),
    }  # fmt: skip


def test_they_are_a_note_where_each_direction_has_a_queue_of_its_own(tmp_path):
    status, findings = check(tmp_path, crossing())
    assert status == 0
    (finding,) = findings
    assert (finding["code"], finding["severity"]) == ("PP411", "note")


@pytest.mark.needs_torch
def test_pytorchs_own_checks_accept_the_crossing_sends():
    from torch.distributed.pipelining import schedules

    actions = {rank: [schedules._Action.from_str(action) for action in line] for rank, line in enumerate(crossing())}
    known = {rank: [a for a in line if a.microbatch_index is not None] for rank, line in actions.items()}
    compute = {rank: [a for a in line if a.is_compute_op] for rank, line in known.items()}
    assert schedules._validate_schedule(compute, 2, 4, 4) == {0: 0, 1: 1, 2: 0, 3: 1}
    simulated = schedules._simulate_comms_compute(known, lambda stage: stage % 2, 4)
    assert all(set(map(str, known[rank])) <= set(map(str, simulated[rank])) for rank in known)
