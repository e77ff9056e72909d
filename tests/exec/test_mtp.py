"""Multi-token prediction: inputs, predictions and weight of a module, and records that find its faults."""

import json

import numpy as np
import pytest

from tests.docs.test_schemas import require_fit
from tests.exec.test_reference_bits import lowered

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

TWO = {"mtp": {"num_modules": 2, "loss_weight": 0.4}}


def first_step(**mtp):
    from tests.exec.in_memory import compared

    plan = lowered({}, {}, {"mtp": {"num_modules": 2, **mtp}}, {}, steps=1)
    (step,) = compared(plan)
    assert step.bitwise
    assert step.loss.shape == (3,)
    from tests.exec.in_memory import run_all

    outcomes, _ = run_all(plan)
    return step, {name: gradient for rank in outcomes[0] for name, gradient in rank.gradients.items()}


def test_where_the_embedding_is_looked_up_changes_no_loss():
    once, again = first_step()[0], first_step(magic_send=True)[0]
    assert once.loss.tobytes() == again.loss.tobytes()


def test_the_weight_scales_only_gradients_of_modules_and_no_reported_loss():
    (one, of_one), (two, of_two) = first_step(loss_weight=0.25), first_step(loss_weight=0.5)
    assert one.loss.tobytes() == two.loss.tobytes()
    for name, gradient in of_one.items():
        doubled = np.array_equal(2 * gradient, of_two[name])
        assert doubled == name.startswith("mtp."), name


def test_what_a_module_predicts():
    """By hand, in numpy: the counted positions, the inputs, and the divisor."""
    from pipeproof.stages.describe.mtp_streams import shifted_batch
    from pipeproof.stages.describe.synthetic import IGNORED, loss_scale, micro_batch
    from pipeproof.stages.reference.unpartitioned import unpartitioned_step
    from tests.stages.references import make_plan

    plan = make_plan(model={"num_layers": 1, **TWO}, schedule={"num_micro_batches": 1}, run={"dtype": "float64"})
    from pipeproof.stages.describe.gpt import describe_gpt
    from pipeproof.stages.describe.synthetic import initial_weight

    weights = {p.name: initial_weight(p, 0, "float64") for layer in describe_gpt(plan) for p in layer.parameters}
    weights["head.weight"] = np.zeros_like(weights["head.weight"])  # all words equal: each loss is log(words)
    batch = micro_batch(plan, 0, 0)
    counted = [int((batch.labels[:, distance:] != IGNORED).sum()) for distance in range(3)]
    assert counted[0] > counted[1] > counted[2] > 0
    expected = np.array(counted) * np.log(32) * loss_scale(plan, 0, 0)
    np.testing.assert_allclose(unpartitioned_step(plan, weights, 0).loss, expected, rtol=1e-12)
    for distance in (1, 2):
        shifted = shifted_batch(batch, distance)
        np.testing.assert_array_equal(shifted.tokens[:, :-distance], batch.tokens[:, distance:])
        kept = shifted.labels != IGNORED
        np.testing.assert_array_equal(shifted.labels[kept], np.roll(batch.labels, -distance, axis=1)[kept])
        assert (shifted.labels[:, -distance:] == IGNORED).all()


def test_records_have_the_losses_apart_and_align_finds_a_fault_in_a_module(tmp_path, monkeypatch):
    from pipeproof.stages.describe.synthetic import Batch
    from pipeproof.stages.paddle import stage as paddle_stage
    from tests.align.test_faults import recorded
    from tests.cli.commands import invoke

    def located(place, status):
        recorded(tmp_path / place, **TWO)
        result = invoke("state", "align", tmp_path / place / "run", tmp_path / place / "reference", "--format", "json")
        assert result.exit_code == status, result.output
        content = json.loads(result.stdout)
        require_fit("align", content)
        return content

    right = located("right", 0)
    assert right["mtp"] == {"steps": 2, "equal": 2, "first_difference": None}
    lines = [json.loads(line) for line in (tmp_path / "right" / "run" / "record.jsonl").read_text().splitlines()]
    for line in lines:
        require_fit("record", line)
    assert [other["name"] for other in lines[-1]["others"]] == ["mtp.0", "mtp.1"]

    rightly = paddle_stage.mtp_batches

    def one_token_late(plan, batch):
        main, first, second = rightly(plan, batch)
        return [main, first, Batch(first.tokens, second.labels)]

    monkeypatch.setattr(paddle_stage, "mtp_batches", one_token_late)
    found = located("wrong", 1)
    assert found["main"] == {"steps": 2, "equal": 1, "first_difference": found["main"]["first_difference"]}
    assert found["main"]["first_difference"]["step"] == 1  # the first step's main loss knows nothing of modules
    assert found["mtp"]["equal"] == 0
    assert found["mtp"]["first_difference"]["loss"] == "mtp.1"
    first = found["tensors"]["first_difference"]
    assert (first["tensor"]["layer"], first["tensor"]["direction"], first["tensor"]["side"]) == (
        "mtp.1",
        "forward",
        "output",
    )
