"""Losses that are divided by the labels of a whole step, arguments of a loss function, and metrics."""

import pytest
import torch

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.step_loss import StepTerms, detached_metrics, loss_terms
from tests.train.launch import launch
from tests.train.test_compositions import require_done

pytestmark = pytest.mark.needs_torch


@pytest.fixture(scope="module")
def ran():
    return launch("losses.py", 2, timeout=600)


@pytest.mark.parametrize("case", ["metrics", "data_ranks", "refusals"])
def test_gradients_are_those_of_a_sum_over_all_micro_batches_divided_by_its_count(ran, case):
    require_done(ran, 2, case)


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("case", ["shares", "means"])
def test_a_causal_lm_divides_by_the_labels_of_the_whole_step_as_transformers_does(ran, case):
    require_done(ran, 2, case)


def test_metrics_keep_no_graph():
    weight = torch.ones(2, requires_grad=True)
    loss, metrics = detached_metrics((weight.sum(), {"parts": weight * 2}))
    assert loss.requires_grad
    assert not metrics["parts"].requires_grad


def test_other_metrics_of_another_micro_batch_are_refused():
    terms = StepTerms()
    terms.add(0, loss_terms((torch.tensor(1.0), {"a": torch.ones(1)}), "loss_fn"), "loss_fn")
    with pytest.raises(PipelineError, match=r"\['b'\].*\['a'\]"):
        terms.add(1, loss_terms((torch.tensor(1.0), {"b": torch.ones(1)}), "loss_fn"), "loss_fn")
