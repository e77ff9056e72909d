"""Two processes: compiled stages, activation checkpointing, autocast with a scaler, and refusals of split='linear'."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Block, batch, blocks, clear, furthest, main, own_copies, reference_step, refused, same_bits, say
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeproof.torch import Pipeline, stages_of_rank

NUM_MICRO_BATCHES = 4
KIND = "zb_v"
NUM_STAGES = 4
BACKEND = "aot_eager"


def data():
    return batch(2 * NUM_MICRO_BATCHES, 3, 16)


def pipeline(own, x, **options):
    """A pipeline of zb_v over both ranks."""
    options = {"schedule": KIND, "loss_fn": F.mse_loss, "example": (x[:2],), **options}
    return Pipeline(own, num_micro_batches=NUM_MICRO_BATCHES, **options)


def own_numbers():
    return stages_of_rank(KIND, 2, NUM_STAGES, dist.get_rank())


class Checkpointed(nn.Module):
    """A block whose activations are recomputed, and a layer behind it whose are not."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.after, self.reentrant = Block(), nn.Linear(16, 16), reentrant

    def forward(self, x):
        return self.after(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def compiled():
    """Compiled stages and compiled blocks of a stage, with the split that each allows."""
    x, y = data()
    for whole_stage, split in ((True, "whole"), (True, "linear"), (False, "linear")):
        modules = blocks(NUM_STAGES, depth=2)
        own = own_copies(modules, own_numbers())
        if whole_stage:
            own = {n: torch.compile(module, backend=BACKEND) for n, module in own.items()}
        else:
            for module in own.values():
                module[0].compile(backend=BACKEND)
        pipe = pipeline(own, x, split=split)
        names = [weight["name"] for layer in pipe.plan.content["model"]["layers"] for weight in layer["parameters"]]
        assert len(set(names)) == 12, names
        assert not any("_orig_mod" in name for name in names), names
        for _ in range(2):
            reference_step(modules, x, y, NUM_MICRO_BATCHES)
            pipe.step(x, target=y)
            worst = furthest(own, modules)
            assert worst < 1e-6, worst
            clear(own)
        pipe.close()
        say("compiled", whole_stage=whole_stage, split=split, worst=worst)


def checkpointed():
    """Recomputed activations: bit for bit with both splits; use_reentrant=True with whole alone."""
    x, y = data()
    for reentrant, split in ((False, "whole"), (False, "linear"), (True, "whole")):
        modules = blocks(NUM_STAGES, make=lambda: Checkpointed(reentrant))  # noqa: B023 - called at once
        own = own_copies(modules, own_numbers())
        pipe = pipeline(own, x, split=split)
        for _ in range(2):
            reference_step(modules, x.clone().requires_grad_(), y, NUM_MICRO_BATCHES)
            pipe.step(x.clone().requires_grad_(), target=y)
            same_bits(own, modules)
            clear(own)
        pipe.close()
        say("checkpointed", reentrant=reentrant, split=split)
    own = own_copies(modules, own_numbers())
    refused(lambda: pipeline(own, x, split="linear"), "stage 1 uses", "use_reentrant=True", "split='whole'")


def hooked():
    """A hook after the accumulation, and a layer whose forward the script replaced."""
    x, y = data()
    modules = blocks(NUM_STAGES)
    own = own_copies(modules, own_numbers())
    calls = []
    if dist.get_rank() == 1:  # refused on both
        own[1].up.weight.register_post_accumulate_grad_hook(calls.append)
    refused(lambda: pipeline(own, x, split="linear"), "stage 1", "`up.weight`", "split='linear'")
    pipe = pipeline(own, x)
    pipe.step(x, target=y)
    assert len(calls) == (NUM_MICRO_BATCHES if dist.get_rank() == 1 else 0)
    pipe.close()
    own = own_copies(modules, own_numbers())
    for module in (*modules, *own.values()):
        replace_forward(module.up)
    pipe = pipeline(own, x, split="linear")
    reference_step(modules, x, y, NUM_MICRO_BATCHES)
    pipe.step(x, target=y)
    same_bits(own, modules)
    for number, module in own.items():  # outside of a step a stage is a plain module
        module.zero_grad()
        modules[number].zero_grad()
        inputs = [x[:2].detach().requires_grad_() for _ in range(2)]
        module(inputs[0]).sum().backward()
        modules[number](inputs[1]).sum().backward()
        assert torch.equal(inputs[0].grad, inputs[1].grad)
    same_bits(own, modules)
    pipe.close()
    say("hooked")


class Differentiated(nn.Module):
    """A layer whose forward uses autograd: the gradient of an energy, with a graph of its own or without."""

    def __init__(self, has_graph):
        super().__init__()
        self.up, self.down, self.has_graph = nn.Linear(16, 32), nn.Linear(32, 16), has_graph

    def forward(self, x):
        with torch.enable_grad():
            place = x if x.requires_grad else x.clone().requires_grad_()
            energy = self.down(torch.tanh(self.up(place))).pow(2).sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=self.has_graph)
        return self.up(x - 0.1 * force)[..., :16]


class ScaledLoss(nn.Module):
    """A loss with a parameter, which no stage has."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, output, target):
        return F.mse_loss(self.scale * output, target)


def differentiated():
    """Autograd inside of a forward, and gradients of tensors that are not parameters of a stage."""
    for has_graph in (True, False):
        for split in ("whole", "linear"):
            x, y = data()
            modules = blocks(NUM_STAGES, make=lambda: Differentiated(has_graph))  # noqa: B023 - called at once
            own = own_copies(modules, own_numbers())
            losses = [ScaledLoss(), ScaledLoss()]
            pipe = pipeline(own, x, split=split, loss_fn=losses[0])
            for _ in range(2):
                inputs = [x.clone().requires_grad_() for _ in range(2)]
                for loss in losses:
                    loss.zero_grad()
                reference_step(modules, inputs[1], y, NUM_MICRO_BATCHES, loss_fn=losses[1])
                pipe.step(inputs[0], target=y)
                assert furthest(own, modules) < 1e-6  # W adds the uses of a layer in another order
                if pipe.is_first:
                    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
                if pipe.is_last:
                    torch.testing.assert_close(losses[0].scale.grad, losses[1].scale.grad)
                clear(own)
            pipe.close()
            say("differentiated", has_graph=has_graph, split=split)


def replace_forward(layer):
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)


def autocast_call(modules, xb):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for module in modules:
            xb = module(xb)
    return xb.float()


def autocast_loss(output, target):
    return F.mse_loss(output.float(), target)


def autocast():
    """Autocast around construction and step: the reference's bits; and a scaler that all ranks change in the same
    way."""
    x, y = data()
    for split in ("whole", "linear"):
        modules = blocks(NUM_STAGES, make=lambda: nn.Sequential(Block(), nn.Linear(16, 16)))
        own = own_copies(modules, own_numbers())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipe = pipeline(own, x, split=split, loss_fn=autocast_loss)
            if split == "linear":
                pipe.eval_step(x, target=y)
            pipe.step(x, target=y)
        reference_step(modules, x, y, NUM_MICRO_BATCHES, call=autocast_call)
        same_bits(own, modules)
        clear(own)
        optimizer = torch.optim.SGD([w for stage in own.values() for w in stage.parameters()], lr=0.1)
        expected = torch.optim.SGD([w for module in modules for w in module.parameters()], lr=0.1)
        scales = []
        for step in range(5):
            xs = x * 1e38 if step == 2 else x  # the last stage's loss overflows
            reference_step(modules, xs, y, NUM_MICRO_BATCHES, call=autocast_call)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                pipe.step(xs, target=y, scaler=scaler)
            scaler.unscale_(optimizer)
            if step != 2:
                same_bits(own, modules)  # scales are powers of 2
                expected.step()
            before = [w.clone() for stage in own.values() for w in stage.parameters()]
            scaler.step(optimizer)
            moved = any(not torch.equal(a, w) for a, w in zip(before, optimizer.param_groups[0]["params"], strict=True))
            assert moved == (step != 2), step
            scaler.update()
            scales.append(scaler.get_scale())
            clear(own)
        assert scales == [4.0, 8.0, 4.0, 4.0, 8.0], scales
        for number, stage in own.items():
            for weight, same in zip(stage.parameters(), modules[number].parameters(), strict=True):
                assert torch.equal(weight, same)
        assert pipe.plan.content["model"]["layers"][0]["out"][0]["dtype"] == "bfloat16"
        pipe.close()
        say("autocast", split=split)
    for rank in range(2):  # an overflow on one rank alone
        modules = blocks(NUM_STAGES)
        own = own_copies(modules, own_numbers())
        pipe = pipeline(own, x)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD([w for stage in own.values() for w in stage.parameters()], lr=0.1)
        if dist.get_rank() == rank:
            next(iter(own.values())).up.bias.register_hook(lambda grad: grad * float("inf"))
        before = [w.clone() for stage in own.values() for w in stage.parameters()]
        pipe.step(x, target=y, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert all(torch.equal(a, w) for a, w in zip(before, optimizer.param_groups[0]["params"], strict=True))
        pipe.close()
    say("overflow")


CASES = {
    "compiled": compiled, "checkpointed": checkpointed, "hooked": hooked, "differentiated": differentiated,
    "autocast": autocast,
}  # fmt: skip

if __name__ == "__main__":
    main(CASES)
