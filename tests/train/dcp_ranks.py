"""A small model in several cuts, trained by real processes over gloo. ``test_dcp_state`` starts them and reads the
results."""

import hashlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS, NUM_LAYERS = 8, 11, 4


class Layer(nn.Module):
    """A layer with buffers that training changes, an integer among them."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 12), nn.BatchNorm1d(12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.norm(self.up(x))))


class Stage(nn.Module):
    """Some layers under their names in the whole model; the first stage has the embedding, the last one the head."""

    def __init__(self, layers, *, first=False, last=False):
        super().__init__()
        if first:
            self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(number): Layer() for number in layers})
        if last:
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        x = self.embed(x) if hasattr(self, "embed") else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def stages_of(cut, numbers, seed=0):
    """The stages ``numbers`` of a model that was cut; a weight's first value depends on its name."""
    made = {number: Stage(cut[number], first=number == 0, last=number == len(cut) - 1) for number in sorted(numbers)}
    for stage in made.values():
        for name, parameter in stage.named_parameters():
            name = "embed.weight" if name == "head.weight" else name
            draw = torch.Generator().manual_seed(int(hashlib.md5(f"{name} {seed}".encode()).hexdigest()[:8], 16))
            parameter.data = torch.randn(parameter.shape, generator=draw) / 4
    if 0 in made and len(cut) - 1 in made:  # one Parameter
        made[len(cut) - 1].head.weight = made[0].embed.weight
    return made


def tied_of(cut):
    return [{0: "embed.weight", len(cut) - 1: "head.weight"}]


def optimizer_of(stages, lr=0.01):
    parameters = list({id(p): p for stage in stages.values() for p in stage.parameters()}.values())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=(0.8, 0.95))


def md5(tensor):
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return hashlib.md5(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def digests_of(stages, optimizer):
    """MD5 of everything by its name in the checkpoint; of hyperparameters their text."""
    names, found = {}, {}
    for number in sorted(stages):
        for name, value in stages[number].state_dict(keep_vars=True).items():
            name = "embed.weight" if name == "head.weight" else name
            found[name] = md5(value)
            names[id(value)] = name
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for slot, value in optimizer.state.get(parameter, {}).items():
                found[f"optimizer.state.{names[id(parameter)]}.{slot}"] = md5(value)
            found[f"lr {names[id(parameter)]}"] = repr([group["lr"], group["betas"], group["weight_decay"]])
    return found


def train(stages, optimizer, owners, steps, group):
    """Train some steps: each stage in order, activations and their gradients from rank to rank."""
    rank, last = dist.get_rank(), len(owners) - 1
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        words, target = (torch.randint(WORDS, (16,), generator=draw) for _ in range(2))
        inputs, outputs = {}, {}
        for number, owner in enumerate(owners):
            if owner == rank:
                x = words if number == 0 else _moved(outputs.get(number - 1), owners[number - 1], rank)
                inputs[number] = x if number == 0 else x.detach().requires_grad_()
                outputs[number] = stages[number](inputs[number])
                if number == last:
                    outputs[number] = F.cross_entropy(outputs[number], target)
                elif owners[number + 1] != rank:
                    dist.send(outputs[number].detach(), owners[number + 1])
        for number in reversed(range(len(owners))):
            if owners[number] == rank:
                if number == last:
                    outputs[number].backward()
                else:
                    at_next = inputs.get(number + 1)
                    gradient = None if at_next is None else at_next.grad
                    outputs[number].backward(_moved(gradient, owners[number + 1], rank))
                if number and owners[number - 1] != rank:
                    dist.send(inputs[number].grad, owners[number - 1])
        if owners[0] != owners[-1]:
            for number, name in ((0, "embed.weight"), (last, "head.weight")):
                if owners[number] == rank:
                    weight = stages[number].get_parameter(name)
                    other = owners[last] if number == 0 else owners[0]
                    theirs = torch.empty_like(weight.grad)
                    work = dist.isend(weight.grad.clone(), other)
                    dist.recv(theirs, other)
                    work.wait()
                    weight.grad += theirs
        optimizer.step()
        optimizer.zero_grad()


def _moved(value, owner, rank):
    if owner == rank:
        return value
    received = torch.empty(16, WIDTH)
    dist.recv(received, owner)
    return received


def main(directory, rank):
    from pipeproof.exec.train.torch.dcp_state import load_dcp, save_dcp

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=3)
    groups = [dist.new_group([0]), dist.new_group([0, 1]), None]
    said = {}

    # four stages on two ranks
    cut, owners = [[0], [1, 2], [3], []], [0, 0, 1, 1]
    if rank < 2:
        stages = stages_of(cut, [number for number, owner in enumerate(owners) if owner == rank])
        optimizer = optimizer_of(stages)
        train(stages, optimizer, owners, range(3), groups[1])
        optimizer.param_groups[0]["lr"] = 0.005  # as a schedule does
        torch.manual_seed(rank + 5)
        said["at save"] = digests_of(stages, optimizer)
        extra = {"step": 3, "data_position": 96, "sampler": {"order": [3, 1], "empty": {}}, "scale": torch.ones(2)}
        save_dcp(directory / "two", stages, optimizer, extra=extra, tied=tied_of(cut), group=groups[1])
        said["drawn"] = torch.rand(4).tolist()
        train(stages, optimizer, owners, range(3, 5), groups[1])
        said["after two more steps"] = digests_of(stages, optimizer)
        again = stages_of(cut, stages, seed=1)
        resumed = optimizer_of(again, lr=1.0)
        loaded = load_dcp(directory / "two", again, resumed, tied=tied_of(cut), group=groups[1])
        said["same topology"] = digests_of(again, resumed)
        said["rng restored"], said["drawn again"] = loaded["rng_restored"], torch.rand(4).tolist()

    # two stages on one rank
    if rank == 0:
        cut = [[0, 1, 2], [3]]
        stages = stages_of(cut, [0, 1], seed=2)
        optimizer = optimizer_of(stages, lr=1.0)
        loaded = load_dcp(directory / "two", stages, [optimizer], group=groups[0])
        loaded["scale"] = loaded["scale"].tolist()
        said["on one"], said["loaded on one"] = digests_of(stages, optimizer), loaded
        save_dcp(directory / "one", stages, optimizer, extra={"step": 3}, group=groups[0])
        train(stages, optimizer, [0, 0], range(3, 5), groups[0])
        said["on one, after"] = digests_of(stages, optimizer)
    dist.barrier()

    # six stages on three ranks, in a V
    cut, owners = [[], [0], [1], [2], [3], []], [0, 1, 2, 2, 1, 0]
    mine = [number for number, owner in enumerate(owners) if owner == rank]
    stages = stages_of(cut, mine, seed=3)
    optimizer = optimizer_of(stages, lr=1.0)
    load_dcp(directory / "one", stages, optimizer, tied=tied_of(cut))
    said["on three"] = digests_of(stages, optimizer)
    save_dcp(directory / "three", stages, optimizer, tied=tied_of(cut))
    train(stages, optimizer, owners, range(3, 5), groups[2])
    said["on three, after"] = digests_of(stages, optimizer)

    # an error of one rank is an error of all: rank 2 has another shape
    if rank == 2:
        stages[2].layers["1"].up = nn.Linear(WIDTH, 13)
    said["refused"] = refusal(lambda: load_dcp(directory / "one", stages, tied=tied_of(cut)))
    said["unchanged"] = {n: md5(t) for s in stages.values() for n, t in s.named_parameters() if ".up" not in n} == {
        n: said["on three, after"]["embed.weight" if n == "head.weight" else n]
        for s in stages.values() for n, _ in s.named_parameters() if ".up" not in n
    }  # fmt: skip
    undeclared = stages_of([[0], [1], [0]], [rank])
    said["undeclared"] = refusal(lambda: save_dcp(directory / "no", undeclared))
    local = {rank: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))}
    said["not declared local"] = refusal(lambda: save_dcp(directory / "no", local, names="model"))
    replicas = {0: stages_of([[0]], [0])[0]}
    replicas[0].layers["0"].norm.running_mean += rank // 2
    said["buffers"] = refusal(lambda: save_dcp(directory / "no", replicas))

    # sharded parameters: FSDP over two ranks
    if rank < 2:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        cut = [[0, 1], [2, 3]]
        stages = stages_of(cut, [0, 1], seed=4)
        stages[1].head.weight = nn.Parameter(stages[1].head.weight.detach().clone())  # a copy in each stage
        mesh = DeviceMesh.from_group(groups[1], "cpu")
        for stage in stages.values():
            for layer in stage.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(stage, mesh=mesh)
        optimizer = optimizer_of(stages, lr=1.0)
        load_dcp(directory / "three", stages, optimizer, tied=tied_of(cut), group=groups[1])
        said["sharded"] = digests_of(stages, optimizer)
        said["is sharded"] = next(type(p).__name__ for p in stages[0].parameters())
        save_dcp(directory / "sharded", stages, optimizer, tied=tied_of(cut), group=groups[1])
    (directory / f"rank{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


def refusal(work):
    from pipeproof.diagnostics.finding import PipeproofError

    try:
        work()
    except PipeproofError as error:
        return f"{type(error).__name__} {error}"
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
