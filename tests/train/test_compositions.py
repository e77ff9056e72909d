"""Modules that other tools have wrapped (FSDP2, DDP, DTensor, torch.compile, checkpointing, autocast); many lengths."""

import pytest

from tests.train.launch import run
from tests.train.test_programs import of_programs, output_of, require_done

pytestmark = pytest.mark.needs_torch

CASES = {
    "compositions": ["compiled", "checkpointed", "hooked", "differentiated", "autocast"],
    "lengths": ["random_lengths", "refused_steps", "listed", "tools", "many"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["fsdp", "resharded", "hybrid", "replicas", "unused", "tied", "tensor_parallel", "experts"]
)
def test_stages_on_four_ranks_that_are_replicated_sharded_or_distributed(case):
    require_done(output_of("sharded_stages", 4), 4, case)


@of_programs(CASES)
def test_a_case_on_two_ranks(program, case):
    require_done(output_of(program, 2, *CASES[program]), 2, case)


@pytest.mark.needs("transformers")
def test_a_qwen3_moe_of_hugging_face_has_its_experts_on_two_ranks():
    assert run("qwen3_experts.py", 4).stdout.count("gradients, at most") == 4
