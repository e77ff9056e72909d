"""Stages of the plan's GPT as graphs: their gradients, the reasons of stages without graphs, and errors."""

import pytest
import torch

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.stages.torch.graph_errors import GraphOperationError
from pipeproof.stages.torch.graph_stage import GraphStage
from pipeproof.stages.torch.stage import StepBatches, TorchStage
from tests.stages.torch.features import COMPRESSED, make_plan
from tests.stages.torch.staged_run import CPU

pytestmark = pytest.mark.needs_torch


def plan_of(compiler="eager", **model):
    """One block; the norm and the head, which has the weight of the embedding, are a stage of their own."""
    run = {"backend": "torch", "compiler": compiler, "dtype": "float32"}
    return make_plan("plain", run=run, model={"num_layers": 1, "tied_embedding": True, **model})


def stages_of(plan, make, cut=2):
    layers = describe_gpt(plan)
    return [make(plan, part, CPU, *([number] if make is GraphStage else []))
            for number, part in enumerate((layers[:cut], layers[cut:]))]  # fmt: skip


def captured(plan, cut=2):
    stages = stages_of(plan, GraphStage, cut)
    for stage in stages:
        stage.capture()
    return stages


def step(plan, stages, *, delayed=False):
    """Losses and gradients of all micro-batches, with W after each I, or after all of them."""
    weights = {(number, name): w for number, stage in enumerate(stages) for name, w in stage.parameters.items()}
    for weight in weights.values():
        weight.zero_gradient()
    batches, works, losses = StepBatches(plan, 0, CPU), [], []
    batches.load(0)
    for index in range(plan.schedule.num_micro_batches):
        work_item = batches.work_item(index)
        sent = stages[0].forward(None, work_item, step=0, index=index)
        received = sent.detach().requires_grad_()
        loss = stages[1].forward(received, work_item, step=0, index=index)
        losses.append(stages[1].losses.clone())
        works += [stages[1].backward_input(loss, None), stages[0].backward_input(sent, received.grad)]
        while works and not delayed:
            works.pop(0).accumulate()
    for work in works:
        work.accumulate()
    for stage in stages:
        stage.return_gradients()
    return torch.stack(losses), {key: weight.gradient.clone() for key, weight in weights.items()}


def check_captured(plan, stages):
    """Graphs are within the bound of the operations, repeat their bits, and add the same in two parts."""
    assert [stage.reason for stage in stages] == ["", ""]
    losses, gradients = step(plan, stages)
    for again in (step(plan, stages), step(plan, stages, delayed=True)):
        assert torch.equal(again[0], losses)
        assert all(torch.equal(again[1][key], gradient) for key, gradient in gradients.items())
    expected_losses, expected = step(plan, stages_of(plan, TorchStage))
    bound = parallel_bound(plan)
    assert (losses - expected_losses).abs().max() <= bound * expected_losses.abs().max()
    for key, gradient in expected.items():
        assert gradient.abs().max() > 0 or ".indexer." in key[1]
        assert (gradients[key] - gradient).abs().max() <= bound * gradient.abs().max(), key
    assert all(kept.by_graph <= kept.by_eager for stage in stages for kept in stage.kept)


@pytest.fixture(scope="module")
def plain():
    """A plan and its stages with graphs."""
    plan = plan_of()
    return plan, captured(plan)


def test_graphs_have_the_gradients_of_the_operations(plain):
    check_captured(*plain)


@pytest.mark.parametrize("kind", COMPRESSED["compressed_attention"]["layer_types"])
def test_graphs_of_compressed_attention_have_the_gradients_of_the_operations(kind):
    plan = plan_of(compressed_attention={**COMPRESSED["compressed_attention"], "layer_types": [kind]})
    check_captured(plan, captured(plan))


@pytest.mark.slow  # Inductor calls a C++ compiler for each kernel
def test_compiled_graphs_have_the_gradients_of_the_operations():
    plan = plan_of("inductor")
    check_captured(plan, captured(plan))


def test_an_error_names_the_stage_the_operation_and_the_layer(plain):
    plan, stages = plain
    batches = StepBatches(plan, 0, CPU)
    batches.load(0)
    work_item = batches.work_item(1)
    activation = stages[0].forward(None, work_item, step=0, index=1).detach().requires_grad_()
    work_item.labels.fill_(plan.gpt.vocab_size)
    named = r"stage 1, micro-batch 1: `aten.nll_loss_forward\S*` of module `head` in the graph of the forward raised"
    with pytest.raises(GraphOperationError, match=named):
        stages[1].forward(activation, work_item, step=0, index=1)


def test_a_stage_without_graphs_has_a_reason_and_the_bits_of_its_operations():
    plan = plan_of()
    stages = stages_of(plan, GraphStage, cut=1)
    first = stages[0]
    first.capture()
    assert first.reason == "its layers compute nothing but lookups"
    assert first.kept == []
    found, expected = step(plan, stages), step(plan, stages_of(plan, TorchStage, cut=1))
    assert all(torch.equal(found[1][key], gradient) for key, gradient in expected[1].items())
