"""Fleet's own pipeline trains the plan in its order; differences are found or refused."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pydantic import TypeAdapter

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.compare.compare_gradients import GradientResult, StepResult
from pipeproof.exec.run_report import RunReport
from pipeproof.schedule.ops import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, OpKind
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.verify.check_plan import check
from pipeproof.verify.subject import make_subject
from validation.fleet.__main__ import fleet
from validation.fleet.fleet_order import (
    Computation,
    EventRecorder,
    Message,
    RankEvents,
    count_messages,
    order_findings,
)
from validation.fleet.fleet_run import FleetReport, FleetRun
from validation.fleet.fleet_support import require_fleet_support

LAYERS = [
    {"name": f"layer.{number}", "out": [{"shape": ["b", 4]}], "parameters": [{"name": "weight", "shape": [4, 4]}]}
    for number in range(7)
] + [{"name": "last", "parameters": [{"name": "weight", "shape": [4, 4]}]}]
EXAMPLES = Path(__file__).parents[2] / "examples"
INTERLEAVED = {"kind": "interleaved", "num_chunks": 2, "variant": "fleet"}


def plan_dict(pp=2, count=4, schedule=None, layers=LAYERS, **sections):
    return {
        "pipeproof": 1,
        "model": {"kind": "layers", "build": "nowhere.py:build", "layers": layers},
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
    entered = []
    watch = EventRecorder(1, 2, entered.append)
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
    assert entered == ["1F0", "3B0"]


def trained(subject, loss, md5="a", distance=0.0):
    """Report on one step with one gradient; our run equals the reference, whose loss is 1."""
    one = np.float32(1.0)
    ours = GradientResult(0, 0, "layer.0.weight", "a", "a", 0.0, 0.0, replicas_agree=True, shards=())
    theirs = replace(ours, md5=md5, max_rel_diff=distance)
    run = RunReport(subject, "d", True, (StepResult(0, one, one, one, (ours,)),), (), None, 0.0, 1, "in_order")
    events = tuple((of_rank,) for of_rank in planned_events(subject))
    return FleetReport(
        run, FleetRun((StepResult(0, np.float32(loss), one, one, (theirs,)),), events, "PipelineParallel")
    )


def test_equal_runs_match_and_another_gradient_or_loss_is_named():
    subject = subject_of(2, 4)
    assert trained(subject, 1.0).matches
    assert trained(subject, 1.0).num_computed == 16
    (finding,) = trained(subject, 1.0, "b", 0.25).findings
    assert (finding.code, "1 of 1 gradients differ" in finding.message) == ("PP919", True)
    assert "layer.0.weight by 0.25" in finding.message
    (finding,) = trained(subject, 1.0 + 2**-23).findings
    assert finding.code == "PP919"
    assert not trained(subject, float("nan")).matches


def test_a_loss_may_differ_by_rounding_if_the_number_of_micro_batches_is_not_a_power_of_two():
    subject = subject_of(2, 3)
    report = trained(subject, 1.0 + 2**-23)
    assert report.loss_bound == 8 * 2.0**-24
    assert report.matches
    assert json.loads(json.dumps(report.to_json()))["matches"]
    assert not trained(subject, 1.0 + 2**-20).matches


@pytest.mark.parametrize(("sections", "fact"), [
    ({"schedule": {"kind": "zb_h1"}}, "no zb_h1"),
    ({"schedule": INTERLEAVED}, "more than 2 pipeline ranks"),
    ({"pp": 3, "count": 3, "schedule": INTERLEAVED}, "does not run the variant fleet"),
    ({"pp": 1}, "no pipeline"),
    ({"topology": {"pp": 2, "dp": 3}}, "3 data-parallel ranks"),
    ({"run": {"dtype": "float64"}}, "computes in float64"),
    ({"run": {"clip_norm": 1.0}}, "squares of gradients"),
    ({"memory": {"shard_optimizer": "dp"}, "topology": {"pp": 2, "dp": 2}}, "shards optimizers"),
    ({"layers": [*LAYERS[:7], {**LAYERS[7], "borrows": ["layer.0.weight", "layer.1.weight"]}]}, "from two layers"),
    ({"layers": [LAYERS[0], {"name": "loss"}]}, "pipeline rank 1 has no weights"),
    ({"pp": 3, "count": 6, "schedule": INTERLEAVED, "layers": [*LAYERS[:3], {**LAYERS[3], "out": [{"shape": ["b", 8]}]},
      *LAYERS[4:]]}, "rank 1 sends the outputs of `layer.3` and of `layer.6`"),
])  # fmt: skip
def test_plans_that_fleet_would_train_in_another_way_are_refused_with_their_location(sections, fact):
    with pytest.raises(PipeproofError) as caught:
        require_fleet_support(subject_of(**sections))
    (finding,) = caught.value.findings
    assert finding.code == "PP917"
    assert fact in finding.message
    assert finding.help


@pytest.mark.parametrize(("pp", "count", "schedule"), [
    (4, 2, None), (3, 6, INTERLEAVED), (3, 7, {**INTERLEAVED, "variant": "fleet_balanced"}),
    (3, 3, {**INTERLEAVED, "variant": "fleet_fthenb"}), (3, 4, {**INTERLEAVED, "variant": "fleet_balanced"}),
])  # fmt: skip
def test_what_fleet_can_run_is_not_refused(pp, count, schedule):
    require_fleet_support(subject_of(pp, count, schedule))


def test_a_plan_of_our_gpt_is_refused_with_status_2():
    result = CliRunner().invoke(fleet, [str(EXAMPLES / "gpt_pp4.yaml")])
    assert result.exit_code == 2
    assert "PP917" in result.output
    assert "model: {kind: layers" in result.output


def with_tuples(tmp_path):
    """A plan file of layers that give tuples, ids among them, with a weight at both ends."""
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    from tests.custom.plans import described, own_dict

    file = tmp_path / "plan.json"
    file.write_text(json.dumps(own_dict("pair.py", 2, described("pair.py", 2), run={"steps": 3})))
    return file


def example(name, tmp_path, **changes):
    """A plan file of an example's layers."""
    text = (EXAMPLES / "custom_layers" / f"{name}.yaml").read_text()
    text = text.replace(f"build: {name}.py", f"build: {EXAMPLES / 'custom_layers' / name}.py")
    for old, new in changes.items():
        start = text.index(f"\n{old}: ") + 1
        text = text[:start] + f"{old}: {new}" + text[text.index("\n", start) if "\n" in text[start:] else len(text) :]
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    return file


@pytest.mark.needs_paddle
def test_1f1b_has_our_bits_with_tuples_and_shared_weights(tmp_path):
    """By the command, as a person would, and recorded."""
    from pipeproof.interop.traces import check_log

    plan, written, logs = (
        with_tuples(tmp_path),
        tmp_path / "report.json",
        tmp_path / "logs",
    )
    result = CliRunner().invoke(fleet, [str(plan), "--report", str(written), "--log", str(logs)])
    assert result.exit_code == 0, result.output
    assert "PipelineParallel: 16 forwards and backwards and 12 messages per step match the plan" in result.output
    found = json.loads(written.read_text())
    assert found["matches"]
    assert found["loss_bound"] == 0.0
    assert [step["loss_is_bitwise"] for step in found["steps"]] == [True, True, True]
    assert {len(step["gradients"]) for step in found["steps"]} == {14}
    for queue in (None, "communicator"):
        assert check_log(logs, plan=load_plan(plan), queue=queue).findings == ()
    again = CliRunner().invoke(fleet, [str(plan), "--log", str(logs)])
    assert again.exit_code == 2
    assert "has logs already" in again.output


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_interleaved_has_the_bits_of_the_reference_with_dropout(tmp_path):
    from validation.fleet.fleet_run import run_fleet

    schedule = "{kind: interleaved, variant: fleet, num_micro_batches: 6, micro_batch_size: 2, num_chunks: 2}"
    plan = example("mixer", tmp_path, topology="{pp: 3}", schedule=schedule, run="{steps: 2, seed: 3}")
    report = check(load_plan(plan))
    report = replace(report, subject=report.subject.unfolded())
    found = run_fleet(report, 60.0, None, lambda _: None)
    assert found.scheduler == "PipelineParallelWithInterleave"
    assert all(gradient.bitwise for step in found.steps for gradient in step.gradients)
    for step, events in enumerate(zip(*found.events, strict=True)):
        assert messages(report.subject, events) == []
        assert count_messages(events) == 60, step


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
