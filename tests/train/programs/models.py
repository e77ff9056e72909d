"""Small stages for the programs, the unpartitioned model over them, and how far gradients may be from its."""

# ruff: noqa: T201 - the test reads the output of the ranks
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH = 16


class Block(nn.Module):
    """A residual block; its parts have names for ``parallelize_module``."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks(num, make=Block, depth=1):
    """``num`` stages of ``depth`` blocks, with the same values on every rank."""
    made = []
    for number in range(num):
        torch.manual_seed(100 + number)
        made.append(nn.Sequential(*(make() for _ in range(depth))) if depth > 1 else make())
    return made


def batch(num_rows, *shape, seed=0):
    """Inputs and targets of a step."""
    torch.manual_seed(seed)
    return torch.randn(num_rows, *shape), torch.randn(num_rows, *shape)


def own_copies(modules, numbers):
    """The stages of a rank, separate from the reference's."""
    return {number: copy.deepcopy(modules[number]) for number in numbers}


def reference_step(modules, x, y, num_micro_batches, loss_fn=F.mse_loss, call=None):
    """The mean loss of the unpartitioned model; its gradients are then in ``.grad`` of the modules."""
    for module in modules:
        module.zero_grad()
    losses = []
    for xb, yb in zip(x.chunk(num_micro_batches), y.chunk(num_micro_batches), strict=True):
        h = xb
        if call is None:
            for module in modules:
                h = module(h)
        else:
            h = call(modules, xb)
        loss = loss_fn(h, yb)
        losses.append(loss.detach())
        (loss / num_micro_batches).backward()
    return torch.stack(losses).sum() / num_micro_batches


def whole(tensor):
    """The full tensor of a ``DTensor``, else the tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def clean(name):
    """The name of a parameter without prefixes of wrappers."""
    for part in ("_orig_mod.", "module."):
        name = name.replace(part, "")
    return name


def furthest(stages, modules):
    """The largest relative distance (2-norm of the difference over the norm) of a gradient from the reference's."""
    worst = 0.0
    for number, stage in stages.items():
        expected = dict(modules[number].named_parameters())
        found = {clean(name): weight for name, weight in stage.named_parameters()}
        assert found.keys() == expected.keys(), (number, found.keys(), expected.keys())
        for name, weight in found.items():
            reference = expected[name].grad
            assert (weight.grad is None) == (reference is None), (number, name)
            if reference is not None:
                away = (whole(weight.grad).double() - reference.double()).norm() / reference.double().norm()
                worst = max(worst, float(away))
    return worst


def same_bits(stages, modules):
    """Assert that every gradient is the reference's, bit for bit."""
    for number, stage in stages.items():
        expected = dict(modules[number].named_parameters())
        for name, weight in stage.named_parameters():
            reference = expected[clean(name)].grad
            assert (weight.grad is None) == (reference is None), (number, name)
            assert reference is None or torch.equal(whole(weight.grad), reference), (number, name)


def clear(stages):
    """Drop the gradients."""
    for stage in stages.values():
        stage.zero_grad()


def say(case, **figures):
    """Print one line for each rank: the results of a case."""
    shown = " ".join(f"{key}={value}" for key, value in figures.items())
    print(f"{case} on rank {dist.get_rank()}: {shown}\n", end="", flush=True)


def refused(make, *words):
    """The text of the ``PipelineError`` that ``make`` raises, which has all of the words."""
    from pipeproof.torch import PipelineError

    try:
        make()
    except PipelineError as error:
        text = str(error)
        assert all(word in text for word in words), text
        return text
    raise AssertionError("not refused")


def main(cases):
    """Run the cases that the arguments name, or all, one after another in one process group."""
    import sys
    import traceback

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asked = sys.argv[1:] or list(cases)
    for name in asked:
        try:
            cases[name]()
        except BaseException:
            traceback.print_exc()
            print(f"{name} rank {dist.get_rank()} FAILED", flush=True)
            raise
        print(f"{name} done on rank {dist.get_rank()}\n", end="", flush=True)  # one write: lines of ranks stay whole
        dist.barrier()
    dist.destroy_process_group()
