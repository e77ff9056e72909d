"""The readable definition on the networkx graph and the columns must say the same of every program."""

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.build import build_graph
from pipeproof.sim.errors import SimulationError
from pipeproof.sim.simulate import simulate
from pipeproof.verify.deadlock import events_of, shortest_cycle, stuck_events
from tests.plans import subject


def stuck_by_networkx(events):
    """What is on a cycle of waits, what can never happen, and everything that waits for either."""
    waits = events.nx()
    on_cycles = {e for part in nx.strongly_connected_components(waits) if len(part) > 1 for e in part}
    roots = on_cycles | events.never
    followers = waits.reverse(copy=False)
    return roots | {later for root in roots for later in nx.descendants(followers, root)}


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


@settings(max_examples=150)
@given(broken_subjects())
def test_deadlock_is_the_same_on_the_graph_and_on_the_columns(one):
    events = events_of(one.graph, one.backend)
    stuck = stuck_events(events)
    assert set(stuck) == stuck_by_networkx(events)
    cycle = shortest_cycle(events, stuck)
    waits = events.nx()
    cyclic = not nx.is_directed_acyclic_graph(waits)
    assert (cycle is not None) == cyclic
    if cycle is not None:
        assert all(waits.has_edge(a, b) for a, b in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        shortest = min(len(c) for c in nx.simple_cycles(waits, length_bound=len(cycle)))
        assert len(cycle) == shortest


@settings(max_examples=100)
@given(broken_subjects())
def test_a_program_is_stuck_in_the_proof_if_and_only_if_it_is_in_the_simulation(one):
    """The rules reason about events, the model runs processes: under rendezvous both must see the same hangs."""
    plan = one.plan
    cost = plan.spec.cost.model_copy(update={"p2p": "rendezvous"})
    object.__setattr__(plan, "spec", plan.spec.model_copy(update={"cost": cost}))
    proved_stuck = bool(stuck_events(events_of(one.graph, one.backend)))
    try:
        simulate(plan)
    except SimulationError:
        assert proved_stuck
    else:
        assert not proved_stuck
