"""Multi-token prediction on all ranks: bitwise the references, near the unpartitioned model, logged as described."""

import json

import numpy as np
import pytest

from tests.docs.test_schemas import require_fit
from tests.exec.test_blocks import MLA, MOE
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

SP = {"tp": 2, "sequence_parallel": True}
TWO = {"mtp": {"num_modules": 2, "loss_weight": 0.4}}
AGAIN = {"mtp": {"num_modules": 2, "loss_weight": 0.4, "magic_send": True}, "tied_embedding": True}
V = {"kind": "zb_v", "num_chunks": 2}
OWN_STAGES = [["embed", "layer.0"], ["layer.1", "mtp.0"], ["mtp.1", "norm", "head"]]
COMMON = {
    "sp, dp": (
        {**SP, "dp": 2}, {"kind": "zb_h1"}, {"activation_order": "bsh"}, {"run": {"main_grad_dtype": "float64"}},
    ),
    "parts of sequences on other ranks": ({"cp": 2}, {}, {}, {}),
    "stages of their own": ({"pp": 3}, {}, {}, {"stages": OWN_STAGES}),
    "sliced messages": ({"tp": 2}, {}, {}, {"transport": {"forward": "partial", "backward": "partial"}}),
    "copies of stages": ({}, {"kind": "dualpipe", "num_micro_batches": 4}, {}, {}),
    "a rank with both ends": ({}, V, {"num_layers": 4}, {}),
    "sequence splits": (SP, {"kind": "seq1f1b", "num_sequence_splits": 2}, {}, {}),
    "experts, ep, sp": ({**SP, "ep": 2}, {}, {"moe": {**MOE, "aux_loss": 0.1, "expert_bias_rate": 0.01}}, {}),
    "latent, clipped": (SP, {}, {"mla": MLA}, {"run": {"clip_norm": 0.05}}),
    "again": (SP, {"kind": "zb_h1"}, {}, {"memory": {"recompute": "full"}}),
    "gathered again": (SP, {"kind": "zb_h1"}, {}, {"memory": {"sequence_parallel_activations": "regather"}}),
    "sizes, slots": (
        {"ep": 2}, {"last_micro_batch_size": 1, "seq_lengths": [8, 4, 6]}, {"moe": MOE},
        {"buffers": {"receive_slots": 4, "free_output": "after_send_done"}},
    ),
    "dropout": ({"tp": 2}, {}, {"dropout": 0.1}, {}),
    "norm before empty layers": (
        {"pp": 3}, {}, {"empty_layers": {"head": 1, "tail": 3}, "final_norm": "before_tail_empty"}, {},
    ),
}  # fmt: skip
NOT_AGAIN = {
    "sliced messages",
    "parts of sequences on other ranks",
    "latent, clipped",
    "gathered again",
    "a rank with both ends",
}
PLANS = {
    f"{name}, {words}": (topology, schedule, {**modules, **model}, sections)
    for words, modules, names in (("embedded once", TWO, COMMON), ("embedded again", AGAIN, COMMON.keys() - NOT_AGAIN))
    for name, (topology, schedule, model, sections) in COMMON.items()
    if name in names
}


def lowered(topology, schedule, model, sections, **run):
    run = {"steps": 2, "seed": 3, **sections.get("run", {}), **run}
    sections = {name: keys for name, keys in sections.items() if name != "run"}
    return subject(
        model={"num_layers": 2, **model},
        topology=topology, schedule={"num_micro_batches": 3, **schedule}, run=run, **sections,
    ).unfolded().plan  # fmt: skip


@pytest.mark.slow(
    but=[
        "stages of their own, embedded once",
        "sliced messages, embedded once",
        "copies of stages, embedded once",
        "a rank with both ends, embedded once",
        "latent, clipped, embedded once",
        "again, embedded once",
        "stages of their own, embedded again",
        "copies of stages, embedded again",
        "sequence splits, embedded again",
        "dropout, embedded again",
        "norm before empty layers, embedded again",
        "experts, ep, sp, embedded again",
    ]
)
@pytest.mark.parametrize("name", PLANS)
def test_modules_have_the_bits_of_the_reference(name):
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    plan = lowered(*PLANS[name])
    first, second = compared(plan)
    assert first.bitwise
    assert second.bitwise
    assert first.loss.shape == (3,)
    assert sum(one.name == "mtp.1.proj.weight" for one in first.gradients) == 1
    assert max(one.unpartitioned_max_rel_diff for one in first.gradients) <= parallel_bound(plan.spec)


STAGES = {
    "split backward": ({"pp": 2}, {"kind": "zb_h1", "num_micro_batches": 3}, {}, None),
    "modules on stages of their own": ({"pp": 3}, {"num_micro_batches": 2}, {"moe": MOE}, OWN_STAGES),
    "a rank with both ends": ({"pp": 2}, {**V, "num_micro_batches": 4}, {"num_layers": 4}, None),
}


@pytest.mark.slow(but=["split backward"])
@pytest.mark.parametrize("name", STAGES)
def test_twenty_steps_of_a_pipeline_are_those_of_the_unpartitioned_model_bit_for_bit(name):
    from tests.exec.in_memory import unpartitioned_losses

    topology, schedule, model, stages = STAGES[name]
    sections = {} if stages is None else {"stages": stages}
    plan = lowered(topology, schedule, {**TWO, "seq_length": 4, **model}, sections, steps=20)
    assert len(set(unpartitioned_losses(plan))) == 20


def first_step(**mtp):
    from tests.exec.in_memory import compared

    plan = lowered({}, {}, {"mtp": {"num_modules": 2, **mtp}}, {}, steps=1)
    (step,) = compared(plan)
    assert step.bitwise
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
    """By hand, in numpy: what counts, what is read, and what is divided by."""
    from pipeproof.stages.describe.mtp_streams import shifted_batch
    from pipeproof.stages.describe.synthetic import IGNORED, loss_scale, micro_batch
    from pipeproof.stages.reference.unpartitioned import unpartitioned_step
    from tests.stages.staged_run import make_plan

    plan = make_plan(model={"num_layers": 1, **TWO}, schedule={"num_micro_batches": 1}, run={"dtype": "float64"})
    from pipeproof.stages.describe.gpt import describe_gpt
    from pipeproof.stages.describe.synthetic import initial_weight

    weights = {p.name: initial_weight(p, 0, "float64") for layer in describe_gpt(plan) for p in layer.parameters}
    weights["head.weight"] = np.zeros_like(weights["head.weight"])  # all words alike: each loss is log(words)
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
    from tests.align.recorded_run import RecordedRun
    from tests.cli.commands import invoke

    def located(run, place, status):
        run.record(tmp_path / place)
        result = invoke("state", "align", tmp_path / place / "run", tmp_path / place / "reference", "--format", "json")
        assert result.exit_code == status, result.output
        content = json.loads(result.stdout)
        require_fit("align", content)
        return content

    right = located(RecordedRun(**TWO), "right", 0)
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
    found = located(RecordedRun(**TWO), "wrong", 1)
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
