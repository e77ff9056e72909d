"""Two processes: stages as graphs under schedules with I and W and with B, next to the unpartitioned model."""

import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Block, batch, blocks, clear, main, own_copies, reference_step, refused, same_bits, say
from torch import nn

from pipeproof.torch import Pipeline, stages_of_rank

NUM_MICRO_BATCHES = 4


def data():
    return batch(2 * NUM_MICRO_BATCHES, 3, 16)


def pipeline(kind, num_stages, x, *, make=Block, **options):
    """Blocks, this rank's copies of them, and their pipeline."""
    modules = blocks(num_stages, make=make)
    own = own_copies(modules, stages_of_rank(kind, 2, num_stages, dist.get_rank()))
    options = {"loss_fn": F.mse_loss, "example": (x[:2],), "split": "graph", "compiler": "eager", **options}
    return modules, own, Pipeline(own, schedule=kind, num_micro_batches=NUM_MICRO_BATCHES, **options)


def eager():
    """The operations of eager mode: bit for bit, under schedules with W and without."""
    x, y = data()
    for kind, num_stages in (("zb_v", 4), ("1f1b", 2)):
        modules, own, pipe = pipeline(kind, num_stages, x)
        for _ in range(2):
            reference_step(modules, x, y, NUM_MICRO_BATCHES)
            pipe.step(x, target=y)
            same_bits(own, modules)
            clear(own)
        assert set(pipe.splits.values()) == {"graph"}, pipe.splits
        assert all(each.by_graph <= each.by_eager for kept in pipe.kept_bytes.values() for each in kept)
        loss = pipe.eval_step(x, target=y)
        if loss is not None:
            with torch.no_grad():
                pairs = zip(x.split(2), y.split(2), strict=True)
                parts = [F.mse_loss(nn.Sequential(*modules)(xb), yb) for xb, yb in pairs]
            assert torch.equal(loss, torch.stack(parts).sum() / NUM_MICRO_BATCHES)
        assert pipe.compare(nn.Sequential(*modules), x, target=y).is_exact
        with tempfile.TemporaryDirectory() as folder:
            with pipe.record(Path(folder) / "record"):
                pipe.step(x, target=y)
            pipe.profile(Path(folder) / "profile.json", x, target=y, num_steps=1)
        pipe.close()
        say("eager", kind=kind)


class Branches(Block):
    """A block with control flow that depends on values."""

    def forward(self, x):
        return super().forward(x) if x.sum() > -1e9 else x


def left():
    """One rank's stages cannot be captured: they run as linear, the other's as graphs, and the bits are the same."""
    x, y = data()
    modules = blocks(4)
    own = own_copies(modules, stages_of_rank("zb_v", 2, 4, dist.get_rank()))
    if dist.get_rank() == 1:
        for module in own.values():
            module.__class__ = Branches
    pipe = Pipeline(own, schedule="zb_v", num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2],),
                    split="graph", compiler="eager")  # fmt: skip
    reference_step(modules, x, y, NUM_MICRO_BATCHES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe.step(x, target=y)
    same_bits(own, modules)
    asked = "linear: " if dist.get_rank() else "graph"
    assert all(split.startswith(asked) for split in pipe.splits.values()), pipe.splits
    num = sum("does not run as graphs" in str(each.message) for each in caught)
    assert num == (2 if dist.get_rank() else 0)
    pipe.close()


class Rows(nn.Module):
    """A table of 5 rows, read by the size of the input."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 16)

    def forward(self, x):
        return x + self.table(x[..., 0].abs().long())


def failed():
    """An operation of a graph that raises is one error on all ranks."""
    x, y = data()
    _, _, pipe = pipeline("1f1b", 2, x, make=lambda: nn.Sequential(Rows(), nn.Linear(16, 16)))
    pipe.step(x.clamp(-4, 4), target=y)
    x[3, 0, 0] = 100.0
    refused(
        lambda: pipe.step(x, target=y), "stage 0, micro-batch 1", "`aten.embedding` of module `0.table`", "IndexError"
    )
    pipe.close()


def inductor():
    """Compiled graphs: equal bits under two schedules that add in one order, and from step to step."""
    x, y = data()
    found = []
    for kind in ("zb_h1", "1f1b"):
        modules, own, pipe = pipeline(kind, 2, x, compiler="inductor")
        for _ in range(2):
            clear(own)
            pipe.step(x, target=y)
            found.append([weight.grad.clone() for stage in own.values() for weight in stage.parameters()])
        assert set(pipe.splits.values()) == {"graph"}, pipe.splits
        assert all(each.by_graph <= each.by_eager for kept in pipe.kept_bytes.values() for each in kept)
        compared = pipe.compare(nn.Sequential(*modules), x, target=y)
        assert compared.is_within_bounds, str(compared)
        pipe.close()
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


main({"eager": eager, "left": left, "failed": failed, "inductor": inductor})
