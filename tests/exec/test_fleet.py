"""Fleet's own pipeline trains the same values as `Pipeline`, in the order of its plan; differences are found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pydantic import TypeAdapter

from pipeproof.schedule.ops import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, OpKind
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.verify.subject import make_subject
from validation.fleet.__main__ import PLAN_FILE, fleet
from validation.fleet.fleet_order import (
    Computation,
    EventRecorder,
    Message,
    RankEvents,
    count_messages,
    order_findings,
)
from validation.fleet.fleet_run import FleetReport, Settings, run_fleet

LAYERS = [
    {"name": f"layer.{number}", "out": [{"shape": ["b", 4]}], "parameters": [{"name": "weight", "shape": [4, 4]}]}
    for number in range(7)
] + [{"name": "last", "parameters": [{"name": "weight", "shape": [4, 4]}]}]
EXAMPLES = Path(__file__).parents[2] / "examples"
INTERLEAVED = {"kind": "interleaved", "num_chunks": 2, "variant": "fleet"}


def plan_dict(pp=2, count=4, schedule=None, layers=LAYERS, **sections):
    return {
        "pipeproof": 1,
        "model": {"kind": "layers", "layers": layers},
        "topology": {"pp": pp},
        "schedule": {"kind": "1f1b", "num_micro_batches": count, "micro_batch_size": 2, **(schedule or {})},
        "loss": {"normalization": "mean_of_micro_batches"},
        **sections,
    }


def subject_of(*args, **sections):
    return make_subject(plan_from_dict(plan_dict(*args, **sections)))


def planned_events(subject):
    """Events of a Fleet run that follows the plan."""
    graph, events = subject.graph, []
    for rank in range(graph.num_ranks):
        of_rank, received = RankEvents(), {}
        for op_id in graph.rank_ops(rank):
            op = graph.ops[op_id]
            kind = OpKind.FORWARD if op.is_forward else OpKind.BACKWARD
            if op.kind in COMPUTE_KINDS:
                given = received.pop((op.kind, op.stage, op.micro_batch), None)
                of_rank.computed.append(Computation(str(op), [] if given is None else [given]))
            elif op.kind in SEND_KINDS | RECV_KINDS:
                channel, sent = graph.channels[graph.channel[op_id]], op.kind in SEND_KINDS
                if not sent:
                    received[kind, op.stage, op.micro_batch] = sum(not message.sent for message in of_rank.messages)
                label = f"{op.stage}{kind}{op.micro_batch}" if sent else ""
                peer = channel.dst if sent else channel.src
                of_rank.messages.append(Message(sent, peer, (2, 4), "float32", 1, label))
        events.append(of_rank)
    return events


def messages(subject, events):
    found = list(order_findings(subject, 0, events))
    assert {finding.code for finding in found} <= {"PP918"}
    return [finding.message for finding in found]


@pytest.mark.parametrize(("pp", "count", "schedule"), [(2, 4, None), (4, 6, None), (3, 6, INTERLEAVED)])
def test_the_order_of_the_plan_has_no_findings(pp, count, schedule):
    subject = subject_of(pp, count, schedule)
    events = planned_events(subject)
    assert messages(subject, events) == []
    assert count_messages(events) == 2 * count * (len(subject.plan.stages) - 1)
    adapter = TypeAdapter(list[RankEvents])
    assert adapter.validate_json(adapter.dump_json(events)) == events


def test_another_order_of_computations_is_named():
    subject = subject_of(2)
    events = planned_events(subject)
    computed = events[1].computed
    computed[1], computed[2] = computed[2], computed[1]
    assert messages(subject, events) == ["step 0, rank 1: Fleet computes 1F1 where the plan has 1B0, at position 1"]


def test_swapped_sends_and_their_receivers_are_named():
    subject = subject_of(2)
    events = planned_events(subject)
    sends = [message for message in events[0].messages if message.sent]
    sends[0].label, sends[1].label = sends[1].label, sends[0].label
    assert messages(subject, events) == [
        "step 0, rank 0: Fleet sends to rank 1, of activations, 0F1 where the plan has 0F0, at position 0",
        "step 0, rank 1: 1F0 was given the tensors of 0F1 in place of 0F0",
    ]


def test_a_message_of_another_shape_and_a_missing_one_are_named():
    subject = subject_of(2)
    events = planned_events(subject)
    events[0].messages[0].shape = (2, 8)
    last = max(place for place, message in enumerate(events[1].messages) if message.sent)
    del events[1].messages[last]
    found = messages(subject, events)
    assert "step 0: message 0 from rank 0 to 1 is sent as float32 [2, 8] and received as float32 [2, 4]" in found
    assert "step 0: message 3 from rank 1 to 0 is sent as nothing and received as float32 [2, 4]" in found
    assert "step 0, rank 1: Fleet sends to rank 0, of gradients, nothing where the plan has 1B3, at position 3" in found
    assert "step 0, rank 0: 0B3 was given the tensors of a message that nobody sent in place of 1B3" in found


class Sent:
    """A tensor, as far as the recorder reads it."""

    shape, dtype = (2, 4), "paddle.float32"


def test_the_recorder_knows_tensors_by_the_object_and_resets_in_each_step():
    watch = EventRecorder(1, 2)
    came, made, other = Sent(), Sent(), Sent()
    watch.receives(other, 0, 1)
    watch.receives(came, 0, 1)
    watch.forward_begins(input_tensor=(came,), step_id=0)
    watch.forward_ends(output_tensor={"x": made}, step_id=0)
    watch.sends(other, 0, 2)
    watch.sends(made, 0, 2)
    of_rank = watch.take()
    assert [(one.op, one.receives) for one in of_rank.computed] == [("1F0", [1])]
    assert [(one.sent, one.label, one.num_slices) for one in of_rank.messages] == [
        (False, "", 1), (False, "", 1), (True, "", 2), (True, "1F0", 2),
    ]  # fmt: skip
    watch.chunk_of = lambda: 1
    watch.backward_begins(output_tensor_grad=None)
    assert watch.take().computed == [Computation("3B0", [])]


def trained(loss=1.0, distance=0.0):
    """Report on one step with one gradient on each of two ranks; Fleet's loss is 1."""
    adapter = TypeAdapter(list[RankEvents])
    gradient = {"step": 0, "name": "layer.0.weight", "is_equal": not distance, "distance": distance}
    ranks = [
        {
            "scheduler": "PipelineParallel", "plan": plan_dict(), "losses": [[1.0], [loss]],
            "gradients": [[gradient]], "events": adapter.dump_python([of_rank], mode="json"),
        }
        for of_rank in planned_events(subject_of())
    ]  # fmt: skip
    return FleetReport(Settings("mixer", 2, 4, steps=1), ranks)


def test_equal_runs_match_and_another_gradient_loss_or_order_is_named():
    report = trained()
    assert report.findings == ()
    assert (report.num_computed, report.num_messages) == (16, 8)
    assert json.loads(json.dumps(report.to_json()))["matches"]
    (finding,) = trained(distance=0.25).findings
    assert finding.code == "PP919"
    assert "2 of 2 gradients differ, most of all layer.0.weight in step 0 by 0.25" in finding.message
    first, second = trained(loss=1.0 + 2**-23).findings
    assert (first.code, second.code) == ("PP919", "PP919")
    assert "step 0, rank 1: the loss is 1.00000011920" in second.message
    report = trained()
    computed = report.ranks[1]["events"][0]["computed"]
    computed[1], computed[2] = computed[2], computed[1]
    assert [finding.code for finding in report.findings] == ["PP918"]


def test_edges_are_those_of_each_replica():
    line, ring = Settings("mixer", 2, 4, replicas=2), Settings("mixer", 3, 4, chunks=2)
    assert line.edges == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert ring.edges == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]


@pytest.mark.needs_paddle
def test_1f1b_has_our_bits_with_shared_weights(tmp_path):
    """By the command, as a person would, and recorded."""
    from pipeproof.interop.traces import check_log

    written, logs = tmp_path / "report.json", tmp_path / "logs"
    words = ["conv_net", "--steps", "2", "--report", str(written), "--log", str(logs)]
    result = CliRunner().invoke(fleet, words)
    assert result.exit_code == 0, result.output
    assert "PipelineParallel: 16 forwards and backwards and 8 messages per step match the plan" in result.output
    found = json.loads(written.read_text())
    assert found["matches"]
    assert [step["loss"] == step["fleet_loss"] for step in found["losses"]] == [True, True]
    assert found["num_bitwise"] == found["num_gradients"] == 20
    for queue in (None, "communicator"):
        assert check_log(logs, plan=load_plan(logs / PLAN_FILE), queue=queue).findings == ()
    again = CliRunner().invoke(fleet, words)
    assert again.exit_code == 2
    assert "has logs already" in again.output


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_interleaved_has_our_bits_with_dropout():
    report = run_fleet(Settings("mixer", 3, 6, chunks=2, steps=2))
    assert report.ranks[0]["scheduler"] == "PipelineParallelWithInterleave"
    assert report.findings == ()
    assert report.num_messages == 60


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_partial_messages_of_fleet_spoil_gradients_under_sequence_parallelism():
    """Fleet's custom layers, scheduler and messages: the loss still looks like one, and no gradient is right."""
    command = [sys.executable, str(EXAMPLES / "fleet_partial" / "train.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    reference, full, partial = (found[name] for name in ("one process", "Fleet, full", "Fleet, partial"))
    assert full["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert max(full["farthest"].values()) < 1e-5
    assert min(partial["farthest"].values()) > 0.05
    assert abs(partial["losses"][0] - reference["losses"][0]) < 0.2
