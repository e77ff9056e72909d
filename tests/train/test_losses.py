"""Losses that are divided by the labels of a whole step, arguments of a loss function, and metrics."""

import pytest
import torch
from torch import nn

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.step_loss import (
    StepTerms,
    detached_metrics,
    divide_gradients,
    earlier_aside,
    loss_terms,
)

pytestmark = pytest.mark.needs_torch


def test_a_loss_function_returns_a_scalar_with_or_without_a_count_and_metrics():
    loss, top = torch.tensor(3.0, requires_grad=True), torch.tensor([1.0])
    assert loss_terms(loss, "micro_batches", "loss_fn") == (loss, None, {})
    assert loss_terms((loss, {"top": top}), "micro_batches", "loss_fn") == (loss, None, {"top": top})
    for count in (4, 4.0, torch.tensor(4), torch.tensor(4.0)):
        terms = loss_terms((loss, count, {"top": top}), "tokens", "loss_fn")
        assert terms == (loss, torch.tensor(4.0, dtype=torch.float64), {"top": top})
        assert terms.num_tokens.dtype == torch.float64


def test_metrics_keep_no_graph():
    weight = torch.ones(2, requires_grad=True)
    loss, metrics = detached_metrics((weight.sum(), {"parts": weight * 2}))
    assert loss.requires_grad
    assert not metrics["parts"].requires_grad


def test_other_metrics_of_another_micro_batch_are_refused():
    terms = StepTerms()
    terms.add(0, loss_terms((torch.tensor(1.0), {"a": torch.ones(1)}), "micro_batches", "loss_fn"), "loss_fn")
    with pytest.raises(PipelineError, match=r"\['b'\].*\['a'\]"):
        terms.add(1, loss_terms((torch.tensor(1.0), {"b": torch.ones(1)}), "micro_batches", "loss_fn"), "loss_fn")


@pytest.mark.parametrize(("dtype", "count"), [(torch.float16, 70_001), (torch.bfloat16, 4099), (torch.float32, 9)])
def test_a_count_that_is_too_large_for_the_type_of_the_gradients_divides_them(dtype, count):
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    weight.grad = torch.tensor([3e4, -1.0, 7.5], dtype=dtype)
    expected = (weight.grad.double() / count).to(dtype)
    divide_gradients([weight, nn.Parameter(torch.ones(1))], torch.tensor(count, dtype=torch.float64))
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("copies", [False, True])
def test_gradients_of_earlier_steps_are_added_back_or_put_back_if_the_step_fails(copies):
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    first.grad, second.grad = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    memory = first.grad
    with earlier_aside([first, second, third], copies=copies):
        assert first.grad is None
        if copies:
            memory.zero_()  # as a replay does with the memory of its gradients
        first.grad, third.grad = torch.ones(2), torch.ones(2)
    assert [weight.grad.tolist() for weight in (first, second, third)] == [[2.0, 3.0], [3.0, 4.0], [1.0, 1.0]]

    def fail():
        first.grad = torch.full((2,), 9.0)
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"), earlier_aside([first, second, third], copies=copies):
        fail()
    assert [weight.grad.tolist() for weight in (first, second, third)] == [[2.0, 3.0], [3.0, 4.0], [1.0, 1.0]]
