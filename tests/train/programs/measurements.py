"""Compares, records and profiles a pipeline of small blocks on two ranks; the argument is a directory."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from pipeproof.torch import Pipeline, record_layers, stages_of_sequential

folder = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()


def block(seed):
    """A small block with the weights of a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


torch.manual_seed(0)
inputs, target = torch.randn(8, 4, 16), torch.randn(8, 4, 16)
pipe = Pipeline(
    stages_of_sequential(nn.Sequential(*map(block, range(4))), 4),
    schedule="zb_v", num_micro_batches=4, loss_fn=F.mse_loss, example=(inputs[:2],), split="linear",
)  # fmt: skip
assert all(weight.grad is None for stage in pipe.stages.values() for weight in stage.parameters())
pipe.step(inputs, target=target)
before = [weight.grad.clone() for stage in pipe.stages.values() for weight in stage.parameters()]

reference = nn.Sequential(*(block(9) for _ in range(4))) if rank == 0 else None
found = pipe.compare(reference, inputs, target=target)
assert found.is_exact, str(found)
assert found.num_parameters == 24
assert found.without_gradient == ()

other = nn.Sequential(*(nn.Sequential(*block(9)[:3], nn.Tanh(), block(9)[3]) for _ in range(4))) if rank == 0 else None
wrong = pipe.compare(other, inputs, target=target, name_of=lambda _, name: name.replace(".3.", ".4."))
assert not wrong.is_exact
assert not wrong.is_within_bounds
assert len(wrong.differences) == 24
assert all(each.cause for each in wrong.differences), wrong


class Detached(nn.Linear):
    """A layer with a bug: its weight is never trained."""

    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


parts = {rank: nn.Sequential(nn.Linear(16, 16), Detached(16, 16) if rank else nn.Linear(16, 16))}
with Pipeline(parts, schedule="1f1b", num_micro_batches=4, loss_fn=F.mse_loss, example=(inputs[:2],)) as untrained:
    both = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), kind(16, 16)) for kind in (nn.Linear, Detached)))
    found = untrained.compare(both if rank == 0 else None, inputs, target=target)
    assert found.is_exact, str(found)
    assert found.without_gradient == ("1.1.weight",)
    assert str(found).endswith("7 gradients have the reference's bits\n1 parameter received no gradient: 1.1.weight")

with pipe.record(folder / "messages"), record_layers(pipe.stages, folder / "values"):
    pipe.step(inputs, target=target)
if rank == 0:
    whole = nn.Sequential(*(block(number) for number in range(4)))

    def step_of_whole():
        """One step; gradients are added to the existing ones."""
        for x, y in zip(inputs.chunk(4), target.chunk(4), strict=True):
            (F.mse_loss(whole(x), y) / 4).backward()

    step_of_whole()
    with record_layers({0: whole}, folder / "whole"):  # its parts, as of stages
        step_of_whole()
pipe.profile(folder / "profile.json", inputs, target=target, num_steps=2)
for weight, gradient in zip((w for s in pipe.stages.values() for w in s.parameters()), before, strict=True):
    torch.testing.assert_close(weight.grad, gradient * 2)  # the recorded step's came on top, the others' went
if rank == 0:
    pipe.plan.save(folder / "plan.yaml")
pipe.close()
dist.destroy_process_group()
