"""A U-Net with two skips, and blocks that read several earlier ones: all bits of the unpartitioned model."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Block, main, own_copies, refused, say
from torch import nn

from pipeproof.torch import Pipeline, stages_of_rank

NUM_MICRO_BATCHES, WIDTH = 8, 8
SKIPS = {"skip1": (0, [-1]), "skip2": (1, [-2])}


class Down(nn.Module):
    """Half of the length for the next stage, and the whole one as a skip."""

    def __init__(self, skip):
        super().__init__()
        self.conv, self.skip = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), skip

    def forward(self, x):
        h = F.gelu(self.conv(x))
        return {"x": F.avg_pool1d(h, 2), self.skip: h}


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(x.mT).mT


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2 * WIDTH, WIDTH, 3, padding=1)

    def up(self, x, skip):
        return self.conv(torch.cat([F.interpolate(x, scale_factor=2), skip], dim=1))


class Up1(Up):
    def forward(self, x, skip1):
        return self.up(x, skip1)


class Up2(Up):
    def forward(self, x, *, skip2):
        return self.up(x, skip2)


class UNet(nn.ModuleList):
    """The whole model; its weights have the names of the stages' weights."""

    def forward(self, x):
        x, skip1 = self[0](x).values()
        x, skip2 = self[1](x).values()
        for middle in self[2:-2]:
            x = middle(x)
        return self[-1](self[-2](x, skip2=skip2), skip1)


class Residuals(nn.Module):
    """A block that adds the results of blocks before the last one."""

    def __init__(self):
        super().__init__()
        self.block, self.gate = Block(WIDTH), nn.Parameter(torch.tensor([0.5, 0.25]))

    def forward(self, x, first=0.0, second=0.0):
        return self.block(x) + self.gate[0] * first + self.gate[1] * second


class AttentionResiduals(nn.ModuleList):
    """Each block reads a tensor by one view: a pipeline adds what a stage uses of it before it adds that to others."""

    def forward(self, x):
        outputs = [x]

        def read(index):
            return outputs[index].view_as(outputs[index])

        for number, block in enumerate(self):
            named = {"first": read(1)} if number > 1 else {}
            named |= {"second": read(2)} if number == len(self) - 1 else {}
            outputs.append(block(read(-1), **named))
        return outputs[-1]


def unet(num_stages):
    torch.manual_seed(3)
    return UNet([Down("skip1"), Down("skip2"), *(Middle() for _ in range(num_stages - 4)), Up2(), Up1()])


def skips(num_stages, *route):
    return {
        name: (producer, [num_stages + user for user in users], *route) for name, (producer, users) in SKIPS.items()
    }


def residuals(num_stages):
    torch.manual_seed(4)
    return AttentionResiduals(Residuals() for _ in range(num_stages))


def reads(num_stages, *route):
    return {"first": (0, [*range(2, num_stages)], *route), "second": (1, [num_stages - 1])}


def pipeline(model, kind, num_stages, edges, x, **options):
    own = own_copies(list(model), stages_of_rank(kind, dist.get_world_size(), num_stages, dist.get_rank()))
    return Pipeline(
        own, schedule=kind, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2],), edges=edges,
        **options,
    )  # fmt: skip


def equal(case, make, edges_of, shape, *route):
    """Each kind of schedule and split: two steps, of other sizes too, and an evaluation."""
    num_ranks = dist.get_world_size()
    torch.manual_seed(0)
    x, y = torch.randn(2, 2 * NUM_MICRO_BATCHES, *shape)
    for kind, num_stages, split in (
        ("1f1b", num_ranks, "whole"), ("interleaved", 2 * num_ranks, "whole"), ("zb_v", 2 * num_ranks, "whole"),
        ("zb_v", 2 * num_ranks, "linear"), ("zb_v", 2 * num_ranks, "graph"), ("dualpipe_v", 2 * num_ranks, "whole"),
    ):  # fmt: skip
        if num_stages < 4:
            continue
        model, edges = make(num_stages), edges_of(num_stages, *route)
        pipe = pipeline(model, kind, num_stages, edges, x, split=split, compiler="eager")
        assert [edge["name"] for edge in pipe.plan.content["edges"]] == [*edges]
        assert all(used.startswith(split) for used in pipe.splits.values()), pipe.splits
        comparison = pipe.compare(model, x, target=y)
        assert comparison.is_exact, (kind, split, str(comparison))
        shorter = pipe.compare(model, x[:NUM_MICRO_BATCHES], target=y[:NUM_MICRO_BATCHES])
        assert shorter.is_exact, (kind, split, str(shorter))
        expected = F.mse_loss(model(x), y)
        evaluated = pipe.eval_step(x, target=y)
        assert evaluated is None or torch.allclose(evaluated, expected, rtol=1e-5)
        pipe.close()
        say(case, kind=kind, split=split, equal=comparison.num_parameters)


def unet_has_all_bits():
    equal("unet", unet, skips, (WIDTH, 16))


def residuals_have_all_bits():
    equal("residuals", residuals, reads, (WIDTH,))


def direct_edges_have_all_bits():
    equal("direct unet", unet, skips, (WIDTH, 16), "direct")
    equal("direct residuals", residuals, reads, (WIDTH,), "direct")


def wrong():
    """Edges that do not lead to later stages, that nobody makes, or that the script cannot have."""
    num = 2 * dist.get_world_size()
    x = torch.randn(2 * NUM_MICRO_BATCHES, WIDTH, 16)

    def with_edges(edges, make=unet, **options):
        return lambda: pipeline(make(num), "interleaved", num, edges, x, **options)

    refused(with_edges({"skip1": (3, [1])}), "'skip1': (3, [1], 'relay')", "later ones")
    refused(with_edges({"skip1": (0, [num])}), f"0 to {num - 1}")
    refused(with_edges({**skips(num), "x": (0, [2])}), "stage 0 makes the edges skip1, x")
    refused(with_edges(skips(num), replay=True), "replay")
    refused(with_edges({**skips(num), "skip1": (0, [2, num - 1])}, unet), "skip1")
    say("wrong", refused=5)


if __name__ == "__main__":
    main(
        {
            "unet": unet_has_all_bits,
            "residuals": residuals_have_all_bits,
            "direct": direct_edges_have_all_bits,
            "wrong": wrong,
        }
    )
