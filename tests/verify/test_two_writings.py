"""The readable definition on the networkx graph and the columns must agree on every program."""

from dataclasses import replace
from itertools import pairwise

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.channel_models import MODELS, QUEUES, ChannelModel, declared_model
from pipeproof.schedule.op_table import NONE, Group, Row, TensorSpec, build_graph
from pipeproof.schedule.ops import TRANSFER_KINDS, OpKind, parse_op
from pipeproof.sim.outcome import SimulationError
from pipeproof.sim.simulate import simulate
from pipeproof.verify.deadlock.deadlock_verdict import cycle_of, cyclic_part, deadlocks, shortest_cycle
from pipeproof.verify.deadlock.wait_columns import rows_of, wait_graph
from tests.plans import subject
from tests.verify.deadlock_definition import done, events_of, post, stuck_events


def stuck_by_networkx(events):
    """Events on a cycle of waits, events that can never happen, and all that wait for them."""
    waits = events.nx()
    roots = on_cycles(waits) | events.never
    followers = waits.reverse(copy=False)
    return roots | {later for root in roots for later in nx.descendants(followers, root)}


def on_cycles(waits):
    """All nodes of a graph that are on a cycle."""
    large = {v for part in nx.strongly_connected_components(waits) if len(part) > 1 for v in part}
    return large | {v for v in waits if waits.has_edge(v, v)}


models = st.one_of(
    st.sampled_from(MODELS),
    st.builds(
        ChannelModel,
        queue=st.sampled_from(list(QUEUES)),
        completes=st.sampled_from(["rendezvous", "slots", "eager"]),
        slots=st.integers(0, 2),
        eager_bytes=st.sampled_from([None, 0, 4, 9, 40]),
        connections=st.sampled_from(["warm", "lazy"]),
        host_blocks=st.booleans(),
    ),
)


@st.composite
def broken_subjects(draw):
    """A right plan with up to four rows moved, dropped or doubled on any ranks."""
    base = subject(
        topology={"pp": draw(st.integers(2, 3)), "tp": draw(st.sampled_from([1, 2]))},
        schedule={"kind": draw(st.sampled_from(["gpipe", "1f1b"])), "num_micro_batches": draw(st.integers(1, 3))},
        transport=draw(st.sampled_from(["full", "partial"])),
    )
    rows = base.graph.rows()
    for _ in range(draw(st.integers(0, 4))):
        program = rows[draw(st.integers(0, len(rows) - 1))]
        place = draw(st.integers(0, len(program) - 1))
        match draw(st.sampled_from(["move", "drop", "double"])):
            case "move":
                row = program.pop(place)
                program.insert(draw(st.integers(0, len(program))), row)
            case "drop":
                del program[place]
            case "double":
                program.insert(draw(st.integers(0, len(program))), program[place])
    return base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))


@st.composite
def random_rows(draw):
    """(rows by rank, tensors, groups): a few messages and barriers on queues of any kind, batched or not."""
    num_ranks = draw(st.integers(2, 3))
    groups = [Group("pp", tuple(range(num_ranks))), Group("tp", (0, 1))]
    tensors = [TensorSpec("t", (10,), "int8", "replicated", "s")]
    rows = [[] for _ in range(num_ranks)]
    queues = st.sampled_from(["", "", "", "compute", "host", "side", "other"])
    batches = st.sampled_from([NONE, NONE, NONE, 0, 1])
    ends = st.lists(st.integers(0, num_ranks - 1), min_size=2, max_size=2)
    for k in range(draw(st.integers(1, 7))):
        a, b = draw(ends)
        size = draw(st.integers(0, 10))
        name = draw(st.sampled_from(["", "", "x"]))
        issued = [(a, f"0SEND_F{k}", b, NONE), (b, f"0RECV_F{k}", a, NONE)]
        if draw(st.integers(0, 3)) == 0:
            group = draw(st.integers(0, 1))
            issued = [(rank, "0BARRIER:pp", NONE, group) for rank in groups[group].ranks]
        for rank, text, peer, group in issued:
            op = parse_op(text)
            row = Row(op, peer, 0 if peer != NONE else NONE, 0, size, group, communicator=name if peer != NONE else "")
            program = rows[rank]
            where = draw(st.integers(0, len(program)))
            program.insert(where, replace(row, queue=draw(queues), batch=draw(batches)))
            if draw(st.booleans()):
                wait = Row(parse_op(f"WAIT({text})"), queue=draw(queues))
                program.insert(draw(st.integers(where, len(program))), wait)
    if draw(st.booleans()):  # a computation in parts, with its exchange on a queue of any kind
        for rank in groups[1].ranks:
            where = 0
            for text in ("0F0", "0F0/0.PART", "0F0/0.ALL_TO_ALL:ep", "0F0/1.PART"):
                where = draw(st.integers(where, len(rows[rank])))
                group, queue = (1, draw(queues)) if text.endswith("ep") else (NONE, "")
                rows[rank].insert(where, Row(parse_op(text), group=group, queue=queue))
                where += 1
    return rows, tensors, groups


def random_graphs():
    """The graphs of such rows."""
    return random_rows().map(lambda parts: build_graph(*parts))


def node_of(graph, model):
    """Node names by operation that can block; operations that end together share a name, as the columns contract
    them."""
    names = {}
    for op_id, op in enumerate(graph.ops):
        if op.kind in TRANSFER_KINDS or op.kind is OpKind.WAIT or graph.group[op_id] != NONE:
            names[op_id] = op_id
        if op.kind in TRANSFER_KINDS:
            if model.completes == "rendezvous" and graph.match[op_id] != NONE:
                names[op_id] = min(op_id, int(graph.match[op_id]))
        elif graph.group[op_id] != NONE:
            names[op_id] = min(graph.members_of(op_id) or [op_id])
    return names


@settings(max_examples=400, deadline=None)
@given(st.one_of(broken_subjects().map(lambda one: one.graph), random_graphs()), models)
def test_the_same_operations_are_on_cycles_in_both_writings(graph, model):
    waits = events_of(graph, model).nx()
    names = node_of(graph, model)
    cyclic = on_cycles(waits)
    readable = {names[op_id] for op_id in names if done(op_id) in cyclic}
    written = wait_graph(rows_of(graph), model)
    columns = nx.DiGraph(list(zip(written.source.tolist(), written.target.tolist(), strict=True)))
    assert {names[v] for v in on_cycles(columns) if v in names} == readable
    assert deadlocks(graph, model) == bool(cyclic) == (not nx.is_directed_acyclic_graph(columns))


@settings(max_examples=300, deadline=None)
@given(st.one_of(broken_subjects().map(lambda one: one.graph), random_graphs()), models)
def test_the_witness_is_a_shortest_cycle_and_each_of_its_waits_is_one_by_the_definition(graph, model):
    written = wait_graph(rows_of(graph), model)
    part = cyclic_part(written)
    if not part.any():
        return
    found = shortest_cycle(written, part)
    pairs = [(int(written.target[i]), int(written.source[i])) for i in found]
    assert all(held == waiting for (_, held), (waiting, _) in pairwise([*pairs, pairs[0]]))
    columns = nx.DiGraph(list(zip(written.target.tolist(), written.source.tolist(), strict=True)))
    assert len(found) == min(len(c) for c in nx.simple_cycles(columns, length_bound=len(found)))
    if model.connections == "lazy":
        return  # an operation may stand for the opening before it, which does not include its post
    waits = events_of(graph, model).nx()
    ops = cycle_of(graph, model)
    for waiting, held in pairwise([*ops, ops[0]]):
        assert nx.has_path(waits, done(waiting), post(held))


@settings(max_examples=100, deadline=None)
@given(random_graphs(), models)
def test_a_graph_has_a_cycle_where_networkx_finds_one(graph, model):
    written = wait_graph(rows_of(graph), model)
    waits = nx.DiGraph(zip(written.source.tolist(), written.target.tolist(), strict=True))
    assert cyclic_part(written).any() == (not nx.is_directed_acyclic_graph(waits))


@settings(max_examples=100, deadline=None)
@given(random_graphs(), models, models)
def test_no_deadlock_under_a_model_is_none_under_those_that_it_covers(graph, one, other):
    if one.covers(other) and deadlocks(graph, other):
        assert deadlocks(graph, one)


@settings(max_examples=100, deadline=None)
@given(random_graphs(), models, st.integers(1, 6))
def test_a_cycle_in_the_first_rows_is_a_cycle(graph, model, first):
    if cyclic_part(wait_graph(rows_of(graph, first), model)).any():
        assert deadlocks(graph, model)


@settings(max_examples=150, deadline=None)
@given(random_graphs(), models)
def test_two_steps_deadlock_if_and_only_if_one_does(graph, model):
    """The theorem of the definition for programs in which every transfer and collective has its counterparts."""
    rows = graph.rows()
    shifted = [
        [*program, *(replace(row, batch=row.batch if row.batch == NONE else row.batch + 9) for row in program)]
        for program in rows
    ]
    if any(op.kind is OpKind.WAIT and graph.waits_for[i] == NONE for i, op in enumerate(graph.ops)):
        return  # PP402
    two = build_graph(shifted, graph.tensors, graph.groups)
    assert deadlocks(two, model) == deadlocks(graph, model)


@settings(max_examples=150)
@given(broken_subjects(), models)
def test_what_is_stuck_is_what_waits_for_a_cycle_or_for_what_never_comes(one, model):
    events = events_of(one.graph, model)
    assert set(stuck_events(events)) == stuck_by_networkx(events)


@settings(max_examples=100)
@given(broken_subjects())
def test_a_program_is_stuck_in_the_proof_if_and_only_if_it_is_in_the_simulation(one):
    """The rules reason about events, the model runs processes: under rendezvous both must see the same hangs."""
    plan = one.plan
    cost = plan.spec.cost.model_copy(update={"p2p": "rendezvous"})
    object.__setattr__(plan, "spec", plan.spec.model_copy(update={"cost": cost}))
    proved_stuck = bool(stuck_events(events_of(one.graph, declared_model(one.backend))))
    try:
        simulate(plan)
    except SimulationError:
        assert proved_stuck
    else:
        assert not proved_stuck
