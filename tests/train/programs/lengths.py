"""Two processes: one pipeline for steps of many lengths and numbers of rows."""

import contextlib
import gc
import random
import tempfile
import tracemalloc
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import clear, main, own_copies, refused, same_bits, say
from torch import nn

from pipeproof.exec.train.torch.signatures import MOST_SIGNATURES
from pipeproof.torch import MicroBatches, Pipeline, PipelineError, stages_of_rank

NUM, ROWS, VOCABULARY, WIDTH = 4, 2, 17, 8


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x)).cumsum(1) / x.shape[1]


def entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def models(num_stages):
    torch.manual_seed(0)
    middle = [Middle() for _ in range(num_stages - 2)]
    return [nn.Embedding(VOCABULARY, WIDTH), *middle, nn.Linear(WIDTH, VOCABULARY)]


def made(kind="1f1b", **options):
    num = 2 if kind == "1f1b" else 4
    modules = models(num)
    own = own_copies(modules, stages_of_rank(kind, 2, num, dist.get_rank()))
    example = (torch.zeros(ROWS, 5, dtype=torch.long),)
    usual = {"schedule": kind, "num_micro_batches": NUM, "loss_fn": entropy, "example": example, "timeout_s": 60.0}
    return modules, own, Pipeline(own, **{**usual, **options})


def ids(rows, length, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + 100 * rows + length)
    return [torch.randint(VOCABULARY, (rows, length), generator=generator) for _ in range(2)]


def reference(modules, parts):
    """The mean loss of the unpartitioned model over micro-batches; its gradients are in ``.grad``."""
    losses = []
    for x, y in parts:
        h = x
        for module in modules:
            h = module(h)
        losses.append(entropy(h, y))
        (losses[-1] / len(parts)).backward()
    return torch.stack([loss.detach() for loss in losses]).sum() / len(parts)


def parts_of(x, y):
    """Four micro-batches where that divides the rows, else micro-batches of the example's rows."""
    num = NUM if len(x) % NUM == 0 else len(x) // ROWS
    return list(zip(x.chunk(num), y.chunk(num), strict=True))


def random_lengths():
    """Random lengths and rows, with a partial last batch; in some steps each rank has only the arguments that it
    needs."""
    for kind, split in (("1f1b", "whole"), ("interleaved", "whole"), ("zb_v", "linear")):
        modules, own, pipe = made(kind, split=split)
        every = nn.ModuleList(modules)
        optimizers = [torch.optim.SGD([*m.parameters()], 0.1) for m in (every, nn.ModuleList(own.values()))]
        drawn = random.Random(1)
        for step in range(20):
            x, y = ids(6 if step % 10 == 9 else drawn.choice((4, 8, 16)), drawn.choice((3, 5, 6, 9)), step)
            expected = reference(modules, parts_of(x, y))
            is_alone = drawn.random() < 0.5
            args = (x,) if pipe.is_first or not is_alone else ()
            loss = pipe.step(*args, target=y if pipe.is_last or not is_alone else None)
            assert loss is None or torch.equal(loss, expected)
            same_bits(own, modules)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step % 7 == 0:
                with torch.no_grad():
                    losses = [entropy(nn.Sequential(*modules)(a), b) for a, b in parts_of(x, y)]
                loss = pipe.eval_step(x, target=y)
                assert loss is None or torch.equal(loss, torch.stack(losses).sum() / len(losses))
        pipe.close()
        say("random_lengths", kind=kind)


def refused_steps():
    """One text on both ranks, and a right step after each."""
    modules, own, pipe = made()
    x, y = ids(8, 5)
    for change, text in (
        ({"x": x[:7]}, "the step has 7 rows"),
        ({"y": None}, "pass `target`"),
        ({"y": y[:4]}, "target"),
        ({"x": MicroBatches([x[:2]]), "y": MicroBatches([y[:2], y[2:4]])}, "micro-batches"),
        ({"x": x.float()}, "stage 0 fails on the example"),  # no indices
    ):
        own_x, own_y = change.get("x", x), change.get("y", y)
        caught = ""
        try:
            pipe.step(own_x, target=own_y)
        except PipelineError as error:
            caught = str(error)
        texts = [None, None]
        dist.all_gather_object(texts, caught)
        assert text in caught, texts
        assert texts[0] == texts[1]
        clear(dict(enumerate(modules)))
        expected = reference(modules, parts_of(x, y))
        loss = pipe.step(x, target=y)
        assert loss is None or torch.equal(loss, expected)
        same_bits(own, modules)
        clear(own)
    other = 8 if pipe.is_first else 4
    refused(lambda: pipe.step(x, target=y) if pipe.is_first else pipe.eval_step(x, target=y), "different steps")
    refused(lambda: pipe.step(x[:other], target=y[:other]), "target")
    pipe.step(x, target=y)
    pipe.close()
    say("refused_steps")


def listed():
    """Micro-batches of other numbers and lengths, listed by ``MicroBatches``; rows that nothing divides."""
    modules, own, pipe = made()
    for sizes in (((2, 5), (2, 3), (2, 5)), ((1, 4), (1, 4)), ((2, 5), (2, 5), (2, 7), (2, 3))):
        data = [ids(rows, length, seed) for seed, (rows, length) in enumerate(sizes)]
        clear(dict(enumerate(modules)))
        expected = reference(modules, data)
        loss = pipe.step(MicroBatches(x for x, _ in data), target=MicroBatches(y for _, y in data))
        assert loss is None or torch.equal(loss, expected)
        same_bits(own, modules)
        clear(own)
    pipe.close()
    say("listed")


def tools():
    """``compare``, ``profile`` and ``record`` of steps that are not like the example."""
    modules, own, pipe = made()
    x, y = ids(6, 7)
    result = pipe.compare(nn.Sequential(*modules), x, target=y)
    assert result.is_exact, str(result)
    with tempfile.TemporaryDirectory() as name:
        folder = [name]
        dist.broadcast_object_list(folder)
        pipe.profile(Path(folder[0]) / "profile.json", x, target=y, num_steps=1)
        with pipe.record(Path(folder[0]) / "record"):
            pipe.step(x, target=y)
            pipe.step(*ids(8, 5)[:1], target=ids(8, 5)[1])
        dist.barrier()
    clear(own)
    clear(dict(enumerate(modules)))
    reference(modules, parts_of(x, y))
    pipe.step(x, target=y)
    same_bits(own, modules)
    pipe.close()
    say("tools")


def many():
    """More signatures than are kept: the memory that they need is bounded."""
    modules, own, pipe = made()
    del modules
    tracemalloc.start()
    sizes = []
    for length in range(1, MOST_SIGNATURES + 12):
        x, y = ids(2, length)
        with contextlib.suppress(PipelineError):
            pipe.eval_step(x, target=y)
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    of_each = (sizes[49] - sizes[0]) / 49
    print(f"kilobytes of a signature: {of_each / 1e3:.0f}", flush=True)  # noqa: T201
    assert of_each < 1e6
    assert sizes[-1] - sizes[MOST_SIGNATURES] < 3 * of_each
    clear(own)
    pipe.close()
    say("many")


CASES = {
    "random_lengths": random_lengths, "refused_steps": refused_steps, "listed": listed, "tools": tools, "many": many,
}  # fmt: skip

if __name__ == "__main__":
    main(CASES)
