"""Operations on named queues: times by hand, and a row for each queue in each picture and file."""

import json
from fractions import Fraction

import pytest

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.comm.lower import lower_loaded
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.sim.op_durations import Durations
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import load_plan
from pipeproof.verify.check_plan import check
from pipeproof.views.html.timeline_page import payload
from tests.cli.commands import invoke
from tests.plans import plan_dict

STEPS = """\
rank 0: 0F0 WAIT(0F0){queue=out} 0SEND_F0{queue=out} 0F1 WAIT(0F1){queue=out} 0SEND_F1{queue=out}
        0RECV_B0 WAIT(0RECV_B0) WAIT(0SEND_F0) 0B0
        0RECV_B1 WAIT(0RECV_B1) WAIT(0SEND_F1) 0I1 WAIT(0I1){queue=side} 0W1{queue=side} WAIT(0W1)
rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0
        1RECV_F1 WAIT(1RECV_F1) 1F1 1B1 1SEND_B1 WAIT(1SEND_B0) WAIT(1SEND_B1)
"""


@pytest.fixture
def plan_file(tmp_path):
    (tmp_path / "steps.txt").write_text(STEPS)
    plan = plan_dict(
        schedule={"kind": "file", "path": "steps.txt", "num_micro_batches": 2},
        cost={"forward_us": 100, "backward_us": 200, "p2p_latency_us": 10},
    )
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return tmp_path / "plan.json"


@pytest.fixture
def simulation(plan_file):
    return simulate(lower_loaded(load_plan(plan_file)))


def test_the_program_is_right(plan_file):
    assert check(load_plan(plan_file)).errors == ()


def test_times_by_hand(simulation):
    spans = {span.op: (span.queue, span.start, span.end) for span in simulation.timeline.spans}
    assert spans["0SEND_F1"] == ("out", 200, 200)
    assert spans["1F0"] == ("compute", 110, 210)
    assert spans["1B1"] == ("compute", 510, 710)
    assert spans["1RECV_F1"] == ("forward 0->1", 410, 410)
    assert spans["0I1"] == ("compute", 720, 820)
    assert spans["WAIT(0W1)"] == ("compute", 820, 920)
    assert spans["0W1"] == ("side", 820, 920)
    assert simulation.engine == "simpy"


def test_computations_of_every_queue_count(simulation):
    first, second = simulation.figures
    assert (first.busy_us, second.busy_us) == (2 * 100 + 200 + 200, 600)
    assert (first.peak_activations, first.peak_activations_at_i) == (2, 2)


def test_what_runs_side_by_side_on_two_queues_is_busy_once(tmp_path):
    (tmp_path / "steps.txt").write_text("rank 0: 0F0 0F1 0I0 WAIT(0I0){queue=side} 0W0{queue=side} 0B1 WAIT(0W0)\n")
    plan = plan_dict(
        topology={"pp": 1},
        schedule={"kind": "file", "path": "steps.txt", "num_micro_batches": 2},
        cost={"forward_us": 100, "backward_us": 200},
    )
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (rank,) = simulate(lower_loaded(load_plan(tmp_path / "plan.json"))).figures
    assert (rank.span_us, rank.busy_us, rank.bubble_span_us) == (500, 500, 0)


def written(plan_file, name):
    target = plan_file.with_name(name)
    result = invoke("simulate", plan_file, "-o", target)
    assert result.exit_code == 0, result.output
    return result.stdout, target.read_text()


def test_a_trace_has_a_thread_for_each_queue(plan_file):
    _, text = written(plan_file, "trace.json")
    events = json.loads(text)
    events = events["traceEvents"] if isinstance(events, dict) else events
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert [name for (rank, _), name in sorted(threads.items()) if rank == 0] == [
        "compute", "backward 1->0", "out", "side",
    ]  # fmt: skip
    (weights,) = [e for e in events if e.get("name") == "0W1" and e["ph"] == "X"]
    assert threads[weights["pid"], weights["tid"]] == "side"


def test_a_page_has_a_lane_for_each_queue(plan_file):
    lowered = lower_loaded(load_plan(plan_file))
    lanes = payload("steps", simulate(lowered).timeline, lowered.graph)["lanes"]
    assert [queue for rank, queue in lanes if rank == 0] == ["compute", "backward 1->0", "out", "side"]


def test_the_terminal_counts_what_runs_beside_the_compute_queue(plan_file):
    shown, text = written(plan_file, "page.html")
    assert "step time 920 us" in shown
    assert '"side"' in text
    row = next(line for line in shown.splitlines() if line.startswith("rank 0"))
    assert "I1" in row
    assert "W1" in row


def test_figures_are_exact(simulation):
    assert simulation.makespan == Fraction(920)


def test_a_collective_of_its_own_rank_alone_waits_for_no_message():
    """Not even where a device carries its communication out in the order of issue."""
    programs = [["0RECV_F1", "0BARRIER:pp", "0F0"], ["1F0", "1SEND_F1"]]
    rows = [[Row(parse_op(text), peer=NONE if "_" not in text else 1 - rank) for text in program]
            for rank, program in enumerate(programs)]  # fmt: skip
    graph = build_graph(rows, (), ())
    outcome = run_model(graph, Durations((0, 2, 1, 9, 0), 0, 1), ChannelModel("device"))
    assert outcome.ends == (9, 2, 3, 9, 9)
