"""Two processes: values that cross between stages, arguments of stages, tied weights, uneven stages, own schedules."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Block, batch, blocks, clear, furthest, main, own_copies, reference_step, refused, same_bits, say
from torch import nn

from pipeproof.torch import MicroBatches, ModelStages, Pipeline, stages_of_rank

NUM_MICRO_BATCHES = 4
ROWS = 2 * NUM_MICRO_BATCHES


class Embed(nn.Module):
    """Ids and a mask to a dict, with both handed on."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 16)

    def forward(self, ids, mask, *, scale):
        return {"h": self.table(ids) * scale, "mask": mask, "ids": ids}


class Mixed(nn.Module):
    """A dict to a tuple, whose first tensor is the same object for all micro-batches."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 6).reshape(2, 3, 1))

    def forward(self, h, mask, ids, *, scale):
        return self.weights, self.block(h) * scale, mask, ids


class Masked(nn.Module):
    """A tuple to a list; one output has no gradient here and one is used twice by the next stage."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, weights, h, mask, ids, *, scale):
        h = self.block(h * weights).masked_fill(mask[..., None], 0.0)
        return [h, h.detach().amax(-1), ids.to(torch.int32), scale[..., 0] * h.mean(-1)]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 11, bias=False)

    def forward(self, h, peak, ids, mean, *, scale):
        logits = self.out(h / (1 + peak[..., None])) + mean[..., None] * F.one_hot(ids.long(), 11)
        return {"logits": logits * scale}


def entropy(output, target):
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def structured():
    """Ids, masks, dicts, tuples and lists between the stages, keyword arguments of every stage, a weight used twice."""
    torch.manual_seed(5)
    ids, y = torch.randint(11, (ROWS, 3)), torch.randint(11, (ROWS, 3))
    mask, scale = torch.rand(ROWS, 3) < 0.3, torch.tensor([0.5, 2.0, 1.5]).reshape(1, 3, 1)
    for split, ties, messages in (
        ("whole", True, "per_tensor"),
        ("linear", True, "per_tensor"),
        ("linear", False, "per_tensor"),
        ("whole", False, "packed"),
    ):
        plan = {
            "pipeproof": 1,
            "schedule": {"kind": "zb_v", "num_micro_batches": NUM_MICRO_BATCHES},
            "transport": {"messages": messages},
        }
        modules = [Embed(), Mixed(), Masked(), Head()]
        numbers = stages_of_rank("zb_v", 2, 4, dist.get_rank())
        if ties:  # the first and the last stage are on one rank: one Parameter
            modules[3].out.weight = modules[0].table.weight
        for module in modules:
            for weight in module.parameters():
                torch.manual_seed(weight.numel())
                nn.init.normal_(weight)
        own = {n: module for n, module in zip(range(4), copied(modules), strict=True) if n in numbers}
        pipe = Pipeline(
            own, plan=plan, loss_fn=entropy, example=(ids[:2], mask[:2]),
            example_kwargs={"scale": scale}, same_kwargs=["scale"], split=split,
            tied=[{0: "table.weight", 3: "out.weight"}] if ties else (),
        )  # fmt: skip
        assert [out["dtype"] for out in pipe.plan.content["model"]["layers"][0]["out"]] == ["float32", "bool", "int64"]
        gradient = [[out["gradient"] for out in layer.get("out", [])] for layer in pipe.plan.content["model"]["layers"]]
        assert gradient == [[True, False, False], [False, True, False, False], [True, False, False, True], []], gradient
        for _ in range(2):
            for module in modules:
                module.zero_grad()
            total = []
            for i, m, t in zip(ids.split(2), mask.split(2), y.split(2), strict=True):
                h = modules[0](i, m, scale=scale)
                h = modules[1](**h, scale=scale)
                h = modules[2](*h, scale=scale)
                loss = entropy(modules[3](*h, scale=scale), t)
                total.append(loss.detach())
                (loss / NUM_MICRO_BATCHES).backward()
            losses = []
            loss = pipe.step(ids, mask, target=y, scale=scale, losses=losses)
            if pipe.is_last:
                assert torch.equal(torch.stack(losses), torch.stack(total))
                assert torch.equal(loss, torch.stack(total).sum() / NUM_MICRO_BATCHES)
            if ties:  # the two uses are added in another order
                assert furthest(own, modules) < 1e-6
            else:
                same_bits(own, modules)
            clear(own)
        value, output = pipe.eval_step(ids, mask, target=y, scale=scale), pipe.eval_step(ids, mask, scale=scale)
        if pipe.is_last:
            assert torch.equal(value, loss)
            assert output["logits"].shape == (ROWS, 3, 11)
            assert torch.equal(entropy({"logits": output["logits"][:2]}, y[:2]), losses[0])
        else:
            assert value is None
            assert output is None
        pipe.close()
        say("structured", split=split, ties=ties, messages=messages)


def copied(modules):
    """Copies that share the same tensors as the modules."""
    import copy

    return copy.deepcopy(nn.ModuleList(modules))


def uneven():
    """Uneven numbers of stages, as looped_bfs or as written operations; text, CSV and lists of operations."""
    x, y = batch(ROWS, 3, 16)
    programs = [
        [
            "0F0",
            "0F1",
            "0F2",
            "0F3",
            "2F0",
            "2F1",
            "2B0",
            "0B0",
            "2F2",
            "2B1",
            "0B1",
            "2F3",
            "2B2",
            "0B2",
            "2B3",
            "0B3",
        ],
        ["1F0", "1F1", "1F2", "1F3", "1B0", "1B1", "1B2", "1B3"],
    ]
    for form in ("looped_bfs", "list", "text", "csv"):
        modules = blocks(3)
        own = own_copies(modules, ([0, 2], [1])[dist.get_rank()])
        schedule = programs if form == "list" else form
        if form in ("text", "csv"):
            folder = [tempfile.mkdtemp()]
            dist.broadcast_object_list(folder)  # one file for both ranks
            schedule = Path(folder[0]) / f"schedule.{'txt' if form == 'text' else 'csv'}"
            lines = [
                f"rank {rank}: {' '.join(ops)}" if form == "text" else ",".join(ops)
                for rank, ops in enumerate(programs)
            ]
            schedule.write_text("\n".join(lines) + "\n")
        pipe = Pipeline(
            own, schedule=schedule, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2],),
        )  # fmt: skip
        reference_step(modules, x, y, NUM_MICRO_BATCHES)
        pipe.step(x, target=y)
        if form == "looped_bfs":  # the last micro-batch is the first in backwards
            assert furthest(own, modules) < 1e-6
        else:
            same_bits(own, modules)
        pipe.eval_step(x, target=y)
        pipe.close()
        say("uneven", form=form)
    modules = blocks(4)
    programs = [
        [f"{stage}F{m}" for stage in range(3) for m in range(4)]
        + [f"{stage}B{m}" for stage in (2, 1, 0) for m in range(4)],
        [f"3{kind}{m}" for m in range(4) for kind in "FB"],
    ]
    own = own_copies(modules, ([0, 1, 2], [3])[dist.get_rank()])
    pipe = Pipeline(own, schedule=programs, num_micro_batches=4, loss_fn=F.mse_loss, example=(x[:2],))
    reference_step(modules, x, y, NUM_MICRO_BATCHES)
    pipe.step(x, target=y)
    same_bits(own, modules)
    pipe.close()
    say("uneven", form="3 and 1")
    refused(
        lambda: Pipeline(own, schedule=[["0F0"], ["3F0"]], num_micro_batches=4, loss_fn=F.mse_loss, example=(x[:2],)),
    )


class Loss(nn.Module):
    """A last stage that returns the loss; its target is a keyword argument."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, *, labels=None):
        out = self.block(x)
        return out if labels is None else F.mse_loss(out, labels)


def inside():
    """A loss inside of the last stage, a first stage whose weights are frozen, sums in place of means."""
    x, y = batch(ROWS, 3, 16)
    modules = [Block(), Loss()]
    for weight in modules[0].parameters():
        weight.requires_grad_(False)
    for number, module in enumerate(modules):
        torch.manual_seed(number)
        for weight in module.parameters():
            nn.init.normal_(weight, std=0.1)
    own = own_copies(modules, [dist.get_rank()])
    pipe = Pipeline(own, num_micro_batches=NUM_MICRO_BATCHES, example=(x[:2],), scale_grads=False)
    kwargs = {"labels": y} if pipe.is_last else {}
    loss = pipe.step(x, **kwargs)
    expected = reference_step(modules, x, y, 1, loss_fn=summed)
    if loss is not None:
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for weight, same in zip(own[1].parameters(), modules[1].parameters(), strict=True):
            torch.testing.assert_close(weight.grad, same.grad, rtol=1e-4, atol=1e-6)
    else:
        assert all(weight.grad is None for weight in own[0].parameters())
    output = pipe.eval_step(x)
    if pipe.is_last:
        torch.testing.assert_close(output, nn.Sequential(*modules)(x), rtol=1e-5, atol=1e-6)
    pipe.close()
    say("inside")


def summed(output, target):
    """The sum of the mean losses of the micro-batches."""
    return sum(F.mse_loss(o, t) for o, t in zip(output.split(2), target.split(2), strict=True))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Paired(nn.Module):
    """A named tuple in, and one out."""

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, left, right=None):
        left, right = left if right is None else (left, right)
        return Pair(self.block(left), right)


def named():
    """Named tuples as argument, target and outputs; a step, and an evaluation."""
    x, y = batch(ROWS, 3, 16)
    modules = blocks(2, make=Paired)
    own = own_copies(modules, [dist.get_rank()])
    pipe = Pipeline(
        own, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=lambda output, target: F.mse_loss(output.left, target.right),
        example=(Pair(x[:2], y[:2]),),
    )  # fmt: skip
    blocks_of = [module.block for module in modules]
    reference_step(blocks_of, x, y, NUM_MICRO_BATCHES)
    pipe.step(Pair(x, y), target=Pair(x, y))
    same_bits(own, modules)
    output = pipe.eval_step(Pair(x, y))
    if pipe.is_last:
        assert type(output) is Pair
        torch.testing.assert_close(output.left, nn.Sequential(*blocks_of)(x))
        assert torch.equal(output.right, y)
    pipe.close()
    say("named")


def mirrored():
    """Stages on two ranks: a step and an evaluation, whose copies share the micro-batches."""
    x, y = batch(ROWS, 3, 16)
    for kind in ("dualpipe", "chimera"):
        modules = blocks(2)
        own = own_copies(modules, stages_of_rank(kind, 2, 2, dist.get_rank()))
        pipe = Pipeline(
            own, schedule=kind, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2],)
        )  # fmt: skip
        expected = reference_step(modules, x, y, NUM_MICRO_BATCHES)
        loss = pipe.step(x, target=y)
        assert furthest(own, modules) < 1e-6
        for value in (loss, pipe.eval_step(x, target=y)):
            torch.testing.assert_close(value, expected)
        pipe.close()
        say("mirrored", kind=kind)


def frozen_ties():
    """A tied weight that is frozen, as of a model that trains adapters alone: it has no gradients to sum."""
    x = torch.arange(ROWS * 3).reshape(ROWS, 3) % 11
    modules = [nn.Sequential(nn.Embedding(11, 16), Block()), nn.Sequential(Block(), nn.Linear(16, 11, bias=False))]
    modules[1][1].weight = modules[0][0].weight
    modules[0][0].weight.requires_grad_(False)
    pipe = Pipeline(
        ModelStages(copied(modules), tied=[{0: "0.weight", 1: "1.weight"}]), num_micro_batches=NUM_MICRO_BATCHES,
        loss_fn=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()), example=(x[:2],),
    )  # fmt: skip
    for ids in x.split(2):
        loss = F.cross_entropy(modules[1](modules[0](ids)).flatten(0, 1), ids.flatten())
        (loss / NUM_MICRO_BATCHES).backward()
    pipe.step(x, target=x)
    same_bits(pipe.stages, modules)
    norm = nn.utils.clip_grad_norm_(nn.ModuleList(modules).parameters(), 1.0)
    torch.testing.assert_close(pipe.clip_grad_norm_(1.0), norm)
    pipe.close()
    say("frozen_ties")


def sparse():
    """Sparse gradients of an embedding, and their norm."""
    x = torch.arange(ROWS * 3).reshape(ROWS, 3) % 5
    norms, gradients = [], []
    for is_sparse in (True, False):
        torch.manual_seed(0)
        modules = [nn.Embedding(11, 16, sparse=is_sparse), Block()]
        own = own_copies(modules, [dist.get_rank()])
        pipe = Pipeline(
            own, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=lambda output, _: output.pow(2).mean(), example=(x[:2],)
        )
        pipe.step(x, target=x)
        norms.append(pipe.clip_grad_norm_(0.01))
        gradients.append([weight.grad.to_dense() for weight in own[dist.get_rank()].parameters()])
        pipe.close()
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(*gradients)
    say("sparse")


class Attention(nn.Module):
    """Causal attention with a mask of two sequence dims, which the next stage gets too."""

    def __init__(self):
        super().__init__()
        self.qkv, self.block = nn.Linear(16, 48), Block()

    def forward(self, x, mask=None, *, position):
        if mask is None:
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().expand(len(x), -1, -1)
        q, k, v = self.qkv(x + position[:, None]).chunk(3, -1)
        return self.block(x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), mask.contiguous()


def first(output, target):
    return F.mse_loss(output[0], target)


def lengths():
    """Micro-batches of three sequence lengths, and an argument of every stage that has the length."""
    num_tokens = (5, 3, 5, 7)
    data = [batch(2, n, 16, seed=n) for n in num_tokens]
    positions = [torch.linspace(0, 1, n) for n in num_tokens]
    meta = MicroBatches(torch.empty(2, n, 16, device="meta") for n in num_tokens)
    for kind, split in (("zb_v", "linear"), ("1f1b", "whole")):
        num = 4 if kind == "zb_v" else 2
        modules = blocks(num, make=Attention)
        own = own_copies(modules, stages_of_rank(kind, 2, num, dist.get_rank()))
        options = {"schedule": kind, "num_micro_batches": 4, "loss_fn": first, "split": split}
        pipe = Pipeline(
            own, example=(meta,), example_kwargs={"position": MicroBatches(p.to("meta") for p in positions)}, **options
        )
        assert pipe.plan.content["schedule"]["seq_lengths"] == list(num_tokens)
        assert [out["shape"] for out in pipe.plan.content["model"]["layers"][0]["out"]] == [
            ["b", "s", 16],
            ["b", "s", "s"],
        ]
        inputs, targets = MicroBatches(x for x, _ in data), MicroBatches(y for _, y in data)
        position = MicroBatches(p for p in positions)
        for _ in range(2):
            for module in modules:
                module.zero_grad()
            losses = []
            for (x, y), p in zip(data, positions, strict=True):
                h = (x,)
                for module in modules:
                    h = module(*h, position=p)
                losses.append(first(h, y))
                (losses[-1] / 4).backward()
            loss = pipe.step(inputs, target=targets, position=position)
            same_bits(own, modules)
            clear(own)
            if loss is not None:
                assert torch.equal(loss, torch.stack(losses).sum() / 4)
        output = pipe.eval_step(inputs, position=position)
        if pipe.is_last:
            assert [x.shape[1] for x in output[0]] == list(num_tokens)
        pipe.close()
        say("lengths", kind=kind)
    refused(
        lambda: Pipeline(own_copies(blocks(2, make=Halved), [dist.get_rank()]), example=(meta,), num_micro_batches=4),
        "stage 0 has the sizes [2, 1, 3] in dim 1", "sequence lengths are [5, 3, 7]",
    )  # fmt: skip
    refused(
        lambda: Pipeline(own, example=(MicroBatches(meta[:3]),), num_micro_batches=4, loss_fn=first),
        "values of 3 micro-batches, and the plan has 4",
    )  # fmt: skip


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x[:, : x.shape[1] // 2])


CASES = {
    "structured": structured, "uneven": uneven, "inside": inside, "named": named, "mirrored": mirrored,
    "frozen_ties": frozen_ties, "sparse": sparse, "lengths": lengths,
}  # fmt: skip

if __name__ == "__main__":
    main(CASES)
