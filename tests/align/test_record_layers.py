"""Recording of programs: the recorded tensors; nothing of the recorder remains."""

import json

import pytest
import torch
from torch import nn

import pipeproof.torch
from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.analysis.align.read_record import open_record
from tests.docs.test_schemas import require_fit

pytestmark = pytest.mark.needs_torch
record_layers = pipeproof.torch.record_layers


class Net(nn.Module):
    def __init__(self, checkpoint=None):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)
        self.checkpoint = checkpoint

    def forward(self, x):
        if self.checkpoint is None:
            return self.down(self.act(self.up(x)))
        inner = lambda x: self.act(self.up(x))  # noqa: E731
        return self.down(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=self.checkpoint))


def net(**how):
    torch.manual_seed(0)
    return Net(**how)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)


def steps_of(directory):
    record = open_record(directory)
    return list(record.steps())


def titles(step):
    return [tensor.title for tensor in step.tensors]


def test_a_plain_loop_is_recorded_and_nothing_remains(tmp_path):
    model, plain = net(), net()
    before = torch.autograd.backward
    with record_layers(model, tmp_path / "a", names=["up*"]):
        model(X).square().sum().backward()
    assert torch.autograd.backward is before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    plain(X).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model(X).sum().backward()  # not recorded
    (step,) = steps_of(tmp_path / "a")
    assert titles(step) == [
        "whole, forward input, micro-batch 0", "up, forward input, micro-batch 0", "up, forward output, micro-batch 0",
        "act, forward input, micro-batch 0", "act, forward output, micro-batch 0", "down, forward input, micro-batch 0",
        "down, forward output, micro-batch 0", "whole, forward output, micro-batch 0",
        "whole, backward input, micro-batch 0", "down, backward input, micro-batch 0",
        "down, backward output, micro-batch 0", "act, backward input, micro-batch 0",
        "act, backward output, micro-batch 0", "up, backward input, micro-batch 0",
        "up, backward output, micro-batch 0", "whole, backward output, micro-batch 0",
        "gradient of down.bias", "gradient of down.weight", "gradient of up.bias", "gradient of up.weight",
    ]  # fmt: skip
    record = open_record(tmp_path / "a")
    by_title = {tensor.title: record.values(tensor) for tensor in step.tensors}
    weight = model.up.weight.grad
    assert by_title["gradient of up.weight"].whole.shape == (8, 4)
    assert weight is not None
    assert by_title["gradient of down.bias"] is None  # only names that match
    for line in (tmp_path / "a" / "record.rank0.jsonl").read_text().splitlines():
        require_fit("record", json.loads(line))


def test_steps_end_where_an_optimizer_steps_or_the_program_says_so(tmp_path):
    model = net()
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()]
    with record_layers(model, tmp_path / "a") as end_step:
        for _ in range(2):
            for _ in range(3):
                model(X).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        model(X).sum().backward()
        end_step()
        end_step()
    steps = steps_of(tmp_path / "a")
    assert [max(t.micro_batch for t in step.tensors) for step in steps] == [2, 2, 0]
    assert [len(step.others) for step in steps] == [3, 3, 0]
    assert float(steps[0].loss) == pytest.approx(sum(float(one.loss) for one in steps[0].others))


def test_only_chosen_ranks_record(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    for ranks, exists in (([0, 1], False), ([3], True)):
        with record_layers(net(), tmp_path / "a", ranks=ranks) as end_step:
            end_step()
        assert (tmp_path / "a" / "record.rank3.jsonl").exists() is exists


def test_small_tensors_are_kept_by_size(tmp_path):
    model = net()
    with record_layers(model, tmp_path / "a", largest=4 * 3 * 4):
        model(X).sum().backward()
    record = open_record(tmp_path / "a")
    kept = {t.title: record.values(t) is not None for t in steps_of(tmp_path / "a")[0].tensors}
    assert kept["up, forward input, micro-batch 0"]
    assert not kept["up, forward output, micro-batch 0"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_is_the_same_micro_batch(tmp_path, reentrant):
    for name, how in (("plain", {}), ("again", {"checkpoint": reentrant})):
        model = net(**how)
        with record_layers(model, tmp_path / name, names=["*"]):
            for _ in range(2):
                model(X).square().sum().backward()
    found = align(tmp_path / "again", tmp_path / "plain", Tolerance())
    assert found.equal, found.tensors.example


def test_a_change_in_place_is_seen(tmp_path):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

        def forward(self, x):
            return self.act(self.up(x))

    with record_layers(InPlace(), tmp_path / "a"):
        pass
    model = InPlace()
    with record_layers(model, tmp_path / "b"):
        model(X).sum().backward()
    (step,) = steps_of(tmp_path / "b")
    digests = {t.title: t.md5 for t in step.tensors}
    assert digests["up, forward output, micro-batch 0"] == digests["act, forward input, micro-batch 0"]
    assert digests["act, forward output, micro-batch 0"] != digests["act, forward input, micro-batch 0"]
    assert len(list(steps_of(tmp_path / "a"))) == 0


def test_sixteen_bit_types_and_integers(tmp_path):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)).bfloat16()
    with record_layers(model, tmp_path / "a", names=["*"]):
        model(torch.tensor([[1, 2]])).sum().backward()
    record = open_record(tmp_path / "a")
    (step,) = record.steps()
    types = {t.title: (t.dtype, record.values(t).whole.dtype.name) for t in step.tensors}
    assert types["0, forward input, micro-batch 0"] == ("int64", "int64")
    assert types["1, forward output, micro-batch 0"] == ("bfloat16", "float32")
    assert align(tmp_path / "a", tmp_path / "a", Tolerance(rounding=True)).equal


LEGACY = {
    "sum": {"size_average": False},
    "sum of all": {"reduce": False},
    "mean": {"size_average": True},
}


@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize("kept", [["*"], []])
@pytest.mark.parametrize("name", LEGACY)
def test_former_arguments_of_a_loss_are_named(tmp_path, name, kept):
    x, model = torch.randn(40, 4, generator=torch.Generator().manual_seed(1)), net()
    for directory, how in (("a", LEGACY[name]), ("b", {})):
        with record_layers(model, tmp_path / directory, names=kept):
            nn.functional.mse_loss(model(x), x, **how).sum().backward()
        model.zero_grad()
    found = align(tmp_path / "a", tmp_path / "b", Tolerance(rounding=True))
    assert found.equal == (name == "mean")
    if not found.equal:
        first = found.tensors.first
        assert (first.a.title, first.cause.family) == ("whole, backward input, micro-batch 0", "scale")
        assert "160 of B's" in first.cause.evidence
        assert "has 160 elements along some dims: a loss may be their mean" in first.cause.evidence


def test_an_exception_leaves_no_half_step(tmp_path):
    model = net()
    with pytest.raises(RuntimeError, match="shapes"), record_layers(model, tmp_path / "a"):
        model(torch.cat((X, model(X)), 1))
    assert steps_of(tmp_path / "a") == []
    assert not model._forward_hooks


def test_stages_of_a_cut_have_the_names_of_the_model(tmp_path):
    def blocks():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    whole = blocks()
    with record_layers(whole, tmp_path / "whole", names=["*"]):
        whole(X).sum().backward()
    stages = pipeproof.torch.stages_of_sequential(blocks(), 2)
    with record_layers(stages, tmp_path / "stages", names=["*"]):
        stages[1](stages[0](X)).sum().backward()
    found = align(tmp_path / "stages", tmp_path / "whole", Tolerance())
    assert found.tensors.num_differing == found.tensors.only_a == 0
    assert found.tensors.only_b == 4  # the model itself: input, output, and their gradients


def test_parts_of_a_dtensor_have_their_places(tmp_path):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from pipeproof.exec.train.torch.record_layers import TorchTensors

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for placement in (Shard(1), Replicate()):
            tensor = distribute_tensor(torch.ones(2, 3), mesh, [placement])
            assert TorchTensors().layout_of(tensor, nn.Identity(), "output") == ((2, 3), (((0, 2), (0, 3)),))
            assert TorchTensors().to_numpy(tensor)[0].shape == (2, 3)
    finally:
        dist.destroy_process_group()
