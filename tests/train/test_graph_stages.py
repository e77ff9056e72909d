"""Pipelines whose stages run as graphs, over two processes. Each case is a function of the program."""

import pytest

from tests.train.launch import launch

pytestmark = [pytest.mark.needs_torch, pytest.mark.slow]


def _require_done(case):
    ran = launch("graph_stages.py", 2, case, timeout=600)
    for rank in range(2):
        assert f"{case} done on rank {rank}\n" in ran.stdout, ran.stdout


@pytest.mark.parametrize("case", ["eager", "left", "failed", "inductor"])
def test_stages_as_graphs(case):
    _require_done(case)
