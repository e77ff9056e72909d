"""Four processes, two pipelines of two ranks or a pipeline over pairs of ranks: FSDP2, DDP, DTensor, own groups."""

from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    Block,
    batch,
    blocks,
    clear,
    furthest,
    main,
    own_copies,
    reference_step,
    refused,
    same_bits,
    say,
    whole,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeproof.torch import Pipeline, stages_of_rank

NUM_MICRO_BATCHES = 4
ROWS = 2 * NUM_MICRO_BATCHES
BOUND = 1e-5
"""Relative distance in float32; sums over ranks are added in another order than the reference's."""


class Collectives(TorchDispatchMode):
    """Counts the script's collectives by name; the pipeline's own do not pass the dispatcher.

    ``CommDebugMode`` tracks modules too, and fails where a forward runs between a forward and its backward.
    """

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname.strip("_").removesuffix("_base")] += 1
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """The largest sum of the bytes of all storages that live at the end of an operation, and some before."""

    def __init__(self, before):
        super().__init__()
        self.storages, self.peak = {}, 0
        self.see(before)

    def see(self, tensors):
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                self.storages[storage._cdata] = storage._weak_ref()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.see(tree_leaves((args, kwargs, result)))
        storages = {key: torch.UntypedStorage._new_with_weak_ptr(weak) for key, weak in self.storages.items()}
        self.storages = {key: self.storages[key] for key, storage in storages.items() if storage is not None}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in storages.values() if storage is not None))
        return result


def mesh_of(*names):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def replicas_data(mesh):
    """Batches of both replicas, and of this one."""
    both = [batch(ROWS, 3, 16, seed=dp) for dp in range(2)]
    return both, both[mesh["dp"].get_local_rank()]


def replicas_reference(modules, both):
    """The gradients of the mean over both replicas, in ``.grad``; the losses of each."""
    weights = weights_of(modules)
    second = reference_step(modules, *both[1], NUM_MICRO_BATCHES)
    kept = [weight.grad.clone() for weight in weights]
    first = reference_step(modules, *both[0], NUM_MICRO_BATCHES)
    for weight, other in zip(weights, kept, strict=True):
        weight.grad.add_(other).div_(2)
    return [first, second]


def weights_of(modules):
    """The weights of all modules, each once."""
    return list(nn.ModuleList(modules).parameters())


def fsdp():
    """One gather and one scatter for each sharded group in a step, and the reference's gradients, norm and update."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = mesh_of("dp", "pp")
    both, (x, y) = replicas_data(mesh)
    for kind, depth in (("1f1b", 1), ("zb_v", 2)):
        num = 2 if kind == "1f1b" else 4
        modules = blocks(num, depth=depth)
        numbers = stages_of_rank(kind, 2, num, mesh["pp"].get_local_rank())
        own = own_copies(modules, numbers)
        groups = 0
        for stage in own.values():
            if depth > 1:
                for block in stage:
                    fully_shard(block, mesh=mesh["dp"])
                groups += depth
            else:
                groups += 1
            fully_shard(stage, mesh=mesh["dp"])  # of a Sequential, no weight is left for the root
        pipe = Pipeline(
            own, schedule=kind, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2],),
            group=mesh["pp"],
        )  # fmt: skip
        assert pipe.plan.lowered.spec.topology.dp == 2
        optimizer = torch.optim.SGD([w for stage in own.values() for w in stage.parameters()], lr=0.1)
        expected = torch.optim.SGD(weights_of(modules), lr=0.1)
        worst = 0.0
        for step in range(3):
            losses = replicas_reference(modules, both)
            with Collectives() as debug:
                loss = pipe.step(x, target=y)
            assert debug.counts == {"allgather": groups, "reduce_scatter": groups}, (step, debug.counts)
            if loss is not None:
                torch.testing.assert_close(loss, losses[mesh["dp"].get_local_rank()], rtol=1e-6, atol=0)
            assert all(isinstance(w, DTensor) for stage in own.values() for w in stage.parameters())
            worst = max(worst, furthest(own, modules))
            norm = pipe.clip_grad_norm_(0.05)
            reference = torch.nn.utils.clip_grad_norm_(weights_of(modules), 0.05)
            torch.testing.assert_close(norm, reference, rtol=1e-6, atol=0)
            assert furthest(own, modules) < BOUND
            optimizer.step()
            expected.step()
            clear(own)
            with Collectives() as debug:
                value = pipe.eval_step(x, target=y)
            assert debug.counts == {"allgather": groups}, debug.counts
            if value is not None:
                with torch.no_grad():
                    torch.testing.assert_close(value, F.mse_loss(nn.Sequential(*modules)(x), y), rtol=1e-5, atol=0)
            assert all(isinstance(w, DTensor) for stage in own.values() for w in stage.parameters())
        for number, stage in own.items():
            for weight, same in zip(stage.parameters(), modules[number].parameters(), strict=True):
                torch.testing.assert_close(whole(weight), same, rtol=1e-5, atol=1e-7)
        assert worst < BOUND, worst
        say(f"fsdp {kind}", worst=worst, groups=groups)
        pipe.close()
    refused(
        lambda: Pipeline(own, schedule="zb_v", num_micro_batches=4, loss_fn=F.mse_loss, example=(x[:2],),
                         group=mesh["pp"], split="linear"),
        "split='linear' with fully_shard",
    )  # fmt: skip
    refused(
        lambda: Pipeline(own, schedule="zb_v", num_micro_batches=4, loss_fn=F.mse_loss, example=(x[:2],),
                         group=mesh["pp"], data_group=mesh["dp"]),
        "fully_shard", "no data_group",
    )  # fmt: skip


def resharded():
    """With ``reshard_after_forward=True`` all but two of the blocks are not gathered at the peak; bits stay."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = mesh_of("dp", "pp")
    depth, width = 8, 64
    _, (x, y) = replicas_data(mesh)
    x, y = (rows.new_empty(ROWS, 2 * width, width).normal_() for rows in (x, y))
    number = mesh["pp"].get_local_rank()
    peaks, gathers, gradients = [], [], []
    for after_forward, after_backward in ((None, True), (False, True), (True, True), (True, False)):
        stage = blocks(2, make=partial(Block, width), depth=depth)[number]
        for part in (*stage, stage):
            fully_shard(part, mesh=mesh["dp"], reshard_after_forward=after_forward)
        stage.set_reshard_after_backward(after_backward)
        pipe = Pipeline(
            {number: stage}, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2],),
            group=mesh["pp"],
        )  # fmt: skip
        for _ in range(2):  # the first step initialises the modules
            stage.zero_grad()
            with Collectives() as debug, LiveBytes(stage.parameters()) as live:
                pipe.step(x, target=y)
            assert all(isinstance(weight, DTensor) for weight in stage.parameters())
        gathers.append(debug.counts.pop("allgather"))
        assert debug.counts == {"reduce_scatter": depth}, debug.counts
        peaks.append(live.peak)
        gradients.append([whole(weight.grad) for weight in stage.parameters()])
        pipe.close()
    assert all(torch.equal(*pair) for other in gradients for pair in zip(gradients[0], other, strict=True))
    block = sum(gradient.nbytes for gradient in gradients[0]) // depth
    gathered = peaks[0]  # one block, and the buffer of the next gather, remain of eight blocks
    assert peaks == [gathered, gathered, gathered - (depth - 2) * block, gathered - (depth - 2) * block], (peaks, block)
    assert gathers[:2] == [depth, depth]
    assert 2 * NUM_MICRO_BATCHES * depth <= gathers[2] <= 2 * NUM_MICRO_BATCHES * (depth + 1), gathers
    assert depth < gathers[3] < gathers[2], gathers
    say("resharded", peaks=peaks, block=block, gathers=gathers)


def replicas():
    """DDP around the stages, or ``data_group``: the mean of both replicas, bit for bit."""
    from torch.nn.parallel import DistributedDataParallel

    mesh = mesh_of("dp", "pp")
    both, (x, y) = replicas_data(mesh)
    for wraps, split in ((True, "whole"), (False, "linear")):
        modules = blocks(4)
        own = own_copies(modules, stages_of_rank("zb_v", 2, 4, mesh["pp"].get_local_rank()))
        if wraps:
            own = {
                n: DistributedDataParallel(module, process_group=mesh["dp"].get_group()) for n, module in own.items()
            }
        pipe = Pipeline(
            own, schedule="zb_v", num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2],),
            group=mesh["pp"], data_group=None if wraps else mesh["dp"], split=split,
        )  # fmt: skip
        for _ in range(2):
            replicas_reference(modules, both)
            pipe.step(x, target=y)
            same_bits(own, modules)
            clear(own)
        pipe.close()
        say("replicas", wraps=wraps)
    rank, options = mesh["pp"].get_local_rank(), {"num_micro_batches": 4, "loss_fn": F.mse_loss, "example": (x[:2],)}
    whole_stage = DistributedDataParallel(Block(), process_group=mesh["dp"].get_group())
    refused(
        lambda: Pipeline({rank: nn.Sequential(whole_stage)}, group=mesh["pp"], **options), "must wrap the whole stage"
    )
    refused(lambda: Pipeline({rank: whole_stage}, group=mesh["pp"], data_group=mesh["dp"], **options), "no data_group")
    if rank:
        whole_stage.register_comm_hook(None, lambda state, bucket: None)
    refused(lambda: Pipeline({rank: whole_stage}, group=mesh["pp"], **options), "rank 1", "communication hook")


class Projection(nn.Module):
    """A block with a square weight that another stage may share."""

    def __init__(self):
        super().__init__()
        self.project, self.block = nn.Linear(16, 16, bias=False), Block()

    def forward(self, x):
        return self.block(self.project(x))


def tied():
    """One weight on the first and the last rank, whole or sharded by FSDP; gradients accumulate over two steps."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of("dp", "pp")
    both, (x, y) = replicas_data(mesh)
    for shards in (False, True):
        modules = blocks(2, make=Projection)
        own = own_copies(modules, [mesh["pp"].get_local_rank()])
        modules[1].project.weight = modules[0].project.weight  # the value of the first stage counts
        if shards:
            for stage in own.values():
                fully_shard(stage, mesh=mesh["dp"])
        pipe = Pipeline(
            own, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2],), group=mesh["pp"],
            data_group=None if shards else mesh["dp"], tied=[{0: "project.weight", 1: "project.weight"}],
        )  # fmt: skip
        for _ in range(2):
            pipe.step(x, target=y)
        replicas_reference(modules, both)
        for weight in weights_of(modules):
            weight.grad.mul_(2)
        worst = furthest(own, modules)
        assert worst < BOUND, worst
        norm = pipe.clip_grad_norm_(0.05)
        reference = torch.nn.utils.clip_grad_norm_(weights_of(modules), 0.05)
        torch.testing.assert_close(norm, reference, rtol=1e-6, atol=0)
        pipe.close()
        say("tied", shards=shards, worst=worst)
    number = mesh["pp"].get_local_rank()
    refused(
        lambda: Pipeline(
            {number: nn.Linear(16, 16 + 16 * number)}, num_micro_batches=4, loss_fn=F.mse_loss, example=(x[:2],),
            group=mesh["pp"], tied=[{0: "weight", 1: "weight"}],
        ),
        "float32[16, 16] on rank 0", "float32[32, 16] on rank 1",
    )  # fmt: skip


def hybrid():
    """HSDP on a pipeline of one rank with two stages: sharded over two ranks and replicated over two."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "replicate", "shard"))
    all_data = [batch(ROWS, 3, 16, seed=rank) for rank in range(4)]
    x, y = all_data[dist.get_rank()]
    modules = blocks(2)
    own = own_copies(modules, range(2))
    for stage in own.values():
        fully_shard(stage, mesh=mesh["replicate", "shard"])
    pipe = Pipeline(
        own, schedule="interleaved", num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2],),
        group=mesh["pp"],
    )  # fmt: skip
    assert pipe.plan.lowered.spec.topology.dp == 4
    total = [torch.zeros_like(weight) for weight in weights_of(modules)]
    for data in all_data:
        reference_step(modules, *data, NUM_MICRO_BATCHES)
        for part, weight in zip(total, weights_of(modules), strict=True):
            part.add_(weight.grad, alpha=0.25)
    for part, weight in zip(total, weights_of(modules), strict=True):
        weight.grad = part
    with Collectives() as debug:
        pipe.step(x, target=y)
    worst = furthest(own, modules)
    assert worst < BOUND, worst
    assert debug.counts == {"allgather": 2, "reduce_scatter": 2, "allreduce": 2}, debug.counts
    pipe.close()
    say("hybrid", worst=worst)


class Branches(nn.Module):
    """Two branches; the sign of the data selects one. Each forward changes a buffer."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        used = self.branches[int(x.sum() > 0)]
        return self.norm((x + used(x)).flatten(0, 1)).view_as(x)


def unused():
    """A weight that one replica uses gets the mean with zero; one that none uses keeps no gradient."""
    from torch.nn.parallel import DistributedDataParallel

    mesh = mesh_of("dp", "pp")
    x, y = batch(ROWS, 3, 16)
    x = x.abs() if mesh["dp"].get_local_rank() else -x.abs()
    torch.manual_seed(3)
    stages = [Branches(), nn.Linear(16, 16)]
    number = mesh["pp"].get_local_rank()
    module = DistributedDataParallel(stages[number], process_group=mesh["dp"].get_group())
    pipe = Pipeline(
        {number: module}, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(x[:2].abs(),),
        group=mesh["pp"],
    )  # fmt: skip
    pipe.step(x, target=y)
    if number == 0:
        first, second, third = stages[0].branches
        assert first.weight.grad.any()
        assert second.weight.grad.any()
        assert third.weight.grad is None
        means = [torch.empty(16) for _ in range(2)]
        pipe.step(x, target=y)  # begins with the buffers of the first replica
        dist.all_gather(means, stages[0].norm.running_mean, group=mesh["dp"].get_group())
        assert not torch.equal(*means)
    else:
        pipe.step(x, target=y)
    pipe.close()
    say("unused")


def tensor_parallel():
    """DTensor weights inside a stage, plain tensors between stages, with both splits."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of("pp", "tp")
    x, y = batch(ROWS, 3, 16)
    numbers = stages_of_rank("zb_v", 2, 4, mesh["pp"].get_local_rank())
    options = {
        "schedule": "zb_v", "num_micro_batches": NUM_MICRO_BATCHES, "loss_fn": F.mse_loss, "example": (x[:2],),
        "group": mesh["pp"],
    }  # fmt: skip
    for split in ("whole", "linear"):
        modules = blocks(4)
        own = own_copies(modules, numbers)
        for stage in own.values():
            parallelize_module(stage, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        pipe = Pipeline(own, split=split, **options)
        topology = pipe.plan.lowered.spec.topology
        assert (topology.pp, topology.tp, topology.dp) == (2, 1, 1)
        optimizer = torch.optim.SGD([w for stage in own.values() for w in stage.parameters()], lr=0.1)
        for _ in range(2):
            reference_step(modules, x, y, NUM_MICRO_BATCHES)
            pipe.step(x, target=y)
            assert all(isinstance(stage.up.weight.grad, DTensor) for stage in own.values())
            worst = furthest(own, modules)
            assert worst < BOUND, worst
            norm = pipe.clip_grad_norm_(0.05)
            reference = torch.nn.utils.clip_grad_norm_(weights_of(modules), 0.05)
            torch.testing.assert_close(norm, reference, rtol=1e-6, atol=0)
            with torch.no_grad():
                for module in modules:
                    for weight in module.parameters():
                        weight.sub_(weight.grad, alpha=0.1)
            optimizer.step()
            clear(own)
        if split == "linear":
            overflow(pipe, own, x, y, mesh)
        pipe.close()
        say("tensor_parallel", split=split, worst=worst)
    own = {
        n: parallelize_module(nn.Linear(16, 16), mesh["tp"], ColwiseParallel(use_local_output=False)) for n in numbers
    }
    text = refused(lambda: Pipeline(own, **options), "stage 0 returns a DTensor", "use_local_output=True")
    say("tensor_parallel", refused=text)


def overflow(pipe, own, x, y, mesh):
    """An overflow in the shard of one of four ranks is one on all."""
    if dist.get_rank() == 3:
        weight = next(iter(own.values())).up.weight
        weight.register_hook(lambda grad: grad * float("inf"))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weights = [w for stage in own.values() for w in stage.parameters()]
    optimizers = [  # PyTorch's scaler does not take both kinds in one
        torch.optim.SGD([w for w in weights if hasattr(w, "placements") == is_distributed], lr=0.1)
        for is_distributed in (True, False)
    ]
    before = [whole(w).clone() for w in weights]
    pipe.step(x, target=y, scaler=scaler)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(whole(a), whole(w)) for a, w in zip(before, weights, strict=True))


class Exchange(torch.autograd.Function):
    """``all_to_all_single`` with its gradient."""

    @staticmethod
    def forward(ctx, x, receive, send, group):
        ctx.splits = receive, send, group
        out = x.new_empty((sum(receive), *x.shape[1:]))
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        receive, send, group = ctx.splits
        return Exchange.apply(gradient, send, receive, group), None, None, None


class Experts(nn.Module):
    """Top-1 experts, one on each rank of ``group``, or all here without one."""

    def __init__(self, group=None, rank=None):
        super().__init__()
        self.group, self.router = group, nn.Linear(16, 2)
        self.experts = nn.ModuleDict({str(n): nn.Linear(16, 16) for n in range(2) if rank is None or n == rank})

    def forward(self, x):
        tokens = x.reshape(-1, 16)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        send = torch.bincount(chosen, minlength=2)
        if self.group is None:
            parts = tokens[order].split(send.tolist())
            out = torch.cat([self.experts[str(n)](part) for n, part in enumerate(parts)])
        else:
            receive = torch.empty_like(send)
            dist.all_to_all_single(receive, send, group=self.group)
            send, receive = send.tolist(), receive.tolist()
            (expert,) = self.experts.values()
            out = Exchange.apply(
                expert(Exchange.apply(tokens[order], receive, send, self.group)), send, receive, self.group
            )
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return x + (out[back] * weights[:, None]).view_as(x)


def experts():
    """Modules that exchange tokens over their own group; dense weights are averaged, experts get all gradients."""
    from torch.nn.parallel import DistributedDataParallel

    mesh = mesh_of("pp", "ep")
    group, rank = mesh["ep"].get_group(), mesh["ep"].get_local_rank()
    both = [batch(ROWS, 3, 16, seed=ep) for ep in range(2)]
    x, y = both[rank]
    modules = blocks(4, make=Experts)
    own = {}
    for number in stages_of_rank("zb_v", 2, 4, mesh["pp"].get_local_rank()):
        own[number] = Experts(group, rank)
        own[number].load_state_dict(
            {n: w for n, w in modules[number].state_dict().items() if n in own[number].state_dict()}
        )
        names = [name for name, _ in own[number].named_parameters() if name.startswith("experts.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(own[number], names)
    for split in ("whole", "linear"):
        pipe = Pipeline(
            own, schedule="zb_v", num_micro_batches=NUM_MICRO_BATCHES, loss_fn=F.mse_loss, example=(both[0][0][:2],),
            group=mesh["pp"], data_group=mesh["ep"], split=split,
        )  # fmt: skip
        for _ in range(2):
            replicas_reference(modules, both)
            pipe.step(x, target=y)
            for number, stage in own.items():
                for weight in stage.experts.parameters():
                    weight.grad.div_(2)  # of the mean over both
                for module in list(modules[number].experts):
                    if module != str(rank):
                        del modules[number].experts[module]
            worst = furthest(own, modules)
            assert worst < BOUND, worst
            clear(own)
            modules = blocks(4, make=Experts)
        pipe.close()
        say("experts", split=split, worst=worst)


CASES = {
    "fsdp": fsdp, "resharded": resharded, "replicas": replicas, "tied": tied, "hybrid": hybrid, "unused": unused,
    "tensor_parallel": tensor_parallel, "experts": experts,
}  # fmt: skip

if __name__ == "__main__":
    main(CASES)
