"""Tune lists of layers on CPU processes: ``paddle_tune.py PLAN``. Each rank checks the results."""

import os
import sys
import time

from pipeproof.exec.store.rendezvous import await_store
from pipeproof.stages.paddle.runtime import quiet_native, start_paddle

start_paddle()
import paddle  # noqa: E402
import pytest  # noqa: E402
from paddle import nn  # noqa: E402
from paddle.distributed.fleet.meta_parallel import LayerDesc, SharedLayerDesc  # noqa: E402

from pipeproof.paddle import Pipeline, PipelineError, Search, tune  # noqa: E402
from tests.train.programs.fleet_script import Block, cross_entropy, embed, head, tokens  # noqa: E402

RANK = int(os.environ["PADDLE_TRAINER_ID"])


class Slow(nn.Layer):
    """A layer whose forward takes ``ms`` milliseconds."""

    def __init__(self, ms):
        super().__init__()
        self.ms = ms
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        time.sleep(self.ms / 1e3)
        return self.linear(x)


def tune_a_list():
    built = Slow(5)
    paddle.seed(3)
    x = paddle.randn([2, 8])
    built.linear(x).sum().backward()
    gradient, weight = (value.numpy().copy() for value in (built.linear.weight.grad, built.linear.weight))
    layers = [LayerDesc(Slow, 60), built, LayerDesc(Slow, 5), LayerDesc(Slow, 6)]
    own = {"loss_fn": nn.functional.mse_loss, "example": x, "target": x, "num_micro_batches": 4}
    layout = tune(layers, **own, search=Search(num_trials=2))
    assert (gradient == built.linear.weight.grad.numpy()).all()
    assert (weight == built.linear.weight.numpy()).all()
    of_kind = {(row.schedule, row.split): row for row in layout.rows}
    assert of_kind["1f1b", "whole"].sizes == (1, 3), layout
    assert ("zb_h1", "linear") in of_kind, layout
    assert ("1f1b", "linear") not in of_kind, layout
    assert [row.measured_ms is not None for row in layout.rows[:3]] == [True, True, False], layout
    train(layers, layout, x, x)
    with pytest.raises(PipelineError, match=r"no layout fits into 9.99e-07 GiB.*for weights"):
        tune(layers, **own, memory_gib=1e-6)
    other = [*layers[:3], LayerDesc(nn.Linear, 8, 8)] if RANK else layers
    with pytest.raises(PipelineError, match="the model of tune differs between the ranks"):
        tune(other, **own)
    with pytest.raises(PipelineError, match="tune needs a loss"):
        tune(layers, example=x, target=x, num_micro_batches=4)
    return layout


def train(layers, layout, x, target):
    pipe = Pipeline(layout.stages, plan=layout.plan, loss_fn=layout_loss(layers), example=x)
    sizes = [len(names) for names in pipe.plan.content["stages"]]
    assert tuple(sizes) == layout.rows[0].sizes
    batch = paddle.concat([x] * 4), paddle.concat([target] * 4)
    assert pipe.compare(batch)
    pipe.close()


def layout_loss(layers):
    return cross_entropy if isinstance(layers[0], SharedLayerDesc) else nn.functional.mse_loss


def tune_shared_weights():
    first, last = (SharedLayerDesc("embedding", nn.Embedding, forward, "weight", 16, 8) for forward in (embed, head))
    layers = [first, *(LayerDesc(Block) for _ in range(3)), last]
    ids, labels = tokens(0, 1)
    layout = tune(layers, loss_fn=cross_entropy, example=ids, target=labels, num_micro_batches=4,
                  search=Search(num_trials=1, splits=["whole"]))  # fmt: skip
    train(layers, layout, ids, labels)


with quiet_native():
    if RANK:
        await_store(os.environ["PADDLE_MASTER"])
    paddle.distributed.init_parallel_env()
found = tune_a_list()
tune_shared_weights()
if not RANK:
    found.save(sys.argv[1])
