"""Pipelines of modules that other tools have wrapped: FSDP2, DDP, DTensor, torch.compile, checkpointing, autocast.

Each case is a function of a program, which compares gradients with those of the unpartitioned model. A program runs all
of its cases in one start of its processes.
"""

import pytest

from tests.train.launch import launch, run

pytestmark = pytest.mark.needs_torch


def require_done(ran, num_processes, case):
    """Fail with the output unless every rank has come to the end of a case."""
    for rank in range(num_processes):
        assert f"{case} done on rank {rank}\n" in ran.stdout, ran.stdout


@pytest.fixture(scope="module")
def sharded():
    return launch("sharded_stages.py", 4, timeout=400)


@pytest.fixture(scope="module")
def composed():
    return launch("compositions.py", 2, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["fsdp", "resharded", "hybrid", "replicas", "unused", "tied", "tensor_parallel", "experts"]
)
def test_stages_on_four_ranks_that_are_replicated_sharded_or_distributed(sharded, case):
    require_done(sharded, 4, case)


@pytest.mark.parametrize("case", ["compiled", "checkpointed", "hooked", "differentiated", "autocast"])
def test_stages_that_are_compiled_recomputed_or_under_autocast(composed, case):
    require_done(composed, 2, case)


@pytest.mark.needs("transformers")
def test_a_qwen3_moe_of_hugging_face_has_its_experts_on_two_ranks():
    output = run("qwen3_experts.py", 4).stdout
    assert output.count("gradients, at most") == 4
