"""Stages of an ``nn.Sequential``, in one process, against the whole."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from pipeproof.exec.train.torch.model_stages import stages_of_sequential

pytestmark = pytest.mark.needs_torch


def mlp(num=5):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num)))


def chain(stages, value):
    for stage in stages.values():
        if isinstance(value, dict):
            value = stage(**value)
        else:
            value = stage(*value) if isinstance(value, tuple) else stage(value)
    return value


@pytest.mark.parametrize(
    ("num_stages", "sizes", "expected"),
    [(1, None, [5]), (2, None, [3, 2]), (4, None, [2, 1, 1, 1]), (2, [1, 4], [1, 4])],
)
def test_stages_give_the_bits_and_names_of_the_whole(num_stages, sizes, expected):
    whole = mlp()
    stages = stages_of_sequential(whole, num_stages, sizes=sizes)
    assert [len(list(stage.children())) for stage in stages.values()] == expected
    values = torch.randn(3, 4)
    assert torch.equal(chain(stages, values), whole(values))
    weights = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    assert weights.keys() == whole.state_dict().keys()
    assert all(parameter is weights[name] for name, parameter in whole.named_parameters())
    assert stages.tied == ()


class Split(nn.Module):
    def forward(self, value):
        return value, value + 1


class Join(nn.Module):
    def forward(self, pair):
        left, right = pair
        return {"left": left, "right": right}


class Sum(nn.Module):
    def forward(self, named):
        return named["left"] * named["right"]


def test_tuples_and_dicts_cross_as_arguments():
    whole = nn.Sequential(OrderedDict(split=Split(), join=Join(), sum=Sum()))
    values = torch.arange(3.0)
    for num_stages in (1, 2, 3):
        assert torch.equal(chain(stages_of_sequential(whole, num_stages), values), whole(values))
    with pytest.raises(TypeError, match=r"one input, found 1 and the keyword arguments \['mask'\]"):
        stages_of_sequential(whole, 3)[0](values, mask=values)


def test_a_repeated_module_is_tied():
    first = nn.Linear(4, 4)
    whole = nn.Sequential(first, nn.ReLU(), first, nn.Linear(4, 4), first)
    stages = stages_of_sequential(whole, 2, sizes=[3, 2])
    assert stages.tied == ({0: "0.weight", 1: "4.weight"}, {0: "0.bias", 1: "4.bias"})
    values = torch.randn(3, 4)
    assert torch.equal(chain(stages, values), whole(values))


def test_a_stage_is_in_the_mode_of_the_whole():
    assert not stages_of_sequential(mlp().eval(), 2)[1].training


class Other(nn.Sequential):
    def forward(self, value):
        return value


@pytest.mark.parametrize(
    ("whole", "num_stages", "sizes", "expected"),
    [
        (mlp(), 6, None, "from 1 to 5"),
        (mlp(), 0, None, "from 1 to 5"),
        (mlp(), 2, [5, 0], "leaves stage 1 0"),
        (mlp(), 2, [5], "has 1 sizes, and num_stages is 2"),
        (mlp(), 2, [2, 2], "adds up to 4"),
        (nn.Linear(2, 2), 1, None, "Linear is not an nn.Sequential"),
        (Other(nn.Linear(2, 2)), 1, None, "Other is not an nn.Sequential with the forward of nn.Sequential"),
        (nn.Sequential(*[nn.BatchNorm1d(4)] * 2), 2, None, "buffer 0.running_mean of stage 0 is also 1.running_mean"),
    ],
)
def test_bad_inputs_are_refused(whole, num_stages, sizes, expected):
    with pytest.raises(ValueError, match=expected):
        stages_of_sequential(whole, num_stages, sizes=sizes)
