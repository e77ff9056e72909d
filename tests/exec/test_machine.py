"""The interpreter of a rank's program, driven in one process with a scheduler that chooses at random."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.exec.rank.machine import Begin, Finished, ProtocolError, RankMachine
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import TRANSFER_KINDS, parse_op
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.simpy_model import run_model
from pipeproof.verify.check_plan import check_subject
from tests.exec.world import HOST, World
from tests.plans import subject
from tests.verify.programs import crossing_waits

PLANS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["gpipe", "1f1b"]),
        "pp": st.integers(1, 4),
        "tp": st.sampled_from([1, 2]),
        "dp": st.integers(1, 2),
        "num_micro_batches": st.integers(1, 6),
        "sp": st.booleans(),
        "transport": st.sampled_from(["full", "partial"]),
    }
)


def subject_of(plan):
    return subject(
        topology={"pp": plan["pp"], "tp": plan["tp"], "dp": plan["dp"], "sequence_parallel": plan["sp"]},
        schedule={"kind": plan["kind"], "num_micro_batches": plan["num_micro_batches"]},
        transport=plan["transport"],
    )


def order_in(graph):
    """The order of each queue as the graph has it."""
    order = {}
    for rank in range(graph.num_ranks):
        for op_id in graph.rank_ops(rank):
            queue = int(graph.channel[op_id]) if graph.ops[op_id].kind in TRANSFER_KINDS else HOST
            order.setdefault((rank, queue), []).append(op_id)
    return order


def order_of_model(one):
    """The order in which SimPy's model starts the operations of each queue."""
    outcome = run_model(one.graph, durations_of(one.plan), ChannelModel("directed_edge", "rendezvous"))
    assert outcome.stuck_at == (None,) * one.graph.num_ranks
    order = {}
    for queue, op_ids in order_in(one.graph).items():
        order[queue] = sorted(op_ids, key=lambda i: (outcome.starts[i], outcome.ends[i]))  # stable at equal times
        starts = [outcome.starts[i] for i in op_ids]
        assert starts == sorted(starts)
    return order


@settings(max_examples=60, deadline=None)
@given(plan=PLANS, seed=st.integers(0, 2**32))
def test_every_program_ends_in_the_order_of_graph_and_model(plan, seed):
    one = subject_of(plan)
    world = World(one.graph)
    scheduler = random.Random(seed)
    for step in range(2):
        world.begin(step)
        assert world.run(scheduler)
        assert [machine.step for machine in world.machines] == [step] * one.graph.num_ranks
        assert world.executed == order_in(one.graph)
    assert world.executed == order_of_model(one)


def mutated(one, change):
    rows = one.graph.rows()
    change(rows)
    return one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))


def place(rows, text):
    return next(i for i, row in enumerate(rows) if row.op == parse_op(text))


def forgotten_receive(rows):
    for text in ("1RECV_F2", "WAIT(1RECV_F2)"):
        del rows[1][place(rows[1], text)]


def collective_left_out(rows):
    del rows[1][place(rows[1], "0F1/0.ALL_REDUCE:tp")]


@pytest.mark.parametrize(
    ("change", "topology", "code", "stuck"),
    [
        (crossing_waits, {"pp": 2}, "PP401", {0: "WAIT(0SEND_F1)", 1: "WAIT(1SEND_B0)"}),
        (forgotten_receive, {"pp": 2}, "PP402", {0: "WAIT(0SEND_F3)"}),
        (collective_left_out, {"pp": 1, "tp": 2}, "PP402", {0: "0B3/8.ALL_REDUCE:tp"}),
    ],
)
def test_a_plan_that_deadlocks_never_ends_whatever_the_scheduler(change, topology, code, stuck):
    one = mutated(subject(topology=topology), change)
    assert code in {finding.code for finding in check_subject(one).errors}
    for seed in range(20):
        world = World(one.graph)
        world.begin(0)
        assert not world.run(random.Random(seed))
        assert {r: str(one.graph.ops[steps[0]]) for r, steps in enumerate(world.at) if steps} == stuck


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_verify_and_the_machines_agree_on_programs_with_swapped_neighbours(seed, data):
    """Swap two neighbours of one rank's program: the machines end if and only if no deadlock is found."""
    base = subject(schedule={"num_micro_batches": 2})

    def swap(rows):
        rank = data.draw(st.integers(0, len(rows) - 1))
        i = data.draw(st.integers(0, len(rows[rank]) - 2))
        rows[rank][i], rows[rank][i + 1] = rows[rank][i + 1], rows[rank][i]

    one = mutated(base, swap)
    world = World(one.graph)
    world.begin(0)
    deadlocks = {"PP401", "PP402"} & {finding.code for finding in check_subject(one).errors}
    assert world.run(random.Random(seed)) == (not deadlocks)


# --- the protocol ---


def machine_of(rank=0, **sections):
    graph = subject(**sections).graph
    return graph, RankMachine(graph, rank)


def test_instructions_up_to_the_first_that_blocks():
    graph, machine = machine_of(rank=1)
    assert machine.step == -1
    assert machine.finished
    assert [str(i.op) for i in machine.handle(Begin(0))] == ["1RECV_F0", "WAIT(1RECV_F0)"]
    assert not machine.finished
    (wait,) = [i for i in graph.rank_ops(1) if str(graph.ops[i]) == "WAIT(1RECV_F0)"]
    assert [str(i.op) for i in machine.handle(Finished(wait))] == ["1F0"]


def test_an_instruction_carries_the_graphs_row():
    graph, machine = machine_of(rank=1)
    receive, _ = machine.handle(Begin(0))
    assert receive.row == graph.row(receive.op_id)
    assert receive.row.peer == 0


def run_to(machine, graph, text):
    """Report awaited operations as finished until the machine is at ``text``; its op id."""
    instructions = machine.handle(Begin(machine.step + 1))
    while str(instructions[-1].op) != text:
        instructions = machine.handle(Finished(instructions[-1].op_id))
    return instructions[-1].op_id


def op_id_of(graph, rank, text):
    return next(i for i in graph.rank_ops(rank) if str(graph.ops[i]) == text)


REFUSED = {
    "another operation than the awaited": (
        1, "1F1", "1B3", ["1B3 (op ", "is reported finished, but the rank is at 1F1", "story of 1B3", "not reached"],
    ),
    "an operation finished twice": (
        0, "0F1", "0F0", ["0F0 (op ", "but the rank is at 0F1", "step 0: started\n  step 0: finished"],
    ),
    "a transfer, which its wait finishes": (1, "WAIT(1RECV_F0)", "1RECV_F0", ["1RECV_F0 (op ", "step 0: posted"]),
    "another rank's operation": (0, "0F0", "1F0", ["does not belong to rank 0; the rank is at 0F0"]),
    "no operation at all": (0, "0F1", -1, ["op -1 is reported finished, which does not belong", "story of 0F1"]),
    "a number beyond all operations": (0, "0F1", 10**6, [f"op {10**6} is reported", "story of 0F1"]),
    "an event before the first step": (0, None, "0F0", ["but the rank is at its end"]),
    "a step within a step": (0, "0F1", Begin(1), ["step 1 begins while step 0 is at 0F1", "step 0: started"]),
}  # fmt: skip
"""The rank, where it is, the event or the operation that is reported finished, and words of the refusal."""


@pytest.mark.parametrize("name", REFUSED)
def test_an_event_that_is_not_the_awaited_is_refused_with_the_story(name):
    rank, at, event, words = REFUSED[name]
    graph, machine = machine_of(rank)
    if at is not None:
        run_to(machine, graph, at)
    if isinstance(event, str):
        event = next(i for i in range(len(graph.ops)) if str(graph.ops[i]) == event)
    with pytest.raises(ProtocolError) as refused:
        machine.handle(event if isinstance(event, Begin) else Finished(event))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_child_is_finished_by_its_parent_alone():
    graph, machine = machine_of(topology={"pp": 2, "tp": 2})
    machine.handle(Begin(0))
    with pytest.raises(ProtocolError, match=r"0F0/0\.ALL_REDUCE:tp .* but the rank is at 0F0"):
        machine.handle(Finished(op_id_of(graph, 0, "0F0/0.ALL_REDUCE:tp")))


def test_the_story_of_a_transfer_is_posted_done_with_range_and_peer():
    graph, machine = machine_of(rank=1)
    run_to(machine, graph, "1F0")
    receive = op_id_of(graph, 1, "1RECV_F0")
    assert machine.story(receive).splitlines() == [
        f"story of 1RECV_F0 (op {receive}) on rank 1:",
        "  the graph: elements 0..256 with rank 0",
        "  step 0: posted",
        "  step 0: done",
    ]


@pytest.mark.parametrize("again", [0, -1])
def test_a_step_that_was_run_is_not_run_again(again):
    world = World(subject().graph)
    world.begin(0)
    assert world.run(random.Random(0))
    with pytest.raises(ProtocolError, match=f"step {again} begins, but step 0 was run already"):
        world.machines[0].handle(Begin(again))


def test_a_refused_event_changes_nothing():
    graph, machine = machine_of(rank=1)
    at = run_to(machine, graph, "1F1")
    for event in (Finished(op_id_of(graph, 1, "1B3")), Begin(5), Finished(-7)):
        with pytest.raises(ProtocolError):
            machine.handle(event)
    machine.validate_state()
    assert machine.step == 0
    assert machine.handle(Finished(at))


def test_a_step_that_leaves_a_transfer_unwaited_is_found_by_the_validator():
    one = mutated(subject(), lambda rows: rows[0].pop(place(rows[0], "WAIT(0SEND_F3)")))
    world = World(one.graph)
    world.begin(0)
    with pytest.raises(ProtocolError, match="the step is complete, but nothing waited for 0SEND_F3"):
        world.run(random.Random(0))


def test_a_wait_for_nothing_is_found_by_the_validator():
    one = mutated(subject(), lambda rows: rows[1].pop(place(rows[1], "1RECV_F0")))
    machine = RankMachine(one.graph, 1)
    (wait,) = machine.handle(Begin(0))
    machine.handle(Finished(wait.op_id))
    with pytest.raises(ProtocolError, match="never handed out"):
        machine.validate_state()
