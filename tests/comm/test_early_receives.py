"""``transport.recv_order``: which receives are posted early, that nothing else moves, and the effect on robustness."""

import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Request
from pipeproof.schedule.ops import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check, check_subject
from pipeproof.verify.deadlock.deadlock_verdict import conditions
from pipeproof.verify.lifetime.slot_rule import smallest_slots
from tests.cli.commands import invoke
from tests.comm.test_receive_order import USED_BACKWARDS, custom, orders
from tests.plans import plan_dict, subject
from tests.schedule.drawn import generated, plan_of, requests
from tests.verify.test_every_schedule import plan_of as every_plan

pytestmark = pytest.mark.usefixtures("known_notes")

some = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
EARLY = ["prefetch_one", "send_order"]


def program(one, rank):
    """A rank's program without slices, gathers and the end of the step."""
    kinds = COMPUTE_KINDS | RECV_KINDS | SEND_KINDS
    ops = [one.graph.ops[i] for i in one.graph.rank_ops(rank)]
    return " ".join(str(op) for op in ops if (op.target or op).kind in kinds)


def of_1f1b(recv_order, rank, **sections):
    schedule = {"kind": "1f1b", "num_micro_batches": 3}
    return program(
        subject(topology={"pp": 2}, schedule=schedule, transport={"recv_order": recv_order}, **sections), rank
    )


def test_1f1b_has_its_forwards_received_one_ahead_and_its_backwards_behind_what_it_sends_first():
    """Forwards of both ranks end when backwards do, and of equal ones the lower rank's message is first."""
    assert of_1f1b("prefetch_one", 1) == (
        "1RECV_F0 WAIT(1RECV_F0) 1F0 1RECV_F1 1B0 1SEND_B0 WAIT(1RECV_F1) 1F1 1RECV_F2 1B1 1SEND_B1 "
        "WAIT(1RECV_F2) 1F2 1B2 1SEND_B2 WAIT(1SEND_B0) WAIT(1SEND_B1) WAIT(1SEND_B2)"
    )
    assert of_1f1b("prefetch_one", 0) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 WAIT(0RECV_B0) WAIT(0SEND_F0) 0B0 0F2 0SEND_F2 0RECV_B1 "
        "0RECV_B2 WAIT(0RECV_B1) WAIT(0SEND_F1) 0B1 WAIT(0RECV_B2) WAIT(0SEND_F2) 0B2"
    )


def test_as_sent_is_as_early_as_the_order_of_messages_lets_it():
    """F1 is sent before B0, and so is received before anything is computed; just in time it comes after the B0."""
    assert of_1f1b("send_order", 1).startswith("1RECV_F0 1RECV_F1 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 1RECV_F2 ")
    assert of_1f1b("just_in_time", 1).startswith("1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 1RECV_F1 WAIT(1RECV_F1) ")


def test_a_pair_that_overlaps_is_one_computation_ahead():
    schedule = {"kind": "dualpipe", "num_micro_batches": 4}
    one = subject(topology={"pp": 2}, schedule=schedule, transport={"recv_order": "prefetch_one"})
    graph = one.graph
    pairs = 0
    for rank in range(graph.num_ranks):
        for first, second in pairwise(graph.rank_ops(rank)):
            if graph.batch[first] == graph.batch[second] != NONE:
                pairs += 1
    assert pairs > 0
    assert check_subject(one).errors == ()


@st.composite
def plans(draw):
    """A plan of any kind of schedule, and the same with early receives."""
    kind, request = draw(requests(max_ranks=4, max_chunks=3))
    generated(kind, request)
    plan = plan_of(kind, request)
    tp = draw(st.sampled_from([1, 2]))
    plan["topology"]["tp"] = tp
    transport = {"forward": draw(st.sampled_from(["full", "partial"])), "backward": "full"}
    early = plan | {"transport": transport | {"recv_order": draw(st.sampled_from(EARLY))}}
    return plan | {"transport": transport}, early


def positions(graph, rank):
    """(computations before it, op id) of every row of a rank."""
    counted, result = 0, []
    for op_id in graph.rank_ops(rank):
        result.append((counted, op_id))
        counted += graph.ops[op_id].kind in COMPUTE_KINDS
    return result


def receives(graph, rank):
    """For each receive of a rank, by channel and place there, the computations before it."""
    return {
        (str(graph.channels[int(graph.channel[i])]), int(graph.position[i])): (before, str(graph.ops[i]))
        for before, i in positions(graph, rank)
        if graph.ops[i].kind in RECV_KINDS
    }


@given(plans())
@some
def test_receives_alone_move_and_none_becomes_later_or_overtakes_another_of_its_channel(both):
    usual, early = (lower(plan_from_dict(plan).spec).graph for plan in both)
    ahead = 1 if both[1]["transport"]["recv_order"] == "prefetch_one" else usual.num_ops
    for rank in range(usual.num_ranks):
        others = [
            [str(graph.ops[i]) for i in graph.rank_ops(rank) if graph.ops[i].kind not in RECV_KINDS]
            for graph in (usual, early)
        ]
        assert others[0] == others[1]
        then, now = receives(usual, rank), receives(early, rank)
        assert then.keys() == now.keys()
        for key, (before, op) in then.items():
            assert now[key][1] == op
            assert now[key][0] <= before
            assert (before - now[key][0]) <= 2 * ahead  # a pair that overlaps is two


@given(plans())
@some
def test_no_rule_finds_an_error_and_as_sent_no_channel_model_makes_a_schedule_wait_for_itself(both):
    usual, early = (check(plan_from_dict(plan)) for plan in both)
    assert early.errors == ()
    assert {finding.code for finding in early.findings} - {"PP411"} == {f.code for f in usual.findings} - {"PP411"}
    if both[1]["transport"]["recv_order"] == "send_order":
        assert conditions(early.subject) == ()


ROBUST_ONE_AHEAD = ["gpipe", "1f1b", "zb_h1", "v_min", "chimera", "seq1f1b"]


@pytest.mark.parametrize("name", ROBUST_ONE_AHEAD)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 5), (4, 4), (4, 9)])
def test_one_ahead_some_schedules_are_robust_that_are_not_just_in_time(name, p, m):
    num_chunks = 2 if name == "v_min" else 1
    schedule = {"kind": name, "num_micro_batches": m, "num_chunks": num_chunks}
    sizes = {"model": {"num_layers": p * num_chunks}, "topology": {"pp": p}, "schedule": schedule}
    if name == "seq1f1b":
        schedule["num_sequence_splits"] = 2
    failing = {
        recv_order: conditions(check_subject(subject(**sizes, transport={"recv_order": recv_order})).subject)
        for recv_order in ("just_in_time", "prefetch_one")
    }
    assert failing["prefetch_one"] == ()
    assert bool(failing["just_in_time"]) == (name != "gpipe")


@pytest.mark.parametrize("recv_order", EARLY)
@given(orders)
@settings(max_examples=15, deadline=None)
def test_any_order_of_use_is_proved(recv_order, drawn):
    first, second, third, fourth = drawn
    programs = [
        [*(f"0F{k}" for k in first), *(f"0B{k}" for k in second)],
        [*(f"1F{k}" for k in third), *(f"1B{k}" for k in fourth)],
    ]
    assert check_subject(custom(programs, transport={"recv_order": recv_order})).errors == ()


@pytest.mark.parametrize("recv_order", EARLY)
def test_tp_ranks_that_hold_other_parts_behind_a_boundary(recv_order):
    """Each receives in several messages, which move together."""
    moved = {"name": "x", "dims": "sbh", "tp": "sharded(s)", "receiver_tp": "sharded(h)"}
    sections = {"topology": {"pp": 2, "tp": 2}, "boundaries": [{"name": "hidden", "dims": "sbh"}, moved]}
    usual, early = subject(**sections), subject(**sections, transport={"recv_order": recv_order})
    assert check_subject(early).errors == ()
    then, now = (program(one, 2).split() for one in (usual, early))
    assert sorted(then) == sorted(now)
    messages = now.count("1RECV_F1")
    assert messages > 1
    first = now.index("1RECV_F1")
    assert now[first : first + messages] == ["1RECV_F1"] * messages
    assert first < now.index("1B0") < then.index("1RECV_F1")


@pytest.mark.parametrize("recv_order", EARLY)
def test_a_program_that_never_ends_is_for_the_rules(recv_order):
    programs = [["0F0", "0B1", "0B0"], ["1F1", "1F0", "1B0", "1B1"]]
    report = check_subject(custom(programs, transport={"recv_order": recv_order}))
    assert {finding.code for finding in report.errors} >= {"PP121"}


@pytest.mark.parametrize("recv_order", EARLY)
def test_what_is_used_in_another_order_than_it_is_sent(recv_order):
    one = custom(USED_BACKWARDS, transport={"recv_order": recv_order})
    assert program(one, 1).startswith("1RECV_F0 1RECV_F1 ")
    assert check_subject(one).certificate is not None


@pytest.mark.needs_torch
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 8])
def test_pytorch_puts_the_transfers_of_1f1b_over_two_ranks_into_the_same_order(num_micro_batches):
    """Over more ranks its order of all messages is another one: it counts computations, whole backwards as one."""
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv

    for kind, post in (("gpipe", "send_order"), ("1f1b", "send_order"), ("1f1b", "prefetch_one")):
        schedule = {"kind": kind, "num_micro_batches": num_micro_batches}
        one = subject(topology={"pp": 2}, schedule=schedule, transport={"recv_order": post})
        actions = {rank: [_Action.from_str(str(op)) for op in ops] for rank, ops in enumerate(one.plan.programs)}
        for rank, theirs in _add_send_recv(actions, lambda stage: stage, 2).items():
            ours = program(one, rank).split()
            assert [op for op in ours if "_" in op and "WAIT" not in op] == [str(a) for a in theirs if "_" in str(a)]
            if (kind, post, rank) == ("1f1b", "prefetch_one", 1):
                assert [op for op in ours if "WAIT" not in op] == [str(action) for action in theirs]


# --- every kind of schedule ---


@pytest.mark.parametrize("name", SCHEDULE_KINDS)
def test_every_kind_is_right_and_posted_as_sent_robust(name):
    kind = SCHEDULE_KINDS[name]
    num_checked = 0
    for request in every_size(kind):
        for recv_order in EARLY:
            try:
                report = check(plan_from_dict({**every_plan(kind, request), "transport": {"recv_order": recv_order}}))
            except BadPlanError as refusal:
                if {finding.code for finding in refusal.findings} != {"PP140"}:
                    raise
                continue
            assert {finding.code for finding in report.findings} <= {"PP411"}, request
            if recv_order == "send_order":
                assert conditions(report.subject) == ()
            num_checked += 1
    assert num_checked


def every_size(kind):
    for num_ranks, num_micro_batches in ((1, 2), (2, 3), (3, 6), (4, 3), (4, 9), (4, 8)):
        for variant in kind.variants or (None,):
            for num_chunks in {kind.min_chunks, kind.max_chunks or 2}:
                splits = 2 if kind.splits_sequences else 1
                yield Request(num_ranks, num_micro_batches, num_chunks, splits, variant)


# --- schedules from files ---

COMPUTES = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n"
OWN = """\
rank 0: 0F0 0SEND_F0 0RECV_B0 WAIT(0RECV_B0) WAIT(0SEND_F0) 0B0
rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 WAIT(1SEND_B0)
"""


def checked_file(tmp_path, text, num_micro_batches):
    (tmp_path / "steps.txt").write_text(text)
    schedule = {"kind": "file", "path": "steps.txt", "num_micro_batches": num_micro_batches}
    plan = plan_dict(schedule=schedule, transport={"recv_order": "prefetch_one"})
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return invoke("check", tmp_path / "plan.json")


def test_computations_of_a_file_have_receives_put_in(tmp_path):
    result = checked_file(tmp_path, COMPUTES, 2)
    assert result.exit_code == 0, result.output
    assert "PP411" not in result.output


def test_a_file_with_its_own_receives_is_not_moved(tmp_path):
    result = checked_file(tmp_path, OWN, 1)
    assert result.exit_code == 2, result.output
    assert "error[PP106]: `transport.recv_order: prefetch_one` moves no receives of a schedule that has its own" in (
        result.stderr
    )


# --- memory ---


@pytest.mark.parametrize(("recv_order", "enough"), [("just_in_time", 2), ("prefetch_one", 3), ("send_order", 3)])
def test_a_receive_in_flight_needs_a_slot_more(recv_order, enough):
    """The second of three ranks of 1F1B works on two inputs at a time, and one ahead a third is coming in."""
    one = {"topology": {"pp": 3}, "transport": {"recv_order": recv_order}}
    assert smallest_slots(subject(**one), incoming=True) == enough
    for num_slots in (enough, enough - 1):
        report = check_subject(subject(**one, buffers={"receive_slots": num_slots}))
        assert {finding.code for finding in report.errors} == (set() if num_slots == enough else {"PP504"})
