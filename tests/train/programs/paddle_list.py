"""Lists of layers in ``pipeproof.paddle.Pipeline`` without Fleet: ``paddle_list.py OUTPUT CASE``, on two CPU processes.

Each rank writes the results of a case, as JSON.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from pipeproof.exec.store.rendezvous import await_store
from pipeproof.stages.paddle.runtime import quiet_native, start_paddle

start_paddle()
import paddle  # noqa: E402
from paddle import nn  # noqa: E402
from paddle.distributed.fleet.meta_parallel import LayerDesc, SharedLayerDesc  # noqa: E402

from pipeproof.exec.train.paddle.channel_groups import GlooSums  # noqa: E402
from pipeproof.paddle import Pipeline, PipelineError  # noqa: E402
from tests.train.programs.fleet_script import Block, Last, cross_entropy, embed, floats, head, square, tokens  # noqa: E402

STEPS, COUNT, SEED = 3, 4, 1234
RANK = int(os.environ["PADDLE_TRAINER_ID"])
INTERLEAVED = {"pipeproof": 1, "schedule": {"kind": "interleaved", "num_chunks": 2, "num_micro_batches": COUNT}}


def blocks(count, dropout=0.0):
    return [*(LayerDesc(Block, dropout=dropout) for _ in range(count - 1)), LayerDesc(Last)]


def tied():
    first, last = (SharedLayerDesc("embedding", nn.Embedding, forward, "weight", 16, 8) for forward in (embed, head))
    return [first, *(LayerDesc(Block) for _ in range(4)), last]


class Pair(nn.Layer):
    """A tensor, or the two of a pair, to a pair: the output of a block, and a tensor that skips it."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        x, skipped = x if isinstance(x, tuple) else (x, x)
        return self.block(x), x + skipped


class Joined(nn.Layer):
    def __init__(self):
        super().__init__()
        self.last = Last()

    def forward(self, pair):
        return self.last(pair[0] * pair[1])


def pairs():
    return [*(LayerDesc(Pair) for _ in range(3)), LayerDesc(Joined)]


class Frozen(Block):
    def __init__(self):
        super().__init__()
        for weight in self.parameters():
            weight.stop_gradient = True


def adamw(weights):
    return paddle.optimizer.AdamW(0.01, parameters=weights, weight_decay=0.1)


class Unpartitioned:
    """The whole model in one process, by plain autograd: layer I is built after the seed 1234 + I."""

    def __init__(self, described, loss):
        self.calls, self.weights, shared = [], {}, {}
        for position, each in enumerate(described):
            paddle.seed(SEED + position)
            if isinstance(each, SharedLayerDesc):
                layer = shared.setdefault(each.layer_name, None) or each.build_layer()
                shared[each.layer_name] = layer
                self.calls.append(lambda x, layer=layer, each=each: each.forward_func(layer, x))
                name = f"shared_layers.{each.layer_name}"
            else:
                layer = each.build_layer()
                self.calls.append(layer)
                name = str(position)
            self.weights |= {f"{name}.{inner}": weight for inner, weight in layer.named_parameters()}
        self.loss = loss
        self.optimizer = adamw([*self.weights.values()])

    def forward(self, x):
        for call in self.calls:
            x = call(x)
        return x

    def train(self, data):
        losses = []
        for x, y in zip(*(paddle.split(whole, COUNT) for whole in data), strict=True):
            loss = self.loss(self.forward(x), y) / COUNT
            losses.append(loss.detach())
            loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()
        total = paddle.zeros_like(losses[0])
        for loss in losses:
            total += loss
        return total


def compared(described, loss, data, forward=None, **arguments):
    """Train both; the values that differ, and the greatest difference of a weight. ``forward`` is of another graph."""
    whole = Unpartitioned(described(), loss)
    if forward is not None:
        whole.forward = partial(forward, *whole.calls)
    pipe = Pipeline(described(), loss_fn=loss, num_micro_batches=COUNT, timeout_s=60, **arguments)
    optimizer = adamw(pipe.parameters())
    wrong = []
    for step in range(STEPS):
        batch = data(step, COUNT)
        expected, found = whole.train(batch), pipe.train_batch(batch, optimizer)
        if expected.numpy().tobytes() != found.numpy().tobytes():
            wrong.append(f"loss of step {step}")
    own = {name.removeprefix("_layers."): weight for name, weight in pipe.named_parameters()}
    assert set(own) <= set(whole.weights), sorted(own)
    wrong += [name for name, weight in own.items() if weight._md5sum() != whole.weights[name]._md5sum()]
    greatest = max(float(abs(weight - whole.weights[name]).max()) for name, weight in own.items())
    outputs = pipe.eval_batch(data(9, COUNT))
    with paddle.no_grad():
        expected = [whole.forward(x) for x in paddle.split(data(9, COUNT)[0], COUNT)]
    if pipe.is_pipeline_last_stage():
        assert len(outputs) == COUNT
        if not wrong:
            assert all(a._md5sum() == b._md5sum() for a, b in zip(outputs, expected, strict=True))
    else:
        assert outputs == []
    facts = {"wrong": wrong, "greatest": greatest, "names": sorted(own), "schedule": pipe.plan.content["schedule"]}
    facts["digest"] = pipe.plan.certificate.graph_digest
    return facts, pipe


def same_as_unpartitioned(output):
    found = {}
    for kind in ("zb_v", "zb_h1"):
        found[kind], pipe = compared(lambda: blocks(6), square, floats, schedule=kind)
        pipe.close()
    for kind in ("zb_v", "1f1b"):  # on one rank, and on two
        found[f"tied {kind}"], pipe = compared(tied, cross_entropy, tokens, schedule=kind)
        pipe.close()
    for kind in ("zb_v", "1f1b"):  # of the first stages nothing is trained
        found[f"frozen {kind}"], pipe = compared(
            lambda: [LayerDesc(Frozen), LayerDesc(Frozen), *blocks(3)], square, floats, schedule=kind
        )
        pipe.close()
    found["interleaved"], pipe = compared(lambda: blocks(6), square, floats, plan=INTERLEAVED)
    pipe.close()
    # the plan that was made, from its file; and one that declares every layer, with its own partition
    file = f"{output}.{RANK}.yaml"
    pipe.plan.save(file)
    found["again"], pipe = compared(lambda: blocks(6), square, floats, plan=file)
    pipe.close()
    found["declared"], pipe = compared(lambda: blocks(4), square, floats, plan=declared())
    pipe.close()
    for messages in ("per_tensor", "packed"):  # of two tensors with gradients
        plan = {
            "pipeproof": 1, "schedule": {"kind": "zb_v", "num_micro_batches": COUNT},
            "transport": {"messages": messages},
        }  # fmt: skip
        found[messages], pipe = compared(pairs, square, floats, plan=plan)
        pipe.close()
    return found


class Down(nn.Layer):
    """An output for the next layer, and half of the width for a later one."""

    def __init__(self, skip):
        super().__init__()
        self.block, self.narrow, self.skip = Block(), nn.Linear(8, 4), skip

    def forward(self, x):
        return {"x": self.block(x), self.skip: self.narrow(x)}


class Up(nn.Layer):
    def __init__(self):
        super().__init__()
        self.block, self.wide = Last(), nn.Linear(4, 8)

    def forward(self, x, **skip):
        (value,) = skip.values()
        return self.block(x) + self.wide(value)


class Reads(nn.Layer):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, first=None):
        return self.block(x) if first is None else self.block(x * first)


def unet(down1, down2, up2, up1, x):
    x, skip1 = down1(x).values()
    x, skip2 = down2(x).values()
    return up1(up2(x, skip2=skip2), skip1=skip1)


def residuals(one, two, three, four, x):
    """Each stage reads the first output by a copy of its own: a pipeline adds what a stage uses of it first."""
    first = one(x)
    return four(three(two(first.clone()), first=first.clone()), first=first.clone())


def edges(output):
    found = {}
    models = {
        "unet": (lambda: [LayerDesc(Down, "skip1"), LayerDesc(Down, "skip2"), LayerDesc(Up), LayerDesc(Up)], unet,
                 {"skip1": (0, [3]), "skip2": (1, [2])}),
        "residuals": (lambda: [LayerDesc(Reads) for _ in range(4)], residuals, {"first": (0, [2, 3])}),
    }  # fmt: skip
    two = paddle.distributed.get_world_size() == 2
    kinds = {"zb_v": {"schedule": "zb_v"}, "interleaved": {"plan": INTERLEAVED}} if two else {
        "1f1b": {"schedule": "1f1b"}, "zb_h1": {"schedule": "zb_h1"}}  # fmt: skip
    for name, (described, forward, given) in models.items():
        for route in ("relay", "direct"):
            of_route = {edge: (*ends, route) for edge, ends in given.items()}
            for kind, arguments in kinds.items():
                case = f"{name} {route} {kind}"
                found[case], pipe = compared(described, square, floats, forward, edges=of_route, **arguments)
                assert [(edge["name"], edge["route"]) for edge in pipe.plan.content["edges"]] == [
                    (edge, route) for edge in given
                ]  # fmt: skip
                comparison = pipe.compare(floats(7, COUNT))
                assert comparison.is_exact, str(comparison)
                pipe.close()
    return found


def declared(rows=2):
    """A plan with an entry for each of four layers, two stages of three and one."""
    block = {"norm.weight": [8], "norm.bias": [8], "up.weight": [8, 16], "up.bias": [16], "down.weight": [16, 8],
             "down.bias": [8]}  # fmt: skip
    weights = [block] * 3 + [{"linear.weight": [8, 8], "linear.bias": [8]}]
    layers = [
        {
            "name": f"part.{number}",
            "parameters": [{"name": name, "shape": shape} for name, shape in named.items()],
            **({"out": [{"shape": ["b", 8]}]} if number < 3 else {}),
        }
        for number, named in enumerate(weights)
    ]
    return {
        "pipeproof": 1, "model": {"kind": "layers", "layers": layers}, "topology": {"pp": 2},
        "schedule": {"kind": "1f1b", "num_micro_batches": COUNT, "micro_batch_size": rows},
        "stages": [["part.0", "part.1", "part.2"], ["part.3"]],
    }  # fmt: skip


class Breaks(nn.Layer):
    """Raises in the forward, or makes another shape, of one micro-batch; counts its forwards."""

    def __init__(self, at, *, shrinks=False):
        super().__init__()
        self.linear, self.at, self.shrinks, self.count = nn.Linear(8, 8), at, shrinks, 0

    def forward(self, x):
        self.count += 1
        if self.count == self.at and self.shrinks:
            return self.linear(x)[:, :4]
        if self.count == self.at:
            raise ValueError("the fifth wheel")
        return self.linear(x)


def error_of(call):
    """The kind and the text of the error of a call; asserts that it comes within seconds."""
    begins = time.monotonic()
    try:
        call()
    except PipelineError as error:
        assert time.monotonic() - begins < 30
        return [type(error).__name__, str(error)]
    return None


def errors(output):
    found = {}

    def train(layers, data=None, steps=2, **arguments):
        arguments = {"num_micro_batches": COUNT, "loss_fn": square, "timeout_s": 30, **arguments}
        pipe = Pipeline(layers, **arguments)
        optimizer = adamw(pipe.parameters())
        for step in range(steps):
            pipe.train_batch(floats(step, COUNT) if data is None else data(step), optimizer)

    one = [LayerDesc(Block)]
    # micro-batch 2 of the second step: the first forward of all finds the shapes
    found["layer"] = error_of(lambda: train([Breaks(1 + COUNT + 3), *one]))
    found["last layer"] = error_of(lambda: train([*one, Breaks(1 + COUNT + 3)]))
    found["shape"] = error_of(lambda: train([Breaks(1 + 2, shrinks=True), *one]))
    found["example"] = error_of(lambda: train([*one, Breaks(1)]))
    found["rows"] = error_of(lambda: train([*one, *one], data=lambda step: [paddle.ones([8 - step, 8])] * 2))
    found["no data"] = error_of(lambda: train([*one, *one], data=lambda step: None))
    found["no loss"] = error_of(lambda: train([*one, *one], loss_fn=None))
    found["cut"] = error_of(lambda: train(one))
    found["count"] = error_of(lambda: train([*one, *one], num_micro_batches=4 + RANK))
    clip = nn.ClipGradByGlobalNorm(1.0)

    def clipped():
        pipe = Pipeline([*one, *one], loss_fn=square, num_micro_batches=COUNT, timeout_s=30)
        weights = pipe.parameters()
        pipe.train_batch(floats(0, COUNT), paddle.optimizer.SGD(0.1, parameters=weights, grad_clip=clip))

    found["clip"] = error_of(clipped)
    deadlock = [
        [op for n in range(COUNT) for op in (f"0F{n}", f"0B{n}")],
        [*(f"1F{n}" for n in range(COUNT)), *(f"1B{n}" for n in range(COUNT))],
    ]
    found["refused"] = error_of(lambda: train([*one, *one], schedule=deadlock))
    found["edge"] = error_of(lambda: train([*one, *one], edges={"skip": (1, [0])}))
    found["no tensor"] = error_of(
        lambda: train([*one, *one, *one, *one], schedule="zb_v", edges={"a": (0, [2]), "b": (0, [3])})
    )
    layer = Last()
    found["twice"] = error_of(lambda: train([layer, *one, layer]))
    found["early"] = error_of(lambda: Pipeline([*one, *one], num_micro_batches=4).plan)
    # rank 1 comes too late: both raise the wait of rank 0
    pipe = Pipeline([*one, *one], loss_fn=square, num_micro_batches=COUNT, timeout_s=3)
    optimizer = adamw(pipe.parameters())
    pipe.train_batch(floats(0, COUNT), optimizer)
    time.sleep(8 * RANK)
    found["stall"] = error_of(lambda: pipe.train_batch(floats(1, COUNT), optimizer))
    return found


def whole(described, loss, data, **arguments):
    """The words of ``compare`` after one step of training, and whether gradients and buffers stay as they were."""
    pipe = Pipeline(described, loss_fn=loss, num_micro_batches=COUNT, timeout_s=60, **arguments)
    optimizer = adamw(pipe.parameters())
    pipe.train_batch(data(0, COUNT), optimizer)
    weights = pipe.parameters()
    weights[0].grad = paddle.ones_like(weights[0])
    before = [weight._md5sum() for weight in (*weights, weights[0].grad)]
    comparison = pipe.compare(data(1, COUNT))
    assert before == [weight._md5sum() for weight in (*weights, weights[0].grad)]
    assert all(weight.grad is None or not weight.grad.any() for weight in weights[1:])
    pipe.close()
    facts = {"exact": comparison.is_exact, "text": str(comparison), "number": comparison.num_parameters}
    facts["differences"] = [[each.stage, each.name, each.distance] for each in comparison.differences]
    return facts


class Doubled(Last):
    """A layer with twice the right gradient if the pipeline built it, on rank 1."""

    def __init__(self):
        super().__init__()
        if RANK == 1:
            self.linear.weight.register_hook(lambda gradient: 2 * gradient)


class Unused(Block):
    """A block with a weight that its forward does not use, and a batch norm, whose statistics each forward changes."""

    def __init__(self):
        super().__init__()
        self.unused, self.batch_norm = self.create_parameter([2]), nn.BatchNorm1D(8)

    def forward(self, x):
        return self.batch_norm(super().forward(x))


def comparisons(output):
    found = {}
    for kind in ("zb_v", "1f1b", "dualpipe_v", "gpipe"):
        found[kind] = whole(blocks(5), square, floats, schedule=kind)
        found[f"tied {kind}"] = whole(tied(), cross_entropy, tokens, schedule=kind)
    found["interleaved"] = whole(pairs(), square, floats, plan=INTERLEAVED)
    paddle.seed(3)  # layers that the script has built, equal on all ranks
    found["built"] = whole([Block(), Frozen(), Block(), Last()], square, floats, schedule="zb_v")
    found["unused"] = whole([LayerDesc(Unused), *blocks(2)], square, floats)
    found["hook"] = whole([*blocks(3)[:2], LayerDesc(Doubled)], square, floats)
    summed, GlooSums.reduce = GlooSums.reduce, lambda self, tensor, reduction: tensor
    found["not summed"] = whole(tied(), cross_entropy, tokens)
    GlooSums.reduce = summed
    found["iterator"] = error_of(lambda: whole_of(iter([])))
    found["no labels"] = error_of(lambda: whole_of((floats(0, COUNT)[0], None if RANK == 0 else floats(0, COUNT)[1])))
    return found


def whole_of(data):
    pipe = Pipeline(blocks(2), loss_fn=square, num_micro_batches=COUNT, example=paddle.ones([2, 8]), timeout_s=30)
    return pipe.compare(data)


def main(output, case):
    if RANK:
        await_store(os.environ["PADDLE_MASTER"])
    with quiet_native():
        paddle.distributed.init_parallel_env()
    found = {"same": same_as_unpartitioned, "compare": comparisons, "errors": errors, "edges": edges}[case](output)
    Path(f"{output}.{RANK}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
