"""Two processes: losses that are divided by the number of labels of a whole step, arguments of a loss, metrics."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import batch, blocks, clear, furthest, main, own_copies, refused, same_bits, say
from torch import nn

from pipeproof.torch import Pipeline, causal_lm_loss, stages_of_rank, stages_of_transformers

NUM = 4
ROWS = 2 * NUM
COUNTS = (1.0, 5.0, 0.0, 3.0)
"""Labels of the micro-batches, of which there are 9."""


def counted(output, target, scale=1.0):
    """A sum over some elements, their number, and two metrics."""
    y, weight = target
    distance = (output - y).pow(2).mean((1, 2))
    return (distance * weight[:, 0]).sum() * scale, weight[:, 0].sum(), {"worst": distance.amax(), "rows": distance}


def counted_batch(seed=0):
    x, y = batch(ROWS, 3, 16, seed=seed)
    weight = torch.tensor(COUNTS).repeat_interleave(2)[:, None] / 2
    return x, (y, weight)


def parts_of(value):
    """A value of each micro-batch."""
    if isinstance(value, torch.Tensor):
        return value.chunk(NUM)
    return list(zip(*map(parts_of, value), strict=True))


def share_of_sum(output, target, num_items_in_batch, scale=1.0):
    total, _, metrics = counted(output, target, scale)
    return total / num_items_in_batch, metrics


def reference(modules, x, target, scale=1.0):
    """Losses and metrics of the micro-batches; their gradients are added to ``.grad``."""
    terms = []
    for rows, part in zip(parts_of(x), parts_of(target), strict=True):
        loss, metrics = share_of_sum(nn.Sequential(*modules)(rows), part, torch.tensor(9), scale)
        loss.backward()
        terms.append((loss.detach(), {name: value.detach() for name, value in metrics.items()}))
    return terms


def metrics():
    """Losses and metrics of micro-batches, two steps without zero_grad, a scaler, arguments of a loss, ``compare``."""
    x, target = counted_batch()
    number = {"num_items_in_batch": 9}
    scaled = {**number, "scale": torch.tensor(3.0)}
    for kind, split in (("1f1b", "whole"), ("zb_v", "linear"), ("zb_v", "graph"), ("dualpipe", "whole")):
        num = 2 if kind in ("1f1b", "dualpipe") else 4
        modules = blocks(num)
        own = own_copies(modules, stages_of_rank(kind, 2, num, dist.get_rank()))
        pipe = Pipeline(
            own, schedule=kind, num_micro_batches=NUM, loss_fn=share_of_sum, example=(x[:2],), split=split,
            compiler="eager", loss_on="all" if split == "linear" else "last",
        )  # fmt: skip
        each, of_each = zip(*reference(modules, x, target), strict=True)
        losses, kept = [], {}
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loss = pipe.step(x, target=target, losses=losses, metrics=kept, scaler=scaler, loss_kwargs=number)
        for weight in nn.ModuleList(own.values()).parameters():
            weight.grad.div_(1024)
        same = same_bits if kind != "dualpipe" else lambda *pair: require_near(furthest(*pair))
        same(own, modules)
        expected = torch.stack(each).sum()
        if pipe.is_last or split == "linear":
            assert torch.equal(loss, expected), (loss, expected)
        if pipe.is_last:
            assert torch.equal(torch.stack(losses), torch.stack(each))
            for name in ("worst", "rows"):
                assert torch.equal(torch.stack(kept[name]), torch.stack([one[name] for one in of_each])), name
        else:
            assert kept == {}
        reference(modules, x, target, 3.0)  # the second step adds to the first
        pipe.step(x, target=target, loss_kwargs=scaled)
        same(own, modules)
        clear(own)
        value = pipe.eval_step(x, target=target, metrics=kept, loss_kwargs=number)
        if value is not None:
            assert torch.equal(value, expected)
        comparison = pipe.compare(
            nn.Sequential(*modules), x, target=target, loss_kwargs=scaled,
            name_of=lambda stage, name: f"{stage}.{name}",
        )  # fmt: skip
        assert comparison.is_within_bounds if kind == "dualpipe" else comparison.is_exact, str(comparison)
        pipe.close()
        say("metrics", kind=kind, split=split)


def require_near(distance):
    assert distance < 1e-6, distance


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def shares():
    """``num_items_in_batch``: the bits of the model's own loss function, micro-batch by micro-batch."""
    torch.manual_seed(3)
    ids = torch.randint(37, (ROWS, 9))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : row + 1] = -100
    number = int((labels[:, 1:] != -100).sum())
    for kind, split, form in (("1f1b", "whole", int), ("zb_v", "linear", torch.tensor), ("zb_v", "graph", int)):
        model = tiny_llama()
        pipe = Pipeline(
            stages_of_transformers(copy.deepcopy(model), 2 if kind == "1f1b" else 4), schedule=kind,
            num_micro_batches=NUM, loss_fn=causal_lm_loss, example=(ids[:2],), split=split, compiler="eager",
            loss_on="all",
        )  # fmt: skip
        for step in range(3):
            part = labels.clone()
            part[:, : step + 2] = -100  # another number in each step
            number = int((part[:, 1:] != -100).sum())
            expected = []
            for rows, own in zip(parts_of(ids), parts_of(part), strict=True):
                logits = model(rows, use_cache=False).logits
                expected.append(model.loss_function(logits, own, 37, num_items_in_batch=torch.tensor(number)))
                expected[-1].backward()
            loss = pipe.step(ids, target=part, loss_kwargs={"num_items_in_batch": form(number)})
            assert torch.equal(loss, torch.stack(expected).sum().detach()), (loss, expected)
            weights = dict(model.named_parameters())
            for stage in pipe.stages.values():
                for name, weight in stage.named_parameters():
                    assert torch.equal(weight.grad, weights[name].grad), (kind, split, name)
                stage.zero_grad()
            model.zero_grad()
        value = pipe.eval_step(ids, target=part, loss_kwargs={"num_items_in_batch": number})
        assert torch.equal(value, loss)
        assert pipe.eval_step(ids) is None or pipe.is_last  # no target: no loss on any rank
        comparison = pipe.compare(model, ids, target=part, loss_kwargs={"num_items_in_batch": number})
        assert comparison.is_exact, str(comparison)
        if split == "graph":
            assert set(pipe.splits.values()) == {"graph"}, pipe.splits
        pipe.close()
        say("shares", kind=kind, split=split)


def means():
    """The mean of means is not the mean over all labels; both are what the documentation says."""
    torch.manual_seed(3)
    ids, model = torch.randint(37, (ROWS, 9)), tiny_llama()
    labels = ids.clone()
    labels[:2, 3:] = -100  # micro-batch 0 has 2 labels in each row, the others 8
    pipe = Pipeline(
        stages_of_transformers(copy.deepcopy(model), 2), num_micro_batches=NUM, loss_fn=causal_lm_loss,
        example=(ids[:2],), loss_on="all",
    )  # fmt: skip
    number = (labels[:, 1:] != -100).sum()
    of_means = pipe.step(ids, target=labels)
    of_labels = pipe.step(ids, target=labels, loss_kwargs={"num_items_in_batch": number})
    pipe.close()
    logits = model(ids, use_cache=False).logits
    parts = [causal_lm_loss(*each) for each in zip(logits.chunk(NUM), labels.chunk(NUM), strict=True)]
    torch.testing.assert_close(of_means, torch.stack(parts).mean().detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(of_labels, causal_lm_loss(logits, labels).detach(), rtol=1e-6, atol=0)
    assert abs(of_means - of_labels) > 1e-3
    say("means", of_means=of_means, of_labels=of_labels)


def data_ranks():
    """Two pipelines of one rank with other rows: the loss and the gradients of the sum over both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    every = [counted_batch(seed) for seed in range(2)]
    every[1][1][1].mul_(2)  # 9 and 18 labels
    x, target = every[dist.get_rank()]
    for wrap in ("data_group", "fsdp", "ddp"):
        modules = blocks(1)
        own = own_copies(modules, [0])
        if wrap == "fsdp":
            fully_shard(own[0], mesh=mesh["dp"])
        elif wrap == "ddp":
            own[0] = nn.parallel.DistributedDataParallel(own[0], process_group=mesh["dp"].get_group())
        pipe = Pipeline(
            own, num_micro_batches=NUM, loss_fn=share_of_sum, example=(x[:2],), group=mesh["pp"],
            data_group=mesh["dp"] if wrap == "data_group" else None,
        )  # fmt: skip
        shares = [loss for part in every for loss, _ in reference(modules, *part)]
        for weight in modules[0].parameters():
            weight.grad.div_(3)  # of 27 labels, not of 9
        options = {"loss_kwargs": {"num_items_in_batch": 27}}
        loss = pipe.step(x, target=target, **options)
        torch.testing.assert_close(loss, torch.stack(shares).sum() / 3, rtol=1e-6, atol=0)
        require_near(furthest(own, modules))
        value = pipe.eval_step(x, target=target, **options)
        torch.testing.assert_close(value, loss, rtol=1e-6, atol=0)
        pipe.close()
        say("data_ranks", wrap=wrap)


def refusals():
    """What a loss function may not return, with what to write."""
    x, (y, _) = counted_batch()
    rank = dist.get_rank()
    own = own_copies(blocks(2), [rank])
    for loss_fn, words in (
        (lambda a, b: (F.mse_loss(a, b), 3), ("a tuple of 2", "divide a sum by num_items_in_batch")),
        (lambda a, b: (F.mse_loss(a, b), {"n": 3}), ("metric 'n'", "tensor")),
        (lambda a, b: (a - b).abs(), ("[2, 3, 16]", "scalar")),
    ):
        pipe = Pipeline(own, num_micro_batches=NUM, loss_fn=loss_fn, example=(x[:2],))
        refused(lambda: pipe.step(x, target=y), *words)  # noqa: B023 - called at once
        pipe.close()
    make = {"num_micro_batches": NUM, "loss_fn": F.mse_loss, "example": (x[:2],)}
    refused(lambda: Pipeline(own, **make, loss_on="first"), "loss_on is 'first'")
    refused(lambda: Pipeline(own, **make, loss_on="all" if rank else "last"), "loss_on")


def replayed():
    """On GPUs: a replayed step has the loss and gradients of shares, also added up."""
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    rank, num = dist.get_rank(), dist.get_world_size()
    x, (y, weight) = counted_batch()
    x, target = x.to(device), (y.to(device), weight.to(device))
    found = []
    for replay in (False, True):
        own = {rank: blocks(num)[rank].to(device)}
        pipe = Pipeline(
            own, num_micro_batches=NUM, loss_fn=share_of_sum, example=(x[:2],), loss_on="all", replay=replay
        )
        values = []
        for step in range(6):
            metrics = {}
            values.append(pipe.step(x, target=target, metrics=metrics, loss_kwargs={"num_items_in_batch": 9 + step}))
            values += [weight.grad.clone() for weight in own[rank].parameters()]
            values += [each.clone() for name in sorted(metrics) for each in metrics[name]]
            if step != 3:  # the fifth step adds to the fourth
                clear(own)
        found.append(values)
        pipe.close()
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    say("replayed")


CASES = {
    "metrics": metrics, "shares": shares, "means": means, "data_ranks": data_ranks, "refusals": refusals,
}  # fmt: skip
if torch.cuda.is_available():
    CASES["replayed"] = replayed

if __name__ == "__main__":
    main(CASES)
