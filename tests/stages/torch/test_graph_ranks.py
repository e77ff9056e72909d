"""Graphs of stages on several ranks and with dropout: collectives, masks and bits are those of the plan."""

import importlib
import sys

import numpy as np
import pytest
import torch

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import DropoutKeys, mask_key
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.stages.torch.device_masks import kept, state_of
from pipeproof.stages.torch.graph_errors import GraphOperationError
from pipeproof.stages.torch.graph_stage import GraphStage
from pipeproof.stages.torch.stage import StepBatches
from tests.features import FEATURES
from tests.stages.torch.features import COMPRESSED, EVEN, MLA, MOE, TWO, make_plan
from tests.stages.torch.staged_run import CPU, StagedRun

pytestmark = pytest.mark.needs_torch

SEQUENCE = {"tp": 2, "sequence_parallel": True}
REGATHER = {"sequence_parallel_activations": "regather"}
DENSE_FIRST = {"moe": {**MOE, **EVEN}}
PLANS = {
    "tp": {"topology": {"tp": 2}},
    "sequence parallel, dropout": {
        "topology": SEQUENCE, "model": {"tied_embedding": True, "dropout": 0.2, "activation_order": "bsh"},
    },
    "gathered again": {"topology": SEQUENCE, "memory": REGATHER, "model": {"mla": {**MLA, "q_rank": 5}}},
    "modules": {
        "topology": SEQUENCE,
        "model": {"mtp": {"num_modules": 1, "loss_weight": 0.4, "magic_send": True}, "dropout": {"embedding": 0.1}},
    },
    "compressed attention": {"topology": SEQUENCE, "memory": REGATHER, "model": COMPRESSED},
    "packed documents": {"model": {**FEATURES["packed documents"]["model"], "num_layers": 3}},
    "cp": {"topology": {"cp": 2, "tp": 2}},
    "experts": {"model": DENSE_FIRST},
    "ep, tp": {"topology": {"ep": 2, **SEQUENCE}, "model": DENSE_FIRST},
    "experts over tp": {
        "topology": {"experts_over_tp": True, **SEQUENCE},
        "model": {"moe": {**MOE, **EVEN, "router_dtype": "float64"}},
    },
    "experts over tp, replayed": {
        "topology": {"experts_over_tp": True, **SEQUENCE}, "model": {"moe": MOE},
        "run": {"device": "gpu", "replay": True, "dtype": "bfloat16"},
    },
    "router in float64": {"topology": SEQUENCE, "model": {"moe": {**MOE, **EVEN, "router_dtype": "float64"}}},
    "ep, all-gather, dropout": {
        "topology": {"ep": 2}, "model": {"moe": {**MOE, **EVEN, "dispatcher": "all_gather"}, "dropout": 0.1},
    },
    "ep, all-gather, replayed": {
        "topology": {"ep": 2}, "model": {"moe": {**MOE, "dispatcher": "all_gather"}},
        "run": {"device": "gpu", "replay": True, "dtype": "bfloat16"},
    },
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
    run = {"backend": "torch", "compiler": compiler, "dtype": "float32", "steps": 2, **sections.get("run", {})}
    return make_plan("plain", **{**sections, "run": run, "schedule": TWO["schedule"]})


def check(plan, cut=(2,)):
    """Graphs issue what operations issue, have the same bits again and with delayed W, and are within the bound."""
    expected, run = StagedRun(plan, cut), GraphRun(plan, cut)
    results = list(run.steps())
    for result, repeated in zip(results, GraphRun(plan, cut, delayed=True).steps(), strict=True):
        assert np.array_equal(result.loss, repeated.loss)
        assert all(np.array_equal(result.gradients[name], x) for name, x in repeated.gradients.items())
    bound = parallel_bound(plan)
    first = next(iter(expected.steps()))
    # Ranks append in the order in which their threads run.
    assert sorted(map(repr, run.issued[: len(expected.issued)])) == sorted(map(repr, expected.issued))
    assert np.allclose(results[0].loss, first.loss, rtol=bound, atol=0)
    for name, gradient in first.gradients.items():
        assert np.abs(gradient).max() > 0 or ".indexer." in name
        assert np.abs(results[0].gradients[name] - gradient).max() <= bound * np.abs(gradient).max(), name
    for name, value in first.routers.items():
        assert np.allclose(results[0].routers[name], value, rtol=bound), name


@pytest.mark.slow(but=["tp"])
@pytest.mark.parametrize("name", PLANS)
def test_graphs_of_ranks_issue_and_compute_what_their_operations_do(name):
    check(plan_of(name, "eager"))


@pytest.mark.slow  # Inductor calls a C++ compiler for each kernel
@pytest.mark.parametrize("name", ["sequence parallel, dropout", "gathered again", "ep, tp"])
def test_compiled_graphs_of_ranks_do_so_too(name):
    check(plan_of(name, "inductor"))


@pytest.mark.parametrize(
    ("shape", "ranges"), [((2, 6, 8), [(0, 2), (1, 5)]), ((2, 3, 5, 7), [(0, 2), (1, 3), (2, 4)])],
    ids=["tokens", "attention"],
)  # fmt: skip
def test_masks_on_the_device_have_the_bits_of_those_on_the_host(shape, ranges):
    plan, rate = make_plan("dropout"), 0.3
    key = mask_key(plan, 1, 2, "layer.0.mlp", "hidden")
    state = torch.tensor(state_of(key))
    on_host = DropoutKeys(plan, 1, 2)._kept("hidden", "layer.0.mlp", rate, shape, ranges)
    assert np.array_equal(kept(state, rate, shape, ranges).numpy(), on_host)
    assert 0 < on_host.mean() < 1


@pytest.mark.needs("triton")
@pytest.mark.parametrize(
    ("shape", "bounds"), [((2, 6, 8), [0, 2, 1, 5, 0, 8]), ((2, 3, 6, 8), [0, 2, 1, 3, 2, 5, 0, 8])],
    ids=["tokens", "attention"],
)  # fmt: skip
def test_the_kernel_of_gpus_draws_the_same_bits(shape, bounds, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "pipeproof.stages.torch.mask_kernel", raising=False)
    kernel = importlib.import_module("pipeproof.stages.torch.mask_kernel")
    monkeypatch.delitem(sys.modules, kernel.__name__)  # others get the compiled one
    state, threshold = torch.tensor([-5, 7**20]), 2**62
    ranges = list(zip(bounds[::2], bounds[1::2], strict=True))[:-1]
    assert torch.equal(kernel.draw_mask(state, threshold, shape, bounds), kept(state, 0.25, shape, ranges))


class _LostError(Exception):
    """A collective cannot be issued."""


class _LostCollectives:
    """Collectives whose peers are gone."""

    def all_reduce(self, tensor, *, label, reduction="sum"):
        raise _LostError(label)


def test_an_error_of_a_collective_names_the_stage_the_call_and_the_layer():
    plan = plan_of("tp", "eager")
    layers = describe_gpt(plan)[1:2]
    stage = GraphStage(plan, layers, CPU, 3, None, {"tp": 0, "ep": 0, "cp": 0}, _LostCollectives())
    stage.capture()
    batches = StepBatches(plan, 0, CPU)
    batches.load(0)
    work_item = batches.work_item(1)
    activation = torch.ones(*work_item.tokens.shape, plan.gpt.hidden_size, requires_grad=True)
    named = "stage 3, micro-batch 1: `pipeproof.ordered_call` of module `layer.0.attn` in the graph of the forward"
    with pytest.raises(GraphOperationError, match=f"{named} raised _LostError: layer.0.attn.out"):
        stage.forward(activation, work_item, step=0, index=1)
