"""The runtime on recorded ranks: its gradients, and its order by the rules."""

from contextlib import nullcontext

import numpy as np
import pytest
import recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime import train_step

from pipeproof import check_program
from pipeproof.testing import backend_table

WIDTH = 3


def weights(num_stages):
    rng = np.random.default_rng(7)
    return [rng.normal(size=(WIDTH, WIDTH)) for _ in range(num_stages)]


def batches(number):
    rng = np.random.default_rng(11)
    return [rng.normal(size=(2, WIDTH)) for _ in range(number)]


def program(num_stages, num_batches):
    """Return the runtime as a program of one rank."""
    return lambda comm: train_step(comm, weights(num_stages)[comm.rank], batches(num_batches))


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


sizes = given(st.integers(1, 4), st.integers(1, 6))


@settings(deadline=None, max_examples=20)
@sizes
def test_gradients_are_those_of_one_process(num_stages, num_batches):
    gradients, _ = recorded.run(num_stages, program(num_stages, num_batches))
    assert [one.tobytes() for one in gradients] == [one.tobytes() for one in reference(num_stages, num_batches)]


@pytest.mark.parametrize("backend", [("paddle", "cpu"), ("paddle", "gpu"), ("torch", "cpu"), ("torch", "gpu")])
def test_no_backend_makes_our_order_hang(backend):
    _, text = recorded.run(4, program(4, 6))
    assert check_program(text, backend=backend_table(*backend)).errors == ()


def test_why_there_is_a_batch_in_the_runtime(monkeypatch):
    """Sends and receives one by one, each send waited for immediately."""
    issue = recorded.RecordedRank.isend

    def isend(comm, value, to, name):
        handle = issue(comm, value, to, name)
        handle.wait()
        return handle

    monkeypatch.setattr(recorded.RecordedRank, "batch", lambda _: nullcontext())
    monkeypatch.setattr(recorded.RecordedRank, "isend", isend)
    _, text = recorded.run(2, program(2, 3))
    (finding,) = check_program(text).errors
    assert finding.code == "PP401"
    assert {"0SEND_F1", "1SEND_B0"} <= {op.op for op in finding.witness.ops}
