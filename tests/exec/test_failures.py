"""Failures of workers and values that are not finite: the texts of their findings."""

import re

import numpy as np
import pytest

from pipeproof.exec.compare.step_losses import NotFiniteError, require_finite
from pipeproof.exec.rank.failures import event_of, failure_from, is_out_of_memory, received_before
from pipeproof.exec.rank.job_files import StepOutcome
from tests.plans import subject

PP2 = subject()


class OutOfMemoryError(RuntimeError):
    """Called as PyTorch's is."""


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return failure_from(event_of(caught))


@pytest.mark.parametrize(
    ("error", "requested"),
    [
        (MemoryError("Unable to allocate 2.00 GiB for an array"), "it requested more"),
        (
            OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 .."),
            "it requested 20.00 GiB more",
        ),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes. Error .."
            ),
            "it requested 1.00 GiB more",
        ),
        (MemoryError("(ResourceExhausted) Fail to alloc memory of 536870912 size, .."), "it requested 512 MiB more"),
        (OSError(12, "Cannot allocate memory"), "it requested more"),
    ],
)
def test_out_of_memory_errors_of_all_allocators_are_recognized(error, requested):
    failure = raised(error)
    assert failure.code == "PP922"
    assert re.match(r"the process held [\d.]+ [MG]iB", failure.memory)
    assert failure.memory.endswith(requested)
    assert failure.text == f"ran out of memory: {failure.memory}"


def test_what_was_raised_for_it_is_looked_at_behind_an_error_of_ours():
    error = RuntimeError("a layer raised")
    error.__cause__ = MemoryError("no room")
    assert failure_from(event_of(error)).code == "PP922"


def test_other_errors_are_not_about_memory():
    failure = raised(ValueError("out of memory is a word here"))
    assert not is_out_of_memory(ValueError("out of memory"))
    assert failure.code == "PP902"
    assert failure.text == "raised: ValueError: out of memory is a word here"


def test_long_errors_are_cut():
    with pytest.raises(ValueError, match="x") as caught:
        int("x" * 1000)
    failure = failure_from(event_of(caught.value))
    assert len(failure.message) < 450


@pytest.mark.parametrize(
    ("rank", "text", "story"),
    [
        (0, "0F1", "it computes micro-batch 1 on stage 0"),
        (1, "1F2", "it computes micro-batch 2 on stage 1, with the input that 1RECV_F2 brought from rank 0"),
        (0, "0B1", "it computes micro-batch 1 on stage 0, with the input that 0RECV_B1 brought from rank 1"),
        (1, "WAIT(1RECV_F2)", ""),
    ],
)
def test_the_story_of_a_computation_has_what_it_received(rank, text, story):
    op_id = next(i for i in PP2.graph.rank_ops(rank) if str(PP2.graph.ops[i]) == text)
    assert received_before(PP2.graph, op_id) == story


ONE = np.float32(1.0)
GOOD = {"w": np.ones(3, np.float32)}
BAD = {"w": np.array([1, np.nan, 2], np.float32)}


def require(step, ranks, first_ops, reference):
    """The check of all ranks."""
    outcomes = [StepOutcome(loss, own, not_finite=op) for (loss, own), op in zip(ranks, first_ops, strict=True)]
    require_finite(PP2.graph, step, outcomes, StepOutcome(*reference))


def test_numbers_that_are_finite_are_not_spoken_of():
    require(0, [(None, GOOD), (ONE, {"v": GOOD["w"]})], ["", ""], (ONE, GOOD))


def test_the_first_micro_batch_with_a_loss_that_is_not_finite_is_named_with_its_input():
    with pytest.raises(NotFiniteError) as caught:
        require(3, [(None, BAD), (np.float32(np.nan), {"v": GOOD["w"]})], ["", "1F2"], (ONE, GOOD))
    (finding,) = caught.value.findings
    assert finding.code == "PP921"
    parts = finding.message.split("; ")
    assert parts[0] == "step 3: the loss is not a number, on rank 1 first at 1F2"
    assert "micro-batch 2 on stage 1" in parts[1]
    assert parts[1].endswith("1RECV_F2 brought from rank 0")
    assert parts[2].endswith(": 1 of 2, on ranks 0, w")
    assert parts[3].startswith("the reference's")
    assert "only the plan's run" in finding.help
    assert [one.op for one in finding.witness.ops] == ["1F2"]


def test_gradients_alone_and_a_reference_that_has_them_too():
    with pytest.raises(NotFiniteError) as caught:
        require(0, [(None, BAD), (ONE, GOOD)], ["", ""], (ONE, {"w": np.array([np.inf])}))
    (finding,) = caught.value.findings
    loss, gradients, reference = finding.message.split("; ")
    assert loss == "step 0: every loss is finite"
    assert gradients.endswith(": 1 of 1, on ranks 0, w")
    assert reference.startswith("the reference has")
    assert "learning_rate" in finding.help


def test_an_infinite_loss_is_called_that():
    with pytest.raises(NotFiniteError, match="the loss is infinite, on rank 1 first at 1F0"):
        require(0, [(None, GOOD), (np.float32(np.inf), GOOD)], ["", "1F0"], (ONE, GOOD))
