"""Plans for the simulator's tests, as small as their schedule allows."""

from fractions import Fraction

import pytest

from pipeproof.comm.lower import lower
from pipeproof.schedule.op_table import build_graph
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict


def lowered(kind="1f1b", p=4, m=8, tf=1, tb=2, c=0, p2p="async", tp=1, dp=1, transport="full", order=None):
    """A plan of ``p`` stages and ``m`` micro-batches; ``tf`` and ``tb`` are times or lists by stage."""
    plan = {
        "pipeproof": 1,
        "model": {
            "kind": "gpt",
            "num_layers": p,
            "hidden_size": 16,
            "num_heads": 4,
            "ffn_size": 16,
            "vocab_size": 16,
            "seq_length": 8,
        },
        "topology": {"pp": p, "tp": tp, "dp": dp, **({"order": order} if order else {})},
        "schedule": {"kind": kind, "num_micro_batches": m, "micro_batch_size": 1},
        "transport": transport,
        "cost": {
            "forward_us": _times(tf),
            "backward_us": _times(tb),
            "p2p_latency_us": _times(c),
            "p2p": p2p,
        },
    }
    return lower(plan_from_dict(plan).spec)


def _times(value):
    if isinstance(value, list):
        return [_times(one) for one in value]
    return str(value) if isinstance(value, Fraction) and value.denominator > 1 else int(value)


@pytest.fixture(scope="session")
def make_plan():
    return lowered


@pytest.fixture(scope="session")
def run():
    """Simulate the plan that the options describe, on both engines."""

    def on_both(**options):
        plan = lowered(**options)
        fast, simpy = (simulate(plan, engine=engine) for engine in ("fast", "simpy"))
        assert (fast.makespan, fast.figures) == (simpy.makespan, simpy.figures)
        return fast

    return on_both


@pytest.fixture(scope="session")
def edit():
    """``edit(graph, change)``: the graph again after ``change`` edited its rows, a list per rank."""

    def apply(graph, change):
        rows = graph.rows()
        change(rows)
        return build_graph(rows, graph.tensors, graph.groups)

    return apply
