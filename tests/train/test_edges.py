"""Pipelines of models that are no chain, on two and four ranks: U-Nets, and blocks that read several earlier ones."""

import pytest

from tests.train.launch import launch

pytestmark = pytest.mark.needs_torch


@pytest.fixture(scope="module")
def ran():
    return launch("edges.py", 2, timeout=600)


@pytest.mark.parametrize("case", ["unet", "residuals", "wrong"])
def test_all_bits_on_two_ranks(ran, case):
    for rank in range(2):
        assert f"{case} done on rank {rank}\n" in ran.stdout, ran.stdout


@pytest.mark.slow
def test_all_bits_on_four_ranks():
    ran = launch("edges.py", 4, timeout=600)
    for case in ("unet", "residuals", "wrong"):
        assert ran.stdout.count(f"{case} done on rank") == 4, ran.stdout
