"""Dropout in replayed steps: each replay has the masks of its step. A recorder of operations is the CUDA graph."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeproof.exec.rank.adapter import RankAdapter, RankProgram
from pipeproof.exec.rank.framework_choice import capture_graphs, start_framework
from pipeproof.exec.rank.step_replay import ReplayedSteps
from pipeproof.exec.rank.torch.cuda_graph import captured
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import DropoutKeys
from pipeproof.stages.torch.device_masks import DeviceMasks, MaskStates
from tests.plans import subject

pytestmark = pytest.mark.needs_torch

RATES = {"embedding": 0.1, "attention": 0.2, "hidden": 0.3}
SECTIONS = {
    "plain": {},
    "modules that embed again": {"model": {"mtp": {"num_modules": 1, "magic_send": True}, "activation_order": "bsh"}},
    "modules": {"model": {"mtp": {"num_modules": 2}}},
    "computed again": {"memory": {"recompute": "full"}},
    "graphs": {"run": {"compiler": "eager"}},
}
STEPS = 4


class RecordedOperations(TorchDispatchMode):
    """The operations of a step, which run again in the same memory, whatever the host does meanwhile.

    A tensor that the host makes within the step keeps its values, as in a CUDA graph.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                for memory, again in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(memory, torch.Tensor) and memory.data_ptr() != again.data_ptr():
                        memory.copy_(again)


class Replays:
    """A device on which nothing is computed by a capture alone."""

    def __init__(self):
        self.num_replays = 0

    def captured(self, work):
        kept = RecordedOperations()
        with kept:
            work()
        is_first = True

        def replay():
            nonlocal is_first
            if not is_first:  # the recorder has computed the captured step
                kept.replay()
            is_first = False
            self.num_replays += 1

        return replay

    def write(self, op_id):
        """Write nothing."""

    def read(self):
        return -1


def plan_of(sections, **run):
    given = {"backend": "torch", "steps": STEPS, "optimizer": "sgd", "learning_rate": 0.1, **run}
    return subject(
        topology={"pp": 1},
        schedule={"num_micro_batches": 3},
        stages=None,
        model={"num_layers": 2, "dropout": RATES, **sections.get("model", {})},
        run={**given, **sections.get("run", {})},
        memory=sections.get("memory", {}),
    ).plan


def outcomes(plan, replays=None):
    """The outcome of every step of the one rank, on the CPU."""
    framework = start_framework(plan_of({}).spec.run)
    adapter = RankAdapter(plan, 0, framework, SimpleNamespace(channels=None, collectives={}), lambda step, op_id: None)
    if plan.spec.run.compiler is not None:
        assert not capture_graphs(adapter.stages, lambda stage: None), "a stage has no graphs"
    program = RankProgram(plan.graph, 0, adapter)
    steps = None if replays is None else ReplayedSteps(adapter, program.run, replays, lambda step, op_id: None)
    for step in range(plan.spec.run.steps):
        if steps is not None:
            steps.run(step)
        else:
            adapter.begin(step)
            program.run(step)
            adapter.finish()
        yield adapter.outcome


@pytest.mark.slow(only=["graphs"])
@pytest.mark.parametrize("name", SECTIONS)
def test_a_replay_has_the_bits_of_the_step_operation_by_operation(name, monkeypatch):
    expected = list(outcomes(plan_of(SECTIONS[name])))

    def refuse(*_):
        raise AssertionError("the host draws a mask")

    monkeypatch.setattr(DropoutKeys, "_kept", refuse)
    replays = Replays()
    replayed = list(outcomes(plan_of(SECTIONS[name], device="gpu", replay=True), replays))
    assert replays.num_replays == STEPS - 1
    for ours, plain in zip(replayed, expected, strict=True):
        assert np.array_equal(ours.loss, plain.loss)
        assert ours.gradients.keys() == plain.gradients.keys()
        assert all(np.array_equal(ours.gradients[name], gradient) for name, gradient in plain.gradients.items())


def test_a_cuda_graph_draws_the_masks_of_the_states_that_are_loaded():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    device, plan = torch.device("cuda", 0), plan_of(SECTIONS["plain"]).spec
    states = MaskStates(plan, describe_gpt(plan), device)
    drawn = {}

    def draw():
        masks = DeviceMasks(plan, 0, 1, states.of(1), states.positions)
        drawn["hidden"] = masks.of_tokens("layer.0.mlp", 0.3, (2, 7))
        drawn["attention"] = masks.of_attention("layer.1.attn", 0.2, (1, 3), (4, 8))

    draw()
    replay = captured(draw, device)
    for step in (1, 2):
        states.load(step, 0)
        replay()
        keys = DropoutKeys(plan, step, 1)
        assert np.array_equal(drawn["hidden"].cpu(), keys.of_tokens("layer.0.mlp", 0.3, (2, 7)))
        assert np.array_equal(drawn["attention"].cpu(), keys.of_attention("layer.1.attn", 0.2, (1, 3), (4, 8)))
