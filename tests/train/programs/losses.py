"""Two processes: losses that are divided by the number of labels of a whole step, arguments of a loss, metrics."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import batch, blocks, clear, furthest, main, own_copies, refused, same_bits, say
from torch import nn

from pipeproof.torch import Pipeline, causal_lm_loss, causal_lm_sum, stages_of_rank, stages_of_transformers

NUM = 4
ROWS = 2 * NUM
COUNTS = (1.0, 5.0, 0.0, 3.0)
"""Numbers of labels of the micro-batches, 9 in all."""


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


def reference_sums(modules, x, target, scale=1.0):
    """Sums, counts and metrics of the micro-batches; the gradients of the sums are then in ``.grad``."""
    for module in modules:
        module.zero_grad()
    terms = []
    for rows, part in zip(parts_of(x), parts_of(target), strict=True):
        total, count, metrics = counted(nn.Sequential(*modules)(rows), part, scale)
        total.backward()
        terms.append((total.detach(), count, {name: value.detach() for name, value in metrics.items()}))
    return terms


def divide(modules, count):
    for module in modules:
        for weight in module.parameters():
            weight.grad.div_(count)


def divided_first(num, x, target):
    """Modules with the gradients of a loop that divides each sum before its backward."""
    modules = blocks(num)
    for rows, part in zip(parts_of(x), parts_of(target), strict=True):
        total, _, _ = counted(nn.Sequential(*modules)(rows), part)
        (total / 9).backward()
    return modules


def tokens():
    """The gradients of the sums, divided by 9; losses, metrics, two steps without zero_grad, a scaler, ``compare``."""
    x, target = counted_batch()
    for kind, split in (("1f1b", "whole"), ("zb_v", "linear"), ("zb_v", "graph"), ("dualpipe", "whole")):
        num = 2 if kind in ("1f1b", "dualpipe") else 4
        modules = blocks(num)
        numbers = stages_of_rank(kind, 2, num, dist.get_rank())
        own = own_copies(modules, numbers)
        pipe = Pipeline(
            own, schedule=kind, num_micro_batches=NUM, loss_fn=counted, example=(x[:2],), normalize="tokens",
            split=split, compiler="eager", loss_on="all" if split == "linear" else "last",
        )  # fmt: skip
        terms = reference_sums(modules, x, target)
        divide(modules, 9)
        require_near(furthest(dict(enumerate(modules)), divided_first(num, x, target)))
        sums, _, metrics = zip(*terms, strict=True)
        losses, kept = [], {}
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loss = pipe.step(x, target=target, losses=losses, metrics=kept, scaler=scaler)
        for weight in nn.ModuleList(own.values()).parameters():
            weight.grad.div_(1024)
        same = same_bits if kind != "dualpipe" else lambda *pair: require_near(furthest(*pair))
        same(own, modules)
        expected = torch.stack(sums).sum() / 9
        if pipe.is_last or split == "linear":
            assert torch.equal(loss, expected), (loss, expected)
        if pipe.is_last:
            assert torch.equal(torch.stack(losses), torch.stack(sums))
            for name in ("worst", "rows"):
                assert torch.equal(torch.stack(kept[name]), torch.stack([each[name] for each in metrics])), name
        else:
            assert kept == {}
        for weight in nn.ModuleList(modules).parameters():  # the second step adds to the first
            weight.earlier = weight.grad.clone()
        reference_sums(modules, x, target, 3.0)
        divide(modules, 9)
        for weight in nn.ModuleList(modules).parameters():
            weight.grad = weight.earlier + weight.grad
        pipe.step(x, target=target, loss_kwargs={"scale": torch.tensor(3.0)})
        same(own, modules)
        clear(own)
        value = pipe.eval_step(x, target=target, metrics=kept)
        if value is not None:
            assert torch.equal(value, expected)
        comparison = pipe.compare(
            nn.Sequential(*modules), x, target=target, loss_kwargs={"scale": torch.tensor(3.0)},
            name_of=lambda stage, name: f"{stage}.{name}",
        )  # fmt: skip
        assert comparison.is_within_bounds if kind == "dualpipe" else comparison.is_exact, str(comparison)
        pipe.close()
        say("tokens", kind=kind, split=split)


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
    """The mean of means is not the mean over all labels; both are as documented."""
    torch.manual_seed(3)
    ids, model = torch.randint(37, (ROWS, 9)), tiny_llama()
    labels = ids.clone()
    labels[:2, 3:] = -100  # micro-batch 0 has 2 labels in each row, the others 8
    found = {}
    for loss_fn, options in ((causal_lm_loss, {}), (causal_lm_sum, {"normalize": "tokens"})):
        pipe = Pipeline(
            stages_of_transformers(copy.deepcopy(model), 2), num_micro_batches=NUM, loss_fn=loss_fn,
            example=(ids[:2],), loss_on="all", **options,
        )  # fmt: skip
        found[loss_fn] = pipe.step(ids, target=labels)
        pipe.close()
    logits = model(ids, use_cache=False).logits
    parts = [causal_lm_loss(*each) for each in zip(logits.chunk(NUM), labels.chunk(NUM), strict=True)]
    torch.testing.assert_close(found[causal_lm_loss], torch.stack(parts).mean().detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[causal_lm_sum], causal_lm_loss(logits, labels).detach(), rtol=1e-6, atol=0)
    assert abs(found[causal_lm_loss] - found[causal_lm_sum]) > 1e-3
    say("means", of_means=found[causal_lm_loss], of_labels=found[causal_lm_sum])


def data_ranks():
    """Two pipelines of one rank with other rows: the loss and the gradients of the sum over both, by both ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    every = [counted_batch(seed) for seed in range(2)]
    every[1][1][1].mul_(2)  # 9 and 18 labels
    x, target = every[dist.get_rank()]
    for wrap in ("data_group", "fsdp", "ddp"):
        for by_share in (False, True):
            modules = blocks(1)
            own = own_copies(modules, [0])
            if wrap == "fsdp":
                fully_shard(own[0], mesh=mesh["dp"])
            elif wrap == "ddp":
                own[0] = nn.parallel.DistributedDataParallel(own[0], process_group=mesh["dp"].get_group())
            pipe = Pipeline(
                own, num_micro_batches=NUM, loss_fn=share_of_sum if by_share else counted, example=(x[:2],),
                normalize="micro_batches" if by_share else "tokens", group=mesh["pp"],
                data_group=mesh["dp"] if wrap == "data_group" else None,
            )  # fmt: skip
            sums, gradients = [], []
            for part in every:
                sums += [total for total, _, _ in reference_sums(modules, *part)]
                gradients.append([weight.grad.clone() for weight in modules[0].parameters()])
            for weight, first, second in zip(modules[0].parameters(), *gradients, strict=True):
                weight.grad = (first + second) / 27
            options = {"loss_kwargs": {"num_items_in_batch": 27}} if by_share else {}
            loss = pipe.step(x, target=target, **options)
            torch.testing.assert_close(loss, torch.stack(sums).sum() / 27, rtol=1e-6, atol=0)
            require_near(furthest(own, modules))
            value = pipe.eval_step(x, target=target, **options)
            torch.testing.assert_close(value, loss, rtol=1e-6, atol=0)
            pipe.close()
            say("data_ranks", wrap=wrap, by_share=by_share)


def share_of_sum(output, target, num_items_in_batch):
    total, _, metrics = counted(output, target)
    return total / num_items_in_batch, metrics


def refusals():
    """Results that a loss function may not return, with the alternative."""
    x, (y, weight) = counted_batch()
    rank = dist.get_rank()
    own = own_copies(blocks(2), [rank])
    cases = (
        (F.mse_loss, "tokens", {}, ("loss_fn", "(sum, count)")),
        (lambda a, b: (F.mse_loss(a, b), 3), "micro_batches", {}, ("normalize='tokens'",)),
        (lambda a, b: (F.mse_loss(a, b), {"n": 3}), "micro_batches", {}, ("metric 'n'", "tensor")),
        (lambda a, b: (a - b).abs(), "micro_batches", {}, ("[2, 3, 16]", "scalar")),
        (lambda a, b: (F.mse_loss(a, b), "3"), "tokens", {}, ("count", "str")),
    )
    for loss_fn, normalize, options, words in cases:
        pipe = Pipeline(own, num_micro_batches=NUM, loss_fn=loss_fn, example=(x[:2],), normalize=normalize)
        refused(lambda: pipe.step(x, target=y, **options), *words)  # noqa: B023 - called at once
        pipe.close()
    make = {"num_micro_batches": NUM, "loss_fn": F.mse_loss, "example": (x[:2],)}
    refused(lambda: Pipeline(own, **make, normalize="rows"), "normalize is 'rows'")
    refused(lambda: Pipeline(own, **make, normalize="tokens", scale_grads=False), "scale_grads=False")
    refused(lambda: Pipeline(own, **make, loss_on="first"), "loss_on is 'first'")
    refused(lambda: Pipeline(own, **make, loss_on="all" if rank else "last"), "loss_on")
    pipe = Pipeline(own, **{**make, "loss_fn": counted}, normalize="tokens")
    for weights in own.values():
        for each in weights.parameters():
            each.grad = torch.ones_like(each)
    refused(lambda: pipe.step(x.requires_grad_(), target=(y, weight)), "requires a gradient")
    assert all(each.grad.eq(1).all() for stage in own.values() for each in stage.parameters())
    pipe.close()


def replayed():
    """On GPUs: a replayed step has the loss and gradients of ``normalize="tokens"`` and of shares, also added up."""
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    rank, num = dist.get_rank(), dist.get_world_size()
    x, (y, weight) = counted_batch()
    x, target = x.to(device), (y.to(device), weight.to(device))
    for by_share in (False, True):
        found = []
        for replay in (False, True):
            own = {rank: blocks(num)[rank].to(device)}
            pipe = Pipeline(
                own, num_micro_batches=NUM, loss_fn=share_of_sum if by_share else counted, example=(x[:2],),
                normalize="micro_batches" if by_share else "tokens", loss_on="all", replay=replay,
            )  # fmt: skip
            values = []
            for step in range(6):
                options = {"num_items_in_batch": 9 + step} if by_share else {"scale": x.new_full((), step + 1)}
                metrics = {}
                values.append(pipe.step(x, target=target, metrics=metrics, loss_kwargs=options))
                values += [weight.grad.clone() for weight in own[rank].parameters()]
                values += [each.clone() for name in sorted(metrics) for each in metrics[name]]
                if step != 3:  # the fifth step adds to the fourth
                    clear(own)
            found.append(values)
            pipe.close()
        assert len(found[0]) == len(found[1])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), by_share
        say("replayed", by_share=by_share)


CASES = {
    "tokens": tokens, "shares": shares, "means": means, "data_ranks": data_ranks, "refusals": refusals,
}  # fmt: skip
if torch.cuda.is_available():
    CASES["replayed"] = replayed

if __name__ == "__main__":
    main(CASES)
