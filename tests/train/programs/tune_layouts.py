"""Tune small models on two ranks over gloo; each rank checks the results."""

import copy
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch import measure_layers
from pipeproof.torch import Pipeline, Search, causal_lm_loss, tune


def sequential():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32 * (1 + n % 2)), nn.ReLU(), nn.Linear(32 * (1 + n % 2), 16))
                            for n in range(5)), nn.BatchNorm1d(16))  # fmt: skip
    return model, torch.randn(8, 16)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
                    num_key_value_heads=2, vocab_size=64, max_position_embeddings=32)
    )  # fmt: skip
    return model, torch.randint(0, 64, (2, 16))


def state_of(model):
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return weights, torch.get_rng_state(), [None if w.grad is None else w.grad.clone() for w in model.parameters()]


def require_same(before, after):
    (weights, random, gradients), (weights_after, random_after, gradients_after) = before, after
    assert all(torch.equal(value, weights_after[name]) for name, value in weights.items())
    assert torch.equal(random, random_after)
    for one, other in zip(gradients, gradients_after, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def tune_a_sequential(directory):
    model, x = sequential()
    nn.functional.mse_loss(model(x), x).backward()
    before = state_of(model)
    own = {"loss_fn": nn.functional.mse_loss, "example": (x,), "target": x, "num_micro_batches": 4}
    search = Search(num_trials=2, file=directory / "layout.json")
    layout = tune(model, **own, search=search)
    require_same(before, state_of(model))
    rows = layout.rows
    assert [row.measured_ms is not None for row in rows[:3]] == [True, True, False]
    assert rows[0].name in repr(layout)
    assert [note[:24] for note in layout.notes] == ["FSDP2 without a pipeline"] * 2
    assert "<table>" in layout._repr_html_()
    again = tune(model, **own, search=search)
    assert again.rows == rows
    assert again.plan == layout.plan
    pipe = Pipeline(
        layout.stages, plan=layout.plan, loss_fn=nn.functional.mse_loss, example=(x,), split=layout.split,
        replay=layout.replay,
    )  # fmt: skip
    batch = torch.cat([x] * 4)
    pipe.step(batch, target=batch)
    pipe.close()
    if dist.get_rank() == 0:
        layout.save(directory / "plan.yaml")


def recompute_a_llama(_):
    model, tokens = llama()
    own = {"loss_fn": causal_lm_loss, "example": (tokens,), "target": tokens, "num_micro_batches": 4,
           "search": Search(num_trials=1, splits=["whole"], without_pipeline=False)}  # fmt: skip
    free = tune(model, **own)
    least = min(row.predicted_gib for row in free.rows)
    tight = tune(model, **own, memory_gib=0.9 * least)
    assert any(tight.rows[0].recomputed)
    assert tight.rows[0].predicted_gib <= 0.9 * least
    flags = {n for n, block in enumerate(model.model.layers) if block.gradient_checkpointing}
    assert len(flags) == sum(tight.rows[0].recomputed)
    with pytest.raises(PipelineError, match=r"no layout fits into 1e-05 GiB.*for weights"):
        tune(model, **own, memory_gib=1e-5)


def recompute_a_sequential(_):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 8)) for _ in range(3)]
    blocks[1].forward = forward = partial(nn.Sequential.forward, blocks[1])
    model = nn.Sequential(nn.BatchNorm1d(8), *blocks, nn.BatchNorm1d(8))
    reference, x = copy.deepcopy(model), torch.randn(64, 8)
    own = {"loss_fn": nn.functional.mse_loss, "example": (x,), "target": x, "num_micro_batches": 4,
           "search": Search(num_trials=1, splits=["whole"], without_pipeline=False)}  # fmt: skip
    free = tune(model, **own)
    assert not any(free.rows[0].recomputed)
    assert {"forward"} & {*vars(model[1]), *vars(model[3])} == set()
    little = 0.9 * min(row.predicted_gib for row in free.rows)
    tight = tune(model, **own, memory_gib=little)
    assert any(tight.rows[0].recomputed)
    wrapped = [n for n, block in enumerate(model) if is_wrapped(block)]
    assert len(wrapped) == sum(tight.rows[0].recomputed)
    assert set(wrapped) <= {1, 2, 3}, "a second forward of the others changes their statistics"
    pipe = Pipeline(tight.stages, plan=tight.plan, loss_fn=nn.functional.mse_loss, example=(x,), split=tight.split)
    batch = torch.cat([x] * 4)
    assert pipe.compare(reference, batch, target=batch)
    pipe.close()
    again = tune(model, **own)
    assert not any(again.rows[0].recomputed)
    assert not any(map(is_wrapped, model))
    assert model[2].forward is forward, "the script's own forward is there again"
    changing = nn.Sequential(nn.Sequential(nn.ReLU(inplace=True), *copy.deepcopy(blocks[0])), *model)
    with pytest.raises(PipelineError, match="no layout fits"):
        tune(changing, **own, memory_gib=little)


def is_wrapped(block):
    forward = vars(block).get("forward")
    return isinstance(forward, partial) and forward.func.__name__ == "_checkpointed"


def other_models(_):
    model, x = sequential()
    if dist.get_rank():
        model[0][0] = nn.Linear(16, 33)
        model[0][2] = nn.Linear(33, 16)
    with pytest.raises(PipelineError, match="the model of tune differs between the ranks"):
        tune(model, loss_fn=nn.functional.mse_loss, example=(x,), target=x, num_micro_batches=2)


def bad_input(_):
    x = torch.randn(2, 4)
    own = {"loss_fn": nn.functional.mse_loss, "example": (x,), "target": x}
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for model, num, text in (
        (nn.Linear(4, 4), 4, "Linear is neither a model of transformers nor an nn.Sequential"),
        (nn.Sequential(layers[0]), 4, "no schedule exists for 1 layer, 2 ranks"),
        (nn.Sequential(*layers), 0, "num_micro_batches is 0: give at least 1"),
        (nn.Sequential(*layers, nn.Linear(5, 4)), 4, "layer 3 cannot run on the example"),
    ):
        with pytest.raises(PipelineError, match=text):
            tune(model, num_micro_batches=num, **own)
    for search, options, text in (
        (Search(rows_per_micro_batch=2), {"split_dims": {"x": 1}}, "changes rows in the first dim only"),
        (Search(rows_per_micro_batch=3), {}, "8 rows in a step and 2 ranks do not divide by data_ranks=1"),
        (Search(data_ranks=2), {"data_group": dist.group.WORLD}, "data_ranks makes the data group"),
    ):
        with pytest.raises(PipelineError, match=text):
            tune(nn.Sequential(*layers), num_micro_batches=4, search=search, **own, **options)


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.008)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.008)
        return gradient


class Waiting(nn.Linear):
    """A layer that takes 8 ms in each direction, for any number of rows: processors do not limit it."""

    def forward(self, x):
        return Wait.apply(super().forward(x))


def waiting(num_layers, *, rows=2):
    torch.manual_seed(0)
    model = nn.Sequential(*(Waiting(16, 16) for _ in range(num_layers)))
    x = torch.randn(4 * rows, 16)
    return model, x, {"loss_fn": nn.functional.mse_loss, "example": (x[:rows],), "target": x[:rows],
                      "num_micro_batches": 4}  # fmt: skip


def divide_the_ranks(directory):
    """Pipelines have bubbles, so four replicas are best; they do not fit into 70 % of the memory."""
    model, x, own = waiting(4)
    search = Search(num_trials=1, splits=["whole"], without_pipeline=False, data_ranks="auto")
    layout = tune(model, **own, search=replace(search, file=directory / "layout.json"))
    assert (layout.data_ranks, layout.replica, layout.rows[0].sizes) == (4, dist.get_rank(), (4,))
    assert layout.notes[0] == "no pipeline is best: 4 data ranks with all layers each"
    assert {row.data_ranks for row in layout.rows} == {1, 2, 4}
    again = tune(model, **own, search=replace(search, file=directory / "layout.json"))
    assert (again.rows, again.data_ranks, again.replica) == (layout.rows, 4, dist.get_rank())
    limit = 0.7 * layout.rows[0].predicted_gib
    layout = tune(model, **own, memory_gib=limit, search=search)
    assert (layout.data_ranks, layout.plan["topology"]) == (2, {"pp": 2, "dp": 2})
    pipe = Pipeline(
        layout.stages, plan=layout.plan, loss_fn=nn.functional.mse_loss, example=own["example"], split=layout.split,
        group=layout.group, data_group=layout.data_group,
    )  # fmt: skip
    part = x.chunk(layout.data_ranks)[layout.replica]
    pipe.step(part, target=part)
    reference = waiting(4)[0]
    nn.functional.mse_loss(reference(x), x).backward()
    expected = {name: weight.grad for name, weight in reference.named_parameters()}
    for stage in pipe.stages.values():
        for name, weight in stage.named_parameters():
            torch.testing.assert_close(weight.grad, expected[name])
    pipe.close()
    with pytest.raises(PipelineError, match="8 rows in a step and 4 ranks do not divide by data_ranks=3"):
        tune(model, **own, search=replace(search, data_ranks=3))


def vary_the_rows(_):
    """A layer takes as long for all rows: one micro-batch is better than four."""
    model, x, own = waiting(4)
    search = Search(num_trials=1, splits=["whole"], without_pipeline=False, rows_per_micro_batch="auto")
    layout = tune(model, **own, search=search)
    assert {row.rows for row in layout.rows} >= {2, 4, 8}
    assert (layout.micro_batch_size, layout.plan["schedule"]["num_micro_batches"]) == (8, 1)
    assert "micro-batches of 8 rows" in layout.rows[0].name
    pipe = Pipeline.tuned(model, **own, search=replace(search, rows_per_micro_batch=4))
    assert (pipe.micro_batch_size, pipe.num_micro_batches) == (4, 2)
    assert pipe.compare(waiting(4)[0], x, target=x)
    pipe.close()


def tune_without_memory(_):
    """At most two layers of a model on the meta device have memory while they are measured."""
    from transformers import AutoModelForCausalLM

    model, tokens = llama()
    with torch.device("meta"):
        blocks = sequential()[0]
        model = AutoModelForCausalLM.from_config(model.config)
    x = torch.randn(8, 16)
    search = Search(num_trials=1, splits=["whole"])
    for tuned, chain, own in (
        (blocks, blocks, {"loss_fn": nn.functional.mse_loss, "example": (x,), "target": x}),
        (model, model.model.layers, {"loss_fn": causal_lm_loss, "example": (tokens,), "target": tokens}),
    ):
        with mock.patch.object(measure_layers, "with_memory", wraps=measure_layers.with_memory) as memory:
            layout = tune(tuned, **own, num_micro_batches=4, search=search)
        made = [module for call in memory.call_args_list for module in call.args[0]]
        assert made
        assert max(sum(layer in [*module.modules()] for layer in chain) for module in made) <= 2
        assert layout.rows[0].measured_ms
        assert [note[:24] for note in layout.notes] == ["FSDP2 without a pipeline"] * 2
        assert all(value.is_meta for value in (*tuned.parameters(), *tuned.buffers()))


def train_in_one_line(_):
    model, x = sequential()
    pipe = Pipeline.tuned(
        model,
        loss_fn=nn.functional.mse_loss,
        example=(x,),
        target=x,
        num_micro_batches=2,
        search=Search(num_trials=1),
    )
    batch = torch.cat([x, x])
    assert pipe.compare(sequential()[0], batch, target=batch)
    pipe.close()


dist.init_process_group("gloo")
globals()[sys.argv[1]](Path(sys.argv[2]))
dist.destroy_process_group()
