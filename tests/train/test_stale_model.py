"""The model that stages were cut from, on a rank that trains some of them: its old weights are not saved."""

import copy
import io

import pytest
import torch
from torch import nn

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.model_stages import StaleModel, stages_of_sequential

pytestmark = pytest.mark.needs_torch


def model_and_guard(*own, is_stale=True):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    stages = stages_of_sequential(model, 2)
    guard = StaleModel({number: stages[number] for number in own}, 2)
    guard.is_stale = is_stale
    return model, stages, guard


def test_old_weights_are_refused_and_the_message_names_what_saves_them():
    model, stages, _ = model_and_guard(0)
    pattern = r"stages \[0\] on this rank, and stages \[1\] on other ranks.*save_dcp\(directory, pipe\.stages\)"
    for work in (model.state_dict, model[2].state_dict, stages[1].state_dict, lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(PipelineError, match=pattern):
            work()


def test_weights_of_this_rank_are_not_refused():
    model, stages, _ = model_and_guard(1)
    assert list(stages[1].state_dict()) == ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert list(model[3].state_dict()) == ["weight", "bias"]
    assert len(list(copy.deepcopy(model).parameters())) == 8


@pytest.mark.parametrize(("own", "is_stale"), [((0, 1), True), ((0,), False)])
def test_a_model_whose_weights_are_current_is_not_refused(own, is_stale):
    model, _, _ = model_and_guard(*own, is_stale=is_stale)
    assert len(model.state_dict()) == 8
    torch.save(model, io.BytesIO())


def test_a_state_that_is_loaded_is_current():
    model, _, guard = model_and_guard(0)
    model.load_state_dict(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))).state_dict())
    assert len(model.state_dict()) == 8
    guard.is_stale = True  # the next step
    with pytest.raises(PipelineError):
        model.state_dict()


def test_a_model_that_is_gone_needs_no_guard():
    stages = stages_of_sequential(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), 2)
    StaleModel({0: stages[0]}, 2).is_stale = True
    assert len(stages[1].state_dict()) == 4
