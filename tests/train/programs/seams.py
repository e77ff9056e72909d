"""Two processes with experts of a script's own, exchanged between them: pairs of DualPipeV that take turns at seams."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof.torch import Pipeline, PipelineError, seam

HIDDEN, ROWS, MICRO_BATCHES = 8, 4, 6
calls = []
"""Begin and end of each exchange of this rank."""


class Exchange(torch.autograd.Function):
    """An all-to-all of equal parts, whose gradient goes back the same way."""

    @staticmethod
    def forward(ctx, rows):
        return exchanged(rows, "F")

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, "B")


def exchanged(rows, side):
    result = torch.empty_like(rows)
    work = dist.all_to_all_single(result, rows.contiguous(), async_op=True)
    calls.append(f"{side} begins")
    seam(work)
    calls.append(f"{side} ends")
    return result


class Block(nn.Module):
    fails = False

    def __init__(self):
        super().__init__()
        self.before, self.expert, self.after = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x):
        arrived = Exchange.apply(self.before(x).tanh())
        if self.fails:
            raise ValueError("planted in the expert")
        return x + self.after(Exchange.apply(self.expert(arrived).tanh()))


def pipeline(stages, **options):
    return Pipeline(
        stages, schedule="dualpipe_v", num_micro_batches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss,
        example=(torch.zeros(ROWS, HIDDEN),), group=own_group, **options,
    )  # fmt: skip


def main():
    torch.manual_seed(dist.get_rank())
    stages = {0: Block(), 1: Block()}
    x, y = torch.randn(2, MICRO_BATCHES * ROWS, HIDDEN)
    gradients, orders = [], []
    for overlap in (False, True):
        own = copy.deepcopy(stages)
        with pipeline(own, overlap=overlap) as pipe:
            calls.clear()
            loss = pipe.step(x, target=y)
        orders.append(list(calls))
        gradients.append([loss, *(weight.grad for stage in own.values() for weight in stage.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    plain, taken = orders
    assert all(first[0] == second[0] for first, second in zip(plain[::2], plain[1::2], strict=True)), plain
    assert "F begins, B ends, B begins, F ends" in ", ".join(taken), taken

    with pipeline(stages, overlap=True) as pipe:
        pipe.step(x, target=y)
        Block.fails = True
        with pytest.raises(PipelineError, match="planted in the expert"):
            pipe.step(x, target=y)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("turns of")]
    with pytest.raises(PipelineError, match="no computations of the schedule overlap"):
        Pipeline(
            {0: nn.Linear(HIDDEN, HIDDEN)}, schedule="1f1b", num_micro_batches=2, loss_fn=nn.functional.mse_loss,
            example=(torch.zeros(ROWS, HIDDEN),), group=own_group, overlap=True,
        )  # fmt: skip


dist.init_process_group("gloo")
own_group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
main()
dist.destroy_process_group()
