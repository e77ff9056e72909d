"""Two processes with experts of a script's own, exchanged between them: pairs that alternate at overlap points."""

import copy
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeproof.torch import Pipeline, PipelineError, overlap_point

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
    overlap_point(work)
    calls.append(f"{side} ends")
    return result


class Block(nn.Module):
    fails = False

    def __init__(self, *, recomputes=False):
        super().__init__()
        self.before, self.expert, self.after = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x):
        if self.recomputes:
            return x + checkpoint(self.experts, x, use_reentrant=False)
        return x + self.experts(x)

    def experts(self, x):
        arrived = Exchange.apply(self.before(x).tanh())
        if self.fails:
            raise ValueError("planted in the expert")
        back = Exchange.apply(self.expert(arrived).tanh())
        return self.after(nn.functional.dropout(back, 0.5) if self.recomputes else back)


def pipeline(stages, schedule="dualpipe_v", **options):
    return Pipeline(
        stages, schedule=schedule, num_micro_batches=MICRO_BATCHES, loss_fn=nn.functional.mse_loss,
        example=(torch.zeros(ROWS, HIDDEN),), group=own_group, timeout_s=60, **options,
    )  # fmt: skip


def compared(stages, x, y, schedule, **options):
    """Begins and ends of exchanges without and with overlap, whose losses, gradients and random numbers are equal."""
    results, orders = [], []
    for overlap in (False, True):
        own = copy.deepcopy(stages)
        torch.manual_seed(1)
        with pipeline(own, schedule, overlap=overlap, **options) as pipe:
            calls.clear()
            loss = pipe.step(x, target=y)
        orders.append(list(calls))
        gradients = (weight.grad for stage in own.values() for weight in stage.parameters())
        results.append([loss, *gradients, torch.get_rng_state()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True)), schedule
    plain, taken = orders
    assert len(plain) == len(taken)
    assert all(first[0] == second[0] for first, second in zip(plain[::2], plain[1::2], strict=True)), plain
    return ", ".join(taken)


def main():
    torch.manual_seed(dist.get_rank())
    stages = {0: Block(), 1: Block()}
    x, y = torch.randn(2, MICRO_BATCHES * ROWS, HIDDEN)
    for schedule, count in (("dualpipe_v", 2), ("1f1b", 1), ("interleaved", 2)):
        taken = compared({number: stages[number] for number in range(count)}, x, y, schedule)
        assert "F begins, B ends, B begins, F ends" in taken, taken
    recomputed = compared({0: Block(recomputes=True)}, x, y, "1f1b", split="linear")
    assert "F begins, F begins, F ends, F begins, F ends" in recomputed, recomputed  # a forward in the other one
    with pytest.warns(UserWarning, match="stage 0 does not run as graphs"):
        compared({0: Block()}, x, y, "1f1b", split="graph", compiler="eager")
    with pipeline({0: Block()}, plan={"schedule": {"kind": "1f1b", "overlap": "pairs"}}) as pipe:  # overlap of the plan
        calls.clear()
        pipe.step(x, target=y)
    assert "F begins, B ends, B begins, F ends" in ", ".join(calls), calls

    with pipeline(stages, overlap=True) as pipe:
        pipe.step(x, target=y)
        Block.fails = True
        with pytest.raises(PipelineError, match="planted in the expert"):
            pipe.step(x, target=y)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("turns of")]
    with pytest.raises(PipelineError, match="no computations of the schedule overlap"):
        Pipeline(
            {0: nn.Linear(HIDDEN, HIDDEN)}, schedule="zb_h1", num_micro_batches=2, loss_fn=nn.functional.mse_loss,
            example=(torch.zeros(ROWS, HIDDEN),), group=own_group, overlap=True,
        )  # fmt: skip


dist.init_process_group("gloo")
own_group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
main()
dist.destroy_process_group()
