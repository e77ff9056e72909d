"""The first run of a stage, which finds its boundary, leaves nothing behind."""

import pytest
import torch
from torch import nn

from pipeproof.exec.train.torch.block_layers import layers_of
from pipeproof.exec.train.torch.boundary_inference import run_stage
from pipeproof.exec.train.torch.cut_transformers import stages_of_transformers

pytestmark = pytest.mark.needs_torch


def is_in_a_graph(weight):
    """True if a graph that is alive adds to the gradient of a weight: its node keeps a mark."""

    def marks():
        return weight.expand_as(weight).grad_fn.next_functions[0][0].metadata

    marks()["seen"] = True
    return "seen" in marks()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.Softmax, nn.SiLU], ids=lambda kind: kind.__name__)
def test_no_graph_outlives_it(activation, device):
    """The first two keep their own result for the backward."""
    module = nn.Sequential(nn.Linear(4, 4), activation(), nn.Linear(4, 4))
    run = run_stage(0, module, (torch.zeros(2, 4, device=device),), {}, torch.device("cpu"))
    assert sum(run.kept) > 0
    assert not any(map(is_in_a_graph, module.parameters()))


@pytest.mark.needs("transformers")
def test_no_graph_outlives_the_watch_of_layers():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32,
    )  # fmt: skip
    (stage,) = stages_of_transformers(LlamaForCausalLM(config), 1).values()
    run = run_stage(0, stage, (torch.zeros(1, 4, dtype=torch.long),), {}, torch.device("cpu"), layers=layers_of(stage))
    assert len(run.inner) == 4
    assert not any(map(is_in_a_graph, stage.parameters()))


def test_a_graph_that_is_alive_is_seen():
    weight = nn.Parameter(torch.ones(2))
    loss = weight.sigmoid().sum()
    assert is_in_a_graph(weight)
    del loss
    assert not is_in_a_graph(weight)
