"""Messages of pairs of ranks that were measured, next to a network that has the rest."""

from fractions import Fraction

import numpy as np
import pytest

from pipeproof.comm.lower import lower
from pipeproof.cost.plan_times import link_times, resolved_cost
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.sim.simulate import simulate
from tests.plans import plan_spec

NETWORK = {"ranks_per_node": 4, "node": {"bandwidth": 2, "latency_us": 3}, "launch_us": 10}
MESSAGE_BYTES = 8 * 2 * 16 * 4  # sequence, micro-batch, hidden, float32
BY_LINKS = 10 + 3 + Fraction(MESSAGE_BYTES, 2000)


def edge(source, destination, latency_us=50, bandwidth=0.5):
    return {"source": source, "destination": destination, "latency_us": latency_us, "bandwidth": bandwidth}


def plan(edges, cost=None, **network):
    given = {"forward_us": 1000, "backward_us": 1000} if cost is None else cost
    given = {**given, "network": {**NETWORK, "edges": edges, **network} if cost is None else {"edges": edges}}
    sections = {"topology": {"pp": 4}, "schedule": {"kind": "gpipe", "num_micro_batches": 1}}
    return plan_spec(**sections, cost=given)


def test_a_measured_edge_takes_its_own_time_and_the_others_the_links():
    links = link_times(plan([edge(1, 2), edge(2, 1, latency_us=70)]))

    def slowest(*pairs):
        return links.message_us(np.array(pairs), MESSAGE_BYTES)

    assert slowest((1, 2)) == 50 + Fraction(MESSAGE_BYTES, 500)  # the measurement includes launch_us
    assert slowest((2, 1)) == 70 + Fraction(MESSAGE_BYTES, 500)
    assert slowest((0, 1)) == BY_LINKS
    assert slowest((0, 1), (1, 2)) == slowest((1, 2))  # of the places that a folded rank stands for


def test_the_simulated_step_has_each_message_once_at_what_its_edge_takes():
    """One micro-batch goes forth and back: four stages each way, three messages each way, nothing at once."""
    measured = {(0, 1): 20, (1, 2): 900, (3, 2): 400}
    makespan = simulate(lower(plan([edge(*pair, latency_us=us) for pair, us in measured.items()]))).timeline.makespan_us
    messages = sum(us + Fraction(MESSAGE_BYTES, 500) for us in measured.values()) + 3 * BY_LINKS
    assert makespan == pytest.approx(float(8 * 1000 + messages), abs=0.01)
    assert simulate(lower(plan([]))).timeline.makespan_us == pytest.approx(float(8 * 1000 + 6 * BY_LINKS), abs=0.01)


def test_schedules_are_made_for_the_slowest_edge():
    assert resolved_cost(plan([edge(1, 2, 500)])).p2p_latency_us == pytest.approx(500 + MESSAGE_BYTES / 500, abs=0.001)
    assert resolved_cost(plan([edge(1, 2, 0, 10**6)])).p2p_latency_us == pytest.approx(float(BY_LINKS), abs=0.001)


def test_beside_a_data_sheet_the_edges_count():
    links = link_times(plan([edge(0, 1, 777)], cost={"analytic": {"device": "h200"}}))
    assert links.message_us(np.array([(0, 1)]), 500) == 778
    assert links.message_us(np.array([(1, 0)]), 500) < 100


@pytest.mark.parametrize(
    ("edges", "network", "text"),
    [
        ([edge(0, 4)], {}, "cost.network.edges[0] 0->4: the plan has ranks 0 to 3"),
        ([edge(0, 1), edge(2, 2)], {}, "cost.network.edges[1] 2->2 joins a rank to itself"),
        ([edge(0, 1), edge(0, 1)], {}, "cost.network.edges[1] 0->1 is given twice"),
        ([{"source": 0, "destination": 1}], {}, "bandwidth"),
        ([edge(0, 1, bandwidth=0)], {}, "bandwidth"),
    ],
)
def test_edges_that_mean_nothing_are_refused(edges, network, text):
    with pytest.raises(BadPlanError) as caught:
        plan(edges, **network)
    assert any(text in finding.message for finding in caught.value.findings)
