"""Two processes: parameters without a gradient, and state that is not the step's to change."""

import copy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Block, batch, clear, main, own_copies, refused, same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeproof.torch import ModelStages, Pipeline, stages_of_rank

NUM, ROWS, WIDTH = 4, 8, 16
FIRST = torch.zeros(2, WIDTH)


class Sides(nn.Module):
    """Returns a side output, too, which ``uses`` says whether to use in a micro-batch."""

    def __init__(self, uses, *, is_last):
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.uses, self.is_last = uses, is_last

    def forward(self, h, side=None):
        if side is not None and self.uses(h):
            h = h + side.mean(-1, keepdim=True)
        h = self.main(h).tanh()
        return h if self.is_last else (h, self.side(h))


def never(_):
    return False


def sometimes(h):
    return bool(h.sum() > 0)


def sides(uses, num_stages):
    torch.manual_seed(2)
    return [Sides(uses, is_last=number == num_stages - 1) for number in range(num_stages)]


def plain_step(modules, x, y):
    for rows, target in zip(x.chunk(NUM), y.chunk(NUM), strict=True):
        value = (rows,)
        for module in modules:
            value = module(*value)
            value = value if isinstance(value, tuple) else (value,)
        (F.mse_loss(value[0], target) / NUM).backward()


def pipeline(stages, **options):
    options = {"num_micro_batches": NUM, "loss_fn": F.mse_loss, "example": (FIRST,), **options}
    return Pipeline(stages, timeout_s=60, **options)


def unused():
    """Outputs that no micro-batch uses, or some do, leave ``.grad`` as the unpartitioned model has it."""
    rank = dist.get_rank()
    for schedule, num_stages, split in (
        ("1f1b", 2, "whole"), ("zb_h1", 2, "linear"), ("interleaved", 4, "whole"), ("zb_v", 4, "linear"),
        ("dualpipe_v", 4, "linear"), ("zb_h1", 2, "graph"),
    ):  # fmt: skip
        for uses in (never,) if split == "graph" else (never, sometimes):
            modules = sides(uses, num_stages)
            stages = own_copies(modules, stages_of_rank(schedule, 2, num_stages, rank))
            pipe = pipeline(stages, schedule=schedule, split=split, compiler="eager")
            for seed in range(3):
                x, y = batch(ROWS, WIDTH, seed=seed)
                plain_step(modules, x, y)
                pipe.step(x, target=y)
                same_bits(stages, modules)
                clear({**stages, "reference": nn.ModuleList(modules)})
            assert set(pipe.splits.values()) <= {split, "whole"}, pipe.splits
            pipe.close()
    pipe = pipeline(
        {rank: sides(lambda h: bool(h.any()), 2)[rank]}, split="graph", compiler="eager"
    )  # zeros on the example
    refused(lambda: pipe.step(torch.ones(ROWS, WIDTH), target=y), "runs as graphs", "use split='linear'")


def unused_copies():
    """A weight that no copy of its stage uses has no gradient."""
    modules = sides(never, 2)
    stages = own_copies(modules, (0, 1))
    x, y = batch(ROWS, WIDTH)
    with pipeline(stages, schedule="dualpipe") as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            assert [n for n, w in stages[0].named_parameters() if w.grad is None] == ["side.weight", "side.bias"]


def unused_later():
    """An output that all micro-batches of the first step used, and one of a later step does not."""
    rank = dist.get_rank()
    stages = own_copies(sides(lambda _: uses[0], 2), (rank,))
    uses, (x, y) = [True], batch(ROWS, WIDTH)
    pipe = pipeline(stages)
    pipe.step(x, target=y)
    uses[0] = False
    refused(lambda: pipe.step(x, target=y), "stage 1, micro-batch 0", "output 1 of stage 0", "0 * x.sum()")


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return checkpoint(lambda h: self.inner(h).tanh(), x, use_reentrant=True)


class Detached(Block):
    def forward(self, x):
        return super().forward(x).detach()


class Ignoring(Block):
    def forward(self, x):
        return super().forward(torch.ones_like(x))


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x


def untrained():
    """A stage whose parameters all got no gradient in the first step is an error that names the cause."""
    x, y = batch(ROWS, WIDTH)
    rank = dist.get_rank()
    for first, last, words in (
        (Checkpointed(), Block(), ("stage 0", "use_reentrant=True", "pass use_reentrant=False")),
        (Detached(), Block(), ("stage 0", "its outputs do not depend on them", "requires_grad_(False)")),
        (Block(), Ignoring(), ("stage 0", "stage 1 uses no output")),
        (Block(), Unused(), ("stage 1", "its forward uses none of them")),
    ):
        pipe = pipeline({rank: (first, last)[rank]})
        refused(lambda pipe=pipe: pipe.step(x, target=y), *words)
    first = Detached().requires_grad_(requires_grad=False)  # the remedy
    with pipeline({rank: (first, Block())[rank]}) as pipe:
        pipe.step(x, target=y)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, h):
        return self.lm_head(h)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.lm_head = nn.Embedding(11, WIDTH), Block(), nn.Linear(WIDTH, 11, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.block(self.embed(ids)))


def tied():
    """``compare`` knows both names of a tied weight; its sum is in another order."""
    torch.manual_seed(0)
    model = Tied()
    parts = [nn.Sequential(), Head()]
    parts[0].add_module("embed", nn.Embedding(11, WIDTH))
    parts[0].add_module("block", Block())
    stages = ModelStages(parts, tied=[{0: "embed.weight", 1: "lm_head.weight"}])
    ids, y = torch.randint(11, (ROWS, 3)), torch.randint(11, (ROWS, 3))

    def loss(logits, target):
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    for num, is_exact in ((1, True), (NUM, False)):
        with pipeline(stages, loss_fn=loss, num_micro_batches=num, example=(ids[: ROWS // num],)) as pipe:
            result = pipe.compare(model, ids, target=y)
            assert result.is_within_bounds, result
            assert {difference.name for difference in result.differences} <= {"embed.weight"}, result
            assert result.is_exact or not is_exact, result


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.norm, self.drop = Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.drop(self.norm(self.block(x)))


def state():
    """``profile``, ``compare`` and ``eval_step`` leave buffers and random states; training goes on as without them."""
    x, y = batch(ROWS, WIDTH)
    rank = dist.get_rank()

    def gradients_of_the_second_step(between):
        torch.manual_seed(4)
        stage = Noisy()
        with pipeline({rank: stage}) as pipe:
            pipe.step(x, target=y)
            stage.zero_grad()
            before = [buffer.clone() for buffer in stage.buffers()], torch.get_rng_state()
            between(pipe)
            assert all(map(torch.equal, before[0], stage.buffers()))
            assert torch.equal(before[1], torch.get_rng_state())
            pipe.step(x, target=y)
        return [weight.grad for weight in stage.parameters()]

    reference, file = nn.Sequential(Noisy(), Noisy()), Path(tempfile.mkdtemp()) / "profile.json"
    expected = gradients_of_the_second_step(lambda _: None)
    for between in (
        lambda pipe: pipe.eval_step(x, target=y),
        lambda pipe: pipe.eval_step(x),
        lambda pipe: pipe.compare(reference, x, target=y),
        lambda pipe: pipe.profile(file, x, target=y, num_steps=1),
    ):
        assert all(map(torch.equal, expected, gradients_of_the_second_step(between)))
    assert float(reference[0].calls) == 0


class Reused(nn.Module):
    """An embedding called twice, a BatchNorm called twice, and a cached tensor that is returned by identity."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.cache = nn.Embedding(11, WIDTH), nn.BatchNorm1d(WIDTH), torch.linspace(0, 1, WIDTH)

    def forward(self, ids):
        h = self.norm(self.table(ids) * self.table(ids.flip(0)))
        return self.norm(h + 1), self.cache


class Scaled(nn.Module):
    """A buffer that is used twice, and a cached tensor of the stage before."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(1, 2, WIDTH))

    def forward(self, h, cache):
        return self.inner(h * self.scale + cache).tanh() * self.scale


def reused():
    """A tensor that a stage uses twice, or returns for all micro-batches, has the bits of one process."""
    torch.manual_seed(6)
    modules, rank = [Reused(), Scaled()], dist.get_rank()
    ids, y = torch.randint(11, (ROWS,)), torch.randn(ROWS, WIDTH)
    for schedule, split in (("1f1b", "whole"), ("zb_h1", "linear"), ("zb_h1", "graph")):
        stages = own_copies(modules, (rank,))
        reference = [copy.deepcopy(module) for module in modules]
        with pipeline(stages, schedule=schedule, split=split, compiler="eager", example=(ids[:2],)) as pipe:
            for _ in range(2):
                plain_step(reference, ids, y)
                pipe.step(ids, target=y)
            assert pipe.splits == {rank: split}
            same_bits(stages, reference)
            assert all(map(torch.equal, stages[rank].buffers(), reference[rank].buffers()))


class Remembering(Block):
    """Returns the result of its first forward, in all forwards."""

    def __init__(self, *, has_graph):
        super().__init__()
        self.has_graph, self.known = has_graph, None

    def forward(self, x):
        if self.known is None or not torch.is_grad_enabled():
            self.known = super().forward(x)
        return self.known if self.has_graph else super().forward(x) + self.known.detach()


class Overwriting(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, WIDTH))

    def forward(self, x):
        self.kept.copy_(x)
        return super().forward(x), self.kept


class Both(Block):
    def forward(self, x, kept):
        return super().forward(x + kept)


def remembered():
    """A cached tensor with a graph, and one that a later forward overwrites, are refused in steps; so is the last in
    ``eval_step``."""
    x, y = batch(ROWS, WIDTH)
    rank = dist.get_rank()
    for first, last, words in (
        (Remembering(has_graph=True), Block(), ("stage 0, micro-batch 1", "a second time")),
        (Overwriting(), Both(), ("stage 0, micro-batch", "has changed a tensor in place that it returned before")),
    ):
        pipe = pipeline({rank: (first, last)[rank]})
        refused(lambda pipe=pipe: pipe.step(x, target=y), *words)
    pipe = pipeline({rank: (Overwriting(), Both())[rank]})
    refused(lambda: pipe.eval_step(x, target=y), "stage 0, micro-batch 0", "has changed a tensor in place")


if __name__ == "__main__":
    cases = (unused, unused_copies, unused_later, untrained, tied, state, reused, remembered)
    main({case.__name__: case for case in cases})
