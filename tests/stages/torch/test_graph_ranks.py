"""Graphs of stages on several ranks and with dropout: collectives, masks and bits are those of the plan."""

import numpy as np
import pytest
import torch

from pipeproof.stages.describe.dropout import DropoutKeys, mask_key
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.stages.torch.graph_dropout import _signed, kept
from pipeproof.stages.torch.graph_stage import GraphStage
from tests.stages.torch.features import EVEN, MLA, MOE, TWO, make_plan
from tests.stages.torch.staged_run import CPU, StagedRun

pytestmark = pytest.mark.needs_torch

SEQUENCE = {"tp": 2, "sequence_parallel": True}
REGATHER = {"sequence_parallel_activations": "regather"}
DENSE_FIRST = {"moe": {**MOE, **EVEN}}
PLANS = {
    "tp": {"topology": {"tp": 2}},
    "sequence parallel": {"topology": SEQUENCE, "model": {"tied_embedding": True}},
    "gathered again": {"topology": SEQUENCE, "memory": REGATHER},
    "latent": {"topology": SEQUENCE, "model": {"mla": {**MLA, "q_rank": 5}}, "memory": REGATHER},
    "modules": {"topology": SEQUENCE, "model": {"mtp": {"num_modules": 1, "loss_weight": 0.4, "magic_send": True}}},
    "cp": {"topology": {"cp": 2, "tp": 2}},
    "dropout": {"model": {"dropout": {"embedding": 0.1, "attention": 0.2, "hidden": 0.3}}},
    "dropout, sequence parallel": {"topology": SEQUENCE, "model": {"dropout": 0.2, "activation_order": "bsh"}},
    "experts": {"model": DENSE_FIRST},
    "ep": {"topology": {"ep": 2}, "model": DENSE_FIRST},
    "ep, gathered, dropout": {
        "topology": {"ep": 2}, "model": {"moe": {**MOE, **EVEN, "dispatcher": "all_gather"}, "dropout": 0.1},
    },
    "ep, tp": {"topology": {"ep": 2, **SEQUENCE}, "model": DENSE_FIRST},
}  # fmt: skip


class GraphRun(StagedRun):
    """A ``StagedRun`` whose stages are graphs."""

    def _stage(self, layers, rank):
        stage = GraphStage(self.plan, layers, CPU, 0, None, rank.coords, rank)
        stage.capture()
        assert (stage.reason, len(stage.kept)) == ("", 1)
        assert not rank.issued, "a capture communicates"
        return stage


def plan_of(name, compiler):
    sections = PLANS[name]
    run = {"backend": "torch", "compiler": compiler, "dtype": "float32", "steps": 2}
    return make_plan("plain", **{**sections, "run": run, "schedule": TWO["schedule"]})


def check(plan, cut=(2,)):
    """Graphs issue what operations issue, repeat their bits, have them with delayed W, and are within the bound."""
    expected, run = StagedRun(plan, cut), GraphRun(plan, cut)
    results = list(run.steps())
    for again in (GraphRun(plan, cut), GraphRun(plan, cut, delayed=True)):
        for result, repeated in zip(results, again.steps(), strict=True):
            assert np.array_equal(result.loss, repeated.loss)
            assert all(np.array_equal(result.gradients[name], x) for name, x in repeated.gradients.items())
    bound = parallel_bound(plan)
    first = next(iter(expected.steps()))
    assert run.issued[: len(expected.issued)] == expected.issued
    assert abs(results[0].loss - first.loss) <= bound * abs(first.loss)
    for name, gradient in first.gradients.items():
        assert np.abs(gradient).max() > 0
        assert np.abs(results[0].gradients[name] - gradient).max() <= bound * np.abs(gradient).max(), name
    for name, value in first.routers.items():
        assert np.allclose(results[0].routers[name], value, rtol=bound), name


@pytest.mark.parametrize("name", PLANS)
def test_graphs_of_ranks_issue_and_compute_what_their_operations_do(name):
    check(plan_of(name, "eager"))
