"""Two processes: random nested arguments, block masks, packed documents, collators' dicts."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import main, own_copies, refused, same_bits, say
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeproof.torch import Pipeline, packed

NUM, SIZE, LENGTH = 3, 2, 6
ROWS = NUM * SIZE


class Mixed(nn.Module):
    """Adds up the means over rows of all arguments: a wrong row has other bits."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, **kwargs):
        h = self.linear(x)
        for leaf in tree_leaves(kwargs):
            if isinstance(leaf, torch.Tensor):
                scale = leaf.float().reshape(len(x), -1).mean(-1) if leaf.dim() else leaf.expand(len(x))
                h = h * (1 + scale[:, None])
        return h


def made(classes):
    modules = []
    for number, each in enumerate(classes):
        torch.manual_seed(number)
        modules.append(each())
    return modules


def looped(modules, parts, loss_fn=F.mse_loss):
    """Losses of a plain loop; ``parts`` are (x, target, kwargs of each stage) by micro-batch."""
    for module in modules:
        module.zero_grad()
    losses = []
    for x, target, kwargs in parts:
        for module, named in zip(modules, kwargs, strict=True):
            x = module(x, **named)
        losses.append(loss_fn(x, target))
        (losses[-1] / len(parts)).backward()
    return torch.stack(losses).detach()


def require_same(pipe, own, modules, expected, *args, **kwargs):
    """Run a step and require the bits of the loop."""
    losses = []
    loss = pipe.step(*args, losses=losses, **kwargs)
    same_bits(own, modules)
    for stage in own.values():
        stage.zero_grad()
    if pipe.is_last:
        assert torch.equal(torch.stack(losses), expected)
        assert torch.equal(loss, expected.sum() / len(expected))


def nested(draw, depth=0):
    """A random value that holds a tensor of all rows."""
    kind = draw.choice(["tensor", "list", "tuple", "dict", "mixed"]) if depth < 3 else "tensor"
    if kind == "tensor":
        return torch.randn(ROWS, *(draw.randint(1, 3) for _ in range(draw.randint(0, 2))))
    if kind == "dict":
        return {name: nested(draw, depth + 1) for name in "ab"[: draw.randint(1, 2)]}
    if kind == "mixed":
        return [nested(draw, depth + 1), None, 0.5, "text", torch.tensor(0.25)]
    items = [nested(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    return items if kind == "list" else tuple(items)


def part_of(value, index):
    rows = slice(index * SIZE, (index + 1) * SIZE)
    return tree_map_only(torch.Tensor, lambda x: x[rows] if x.dim() else x, value)


def random_arguments():
    """Random nested keyword arguments of two stages, and of one stage alone, against a plain loop."""
    draw = random.Random(0)
    torch.manual_seed(1)
    x, y = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
    for _ in range(8):
        modules = made([Mixed, Mixed])
        own = own_copies(modules, [dist.get_rank()])
        kwargs, alone = {"value": nested(draw), "other": nested(draw)}, {"single": nested(draw)}
        pipe = Pipeline(
            own, num_micro_batches=NUM, loss_fn=F.mse_loss, example=(x[:SIZE],), example_kwargs=part_of(kwargs, 0),
            example_stage_kwargs={1: part_of(alone, 0)},
        )  # fmt: skip
        parts = [
            (*part_of((x, y), i), [part_of(kwargs, i), {**part_of(kwargs, i), **part_of(alone, i)}]) for i in range(NUM)
        ]
        expected = looped(modules, parts)
        every = {"target": y, "stage_kwargs": {1: alone}, **kwargs}
        require_same(pipe, own, modules, expected, x, **every)
        value = pipe.eval_step(x, **every)
        assert value is None or torch.equal(value, expected.sum() / NUM)
        pipe.close()
    say("random_arguments")


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x, mask):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        dense = create_mask(mask.mask_mod, x.shape[0], 1, x.shape[1], x.shape[1], device="cpu")
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=dense)[:, 0]


class Chain(nn.Module):
    def __init__(self, modules):
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x, **kwargs):
        for part in self.parts:
            x = part(x, **kwargs)
        return x


def documents_mask(documents):
    def same_document(b, h, q, k):
        return (documents[b, q] == documents[b, k]) & (q >= k)

    rows, length = documents.shape
    return create_block_mask(same_document, rows, None, length, length, device="cpu", BLOCK_SIZE=4)


def block_masks():
    """A ``BlockMask`` is split along its rows: losses, gradients and ``compare`` have the bits of a loop."""
    torch.manual_seed(2)
    x, y = torch.randn(ROWS, 16, 8), torch.randn(ROWS, 16, 8)
    documents = torch.randint(3, (ROWS, 16)).sort().values
    modules = made([Masked, Masked])
    own = own_copies(modules, [dist.get_rank()])
    pipe = Pipeline(
        own, num_micro_batches=NUM, loss_fn=F.mse_loss, example=(x[:SIZE],),
        example_kwargs={"mask": documents_mask(documents[:SIZE])},
    )  # fmt: skip
    parts = [
        (*part_of((x, y), i), [{"mask": documents_mask(documents[i * SIZE : (i + 1) * SIZE])}] * 2) for i in range(NUM)
    ]
    mask = documents_mask(documents)
    expected = looped(modules, parts)
    require_same(pipe, own, modules, expected, x, target=y, mask=mask)
    found = pipe.compare(Chain(modules), x, target=y, mask=mask, name_of=lambda stage, name: f"parts.{stage}.{name}")
    assert found.is_exact, str(found)
    refused(lambda: pipe.step(x, target=y, mask=documents_mask(documents[:4])), "BlockMask of 4 rows")
    pipe.close()
    say("block_masks")


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 4)

    def forward(self, tokens, position_ids=None):
        h = self.table(tokens)
        return h if position_ids is None else h * (1 + position_ids[..., None])


class Head(nn.Module):
    """Means over documents, by their offsets."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 11)

    def forward(self, h, cu_seqlens=None, attention_mask=None, **others):
        assert not {"input_ids", "labels"} & others.keys()
        if cu_seqlens is not None:
            sizes = cu_seqlens.diff().tolist()
            h = torch.cat([part - part.mean(1, keepdim=True) for part in h.split(sizes, 1)], 1)
        return self.out(h if attention_mask is None else h * attention_mask[..., None])


def entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def collators_dicts():
    """``step(**batch)``: of padded rows, and of packed documents with offsets of their own."""
    torch.manual_seed(4)
    modules = made([Embed, Head])
    own = own_copies(modules, [dist.get_rank()])
    batch = {
        "input_ids": torch.randint(11, (4, 5)),
        "attention_mask": torch.ones(4, 5).tril(2),
        "labels": torch.randint(11, (4, 5)),
    }
    pipe = Pipeline(
        own, num_micro_batches=2, loss_fn=entropy, example_kwargs={name: value[:2] for name, value in batch.items()}
    )
    ids, masks, labels = (value.split(2) for value in batch.values())
    expected = looped(modules, [(ids[i], labels[i], [{}, {"attention_mask": masks[i]}]) for i in range(2)], entropy)
    require_same(pipe, own, modules, expected, **batch)
    value = pipe.eval_step(**batch)
    assert value is None or torch.equal(value, expected.sum() / 2)
    offsets = torch.tensor([0, 3, 5, 7, 8, 10], dtype=torch.int32)
    tokens = torch.randint(11, (1, 10))
    documents = packed(tokens, offsets, num_micro_batches=2, labels=tokens, position_ids=True)
    pipe.close()
    pipe = Pipeline(own, num_micro_batches=2, loss_fn=entropy, example_kwargs=documents)
    parts = [
        (
            tokens[:, 5 * i : 5 * i + 5], tokens[:, 5 * i : 5 * i + 5],
            [{"position_ids": torch.tensor([positions])}, {"cu_seqlens": torch.tensor(cut)}],
        )
        for i, (positions, cut) in enumerate([([0, 1, 2, 0, 1], [0, 3, 5]), ([0, 1, 0, 0, 1], [0, 2, 3, 5])])
    ]  # fmt: skip
    expected = looped(modules, parts, entropy)
    require_same(pipe, own, modules, expected, **documents)
    refused(lambda: pipe.step(tokens, cu_seqlens=offsets, target=tokens), "packed(..)")
    pipe.close()
    say("collators_dicts")


def other_rows():
    """``check_inputs`` compares the arguments of the ranks; the error is one text on all ranks."""
    torch.manual_seed(6)
    x, y = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
    own = own_copies(made([Mixed, Mixed]), [dist.get_rank()])
    pipe = Pipeline(own, num_micro_batches=NUM, loss_fn=F.mse_loss, example=(x[:SIZE],), check_inputs=True)
    pipe.step(x, target=y)
    pipe.step(*[x] * pipe.is_first, target=y if pipe.is_last else None)
    text = refused(lambda: pipe.step(x + dist.get_rank(), target=y), "check_inputs: x differs", "[0]", "[1]")
    texts = [None, None]
    dist.all_gather_object(texts, text)
    assert texts[0] == texts[1]
    pipe.close()
    say("other_rows")


CASES = {
    "random_arguments": random_arguments, "block_masks": block_masks, "collators_dicts": collators_dicts,
    "other_rows": other_rows,
}  # fmt: skip

if __name__ == "__main__":
    main(CASES)
