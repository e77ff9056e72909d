"""A Fleet script on CPU processes, trained twice: by Fleet's own classes, and with one line changed by pipeproof.

``fleet_script.py OUTPUT REPLICAS CASE ...``. Fleet runs on the CPU in the groups of ``validation.fleet``. Each
rank writes the losses, and the digests of weights and optimizer states, of both, by case.
"""

import json
import os
import sys
import types
from pathlib import Path
from unittest import mock

from pipeproof.exec.store.rendezvous import await_store
from pipeproof.stages.paddle.runtime import quiet_native, quiet_python, start_paddle
from validation.fleet.fleet_groups import connect_fleet, fleet_groups

start_paddle()
import paddle  # noqa: E402
from paddle import nn  # noqa: E402
from paddle.distributed import fleet  # noqa: E402
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc  # noqa: E402

import pipeproof.paddle  # noqa: E402

STEPS, ROWS, WIDTH, VOCABULARY = 3, 2, 8, 16


class Block(nn.Layer):
    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class PairBlock(nn.Layer):
    """Takes and returns a tuple; one member has no gradient."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, values):
        x, mask = values if isinstance(values, tuple) else (values, (values.detach() > 0).astype("float32"))
        return x + paddle.tanh(self.linear(x)) * mask, mask


class Last(nn.Layer):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, values):
        return self.linear(values[0] if isinstance(values, tuple) else values)


def embed(layer, x):
    return layer(x)


def head(layer, x):
    return paddle.matmul(x, layer.weight, transpose_y=True)


def square(output, label):
    return ((output - label) ** 2).mean()


def cross_entropy(output, label):
    return nn.functional.cross_entropy(output.reshape([-1, VOCABULARY]), label.reshape([-1]))


def floats(step, count):
    paddle.seed(1000 + step)
    shape = [count * ROWS, WIDTH]
    return paddle.randn(shape), paddle.randn(shape)


def tokens(step, count):
    paddle.seed(2000 + step)
    shape = [count * ROWS, 5]
    return paddle.randint(0, VOCABULARY, shape), paddle.randint(0, VOCABULARY, shape)


def in_lists(step, count):
    """One entry for each micro-batch."""
    return [[*paddle.split(whole, count)] for whole in floats(step, count)]


def adamw(weights):
    schedule = paddle.optimizer.lr.StepDecay(0.01, step_size=1, gamma=0.5)
    return paddle.optimizer.AdamW(schedule, parameters=weights, weight_decay=0.1), schedule


def momentum(weights):
    schedule = paddle.optimizer.lr.CosineAnnealingDecay(0.1, T_max=STEPS)
    clip = nn.ClipGradByGlobalNorm(0.05)
    return paddle.optimizer.Momentum(schedule, parameters=weights, use_nesterov=True, grad_clip=clip), schedule


def tied(count):
    shared = [
        SharedLayerDesc("embedding", nn.Embedding, forward, "weight", VOCABULARY, WIDTH) for forward in (embed, head)
    ]
    return [shared[0], *(LayerDesc(Block) for _ in range(count)), shared[1]]


CASES = {
    "adamw": {
        "layers": lambda: [*(LayerDesc(Block, dropout=0.3) for _ in range(3)), LayerDesc(Last)],
        "micro_batches": 4, "optimizer": adamw, "data": floats, "loss": square, "scaled": True,
    },
    "tuples": {
        "layers": lambda: [*(LayerDesc(PairBlock) for _ in range(5)), LayerDesc(Last)],
        "micro_batches": 3, "optimizer": momentum, "data": in_lists, "loss": [square, lambda y, z: abs(y - z).mean()],
    },
    "tied": {
        "layers": lambda: tied(4), "micro_batches": 5, "optimizer": momentum, "data": tokens, "loss": cross_entropy,
        "delay": True,
    },
    "interleaved": {
        "layers": lambda: tied(8)[1:-1], "micro_batches": 9, "optimizer": adamw, "data": floats, "loss": square,
        "virtual": 2,
    },
}  # fmt: skip


def trained_by(wrap, case, world, topology):
    """Losses, digests and the rate after training the case; ``wrap`` is the line that the script changes."""
    count = case["micro_batches"]
    with quiet_python(), fleet_groups(world):
        paddle.seed(7)
        layers = PipelineLayer(
            case["layers"](), topology=topology, loss_fn=case["loss"],
            seg_method="layer:Block" if case.get("virtual") else "uniform",
            num_virtual_pipeline_stages=case.get("virtual"),
        )  # fmt: skip
        model = wrap(layers)
        optimizer, schedule = case["optimizer"](model.parameters())
        optimizer = fleet.distributed_optimizer(optimizer)
        scaler = None
        if case.get("scaled"):
            scaler = fleet.distributed_scaler(enabled_scaler())
    losses = []
    replica = fleet.get_hybrid_communicate_group().get_data_parallel_rank()
    for step in range(STEPS):
        data = case["data"](step + 10 * replica, count)
        if scaler is not None and step == 1:
            data = (data[0] * 1e30, data[1])  # an overflow: all ranks skip the step and halve the scale
        loss = model.train_batch(data, optimizer, schedule, scaler, loss_fn_idx=len(losses) % len(layers._loss_fn))
        losses.append(loss if isinstance(loss, list) else [loss])
    with paddle.no_grad():
        evaluated = model.eval_batch(case["data"](9, count), compute_loss=True)
        losses.append(evaluated if isinstance(evaluated, list) else [evaluated])
        outputs = model.eval_batch(case["data"](9, count)) if model.is_pipeline_last_stage(ignore_virtual=True) else []
        if not model.is_pipeline_last_stage(ignore_virtual=True):
            model.eval_batch(case["data"](9, count))
    state = {name: value._md5sum() for name, value in model.state_dict().items()}
    for name, value in optimizer.state_dict().items():
        if isinstance(value, paddle.Tensor):
            state[f"optimizer, {len(state)} {name.partition('_')[0]}"] = value._md5sum()
    return {
        "losses": [[[x.numpy().tolist(), str(x.dtype), list(x.shape)] for x in found] for found in losses],
        "outputs": [x._md5sum() for x in outputs],
        "state": state,
        "gradients": sum(w.grad is not None for w in layers.parameters()),
        "rate": optimizer.get_lr(),
        "scale": None if scaler is None else float(scaler._scale),
        "class": type(model).__name__,
    }, model


def enabled_scaler():
    """A scaler that is enabled on the CPU, where Paddle has its kernels and refuses only the object."""
    place = types.SimpleNamespace(is_gpu_place=lambda: True)
    tracer = types.SimpleNamespace(_expected_place=place)
    with mock.patch("paddle.amp.grad_scaler._dygraph_tracer", return_value=tracer):
        scaler = paddle.amp.GradScaler(init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1)
    scaler._scale = scaler._scale.reshape([])  # Paddle's message about an overflow fails on one dim with NumPy 2.4
    return scaler


def main(output, replicas, *names):
    rank, num_ranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
    if rank:
        await_store(os.environ["PADDLE_MASTER"])
    pp = num_ranks // int(replicas)
    rings = [[(first + a, first + (a + 1) % pp) for a in range(pp)] for first in range(0, num_ranks, pp)]
    is_ring = any(CASES[name].get("virtual") for name in names)
    edges = [edge for ring in rings for edge in (ring if is_ring else ring[:-1])]
    world = connect_fleet(rank, num_ranks, sorted({*edges, *((b, a) for a, b in edges)}))
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": pp, "dp_degree": int(replicas), "mp_degree": 1}
    with quiet_python(), quiet_native(), fleet_groups(world):
        fleet.init(is_collective=True, strategy=strategy, log_level="ERROR")
    topology = fleet.get_hybrid_communicate_group().topology()
    content = {}
    for name in names:
        case, settings = CASES[name], fleet.fleet._user_defined_strategy
        settings.hybrid_configs = {"pp_configs": {"delay_scale_loss": bool(case.get("delay"))}}
        settings.pipeline_configs = {"accumulate_steps": case["micro_batches"], "micro_batch_size": ROWS}
        theirs, _ = trained_by(fleet.distributed_model, case, world, topology)
        ours, pipeline = trained_by(pipeproof.paddle.Pipeline, case, world, topology)
        content[name] = {"fleet": theirs, "ours": ours, "plan": pipeline.plan.content}
        assert pipeline._ranks.fleet.delay_scale_loss == bool(case.get("delay"))
        pipeline.close()
    Path(f"{output}.{rank}").write_text(json.dumps(content))


if __name__ == "__main__":
    main(*sys.argv[1:])
