"""The runtime on simulated ranks: its gradients, its order, its time."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime import train_step

from pipeproof.testing import DeadlockError, FakeWorld, assert_same_gradients

WIDTH = 3


def weights(num_stages):
    rng = np.random.default_rng(7)
    return [rng.normal(size=(WIDTH, WIDTH)) for _ in range(num_stages)]


def batches(number):
    rng = np.random.default_rng(11)
    return [rng.normal(size=(2, WIDTH)) for _ in range(number)]


def program(num_stages, num_batches):
    """Return the runtime as a program of one rank."""
    return lambda rank: train_step(rank, weights(num_stages)[rank.rank], batches(num_batches))


def reference(num_stages, num_batches):
    """Return the same gradients from one process without a pipeline."""
    all_weights = weights(num_stages)
    gradients = [np.zeros_like(weight) for weight in all_weights]
    for x in batches(num_batches):
        values = [x]
        for weight in all_weights:
            values.append(np.tanh(values[-1] @ weight))
        gradient = values[-1]
        for stage in reversed(range(num_stages)):
            through_tanh = gradient * (1 - values[stage + 1] ** 2)
            gradients[stage] = gradients[stage] + values[stage].T @ through_tanh
            gradient = through_tanh @ all_weights[stage].T
    return gradients


def by_name(gradients):
    return {f"stage {stage}": gradient for stage, gradient in enumerate(gradients)}


sizes = given(st.integers(1, 4), st.integers(1, 6))


@settings(deadline=None, max_examples=20)
@sizes
def test_gradients_are_those_of_one_process(num_stages, num_batches):
    run = FakeWorld(num_stages).run(program(num_stages, num_batches))
    assert_same_gradients(by_name(run.values), by_name(reference(num_stages, num_batches)))


@settings(deadline=None, max_examples=20)
@sizes
def test_no_backend_makes_our_order_hang(num_stages, num_batches):
    assert FakeWorld(num_stages).failing_models(program(num_stages, num_batches)) == ()


def test_the_rules_find_nothing_in_what_the_runtime_issues(fake_world):
    assert fake_world(4).run(program(4, 6)).check().errors == ()


class WithoutBatches:
    """A rank that issues sends and receives one by one, and waits for each send immediately."""

    def __init__(self, rank):
        self._rank = rank

    def __getattr__(self, name):
        return getattr(self._rank, name)

    def batch(self):
        return nullcontext()

    def isend(self, value, to, name):
        handle = self._rank.isend(value, to, name=name)
        handle.wait()
        return handle


def test_why_there_is_a_batch_in_the_runtime():
    with pytest.raises(DeadlockError) as caught:
        FakeWorld(2).run(lambda rank: program(2, 3)(WithoutBatches(rank)))
    assert [op.op for op in caught.value.cycle] == ["0SEND_F1", "1SEND_B0"]


def test_a_step_of_two_stages_takes_its_messages_one_after_the_other():
    """4 micro-batches each way, 2 x 3 numbers of 8 bytes, over a link of 1 byte/us and 5 us."""
    slow = {"ranks_per_node": 2, "node": {"bandwidth": 0.001, "latency_us": 5}}
    assert FakeWorld(2, network=slow).run(program(2, 4)).makespan_us == 2 * 4 * (5 + 2 * 3 * 8)
