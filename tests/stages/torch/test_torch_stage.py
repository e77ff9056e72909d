"""The interface of a stage: refusals, collectives, recorded tensors, and batches."""

import numpy as np
import pytest
import torch

from pipeproof.stages.common.tensor_parallel import TensorParallelRegion
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import backward_calls, weight_calls
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.synthetic import IGNORED, micro_batch
from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.runtime import require_kernels, start_torch
from pipeproof.stages.torch.stage import StepBatches, TorchStage, member_values, with_member
from tests.plans import subject
from tests.stages.torch.features import EVEN, MLA, MOE, TWO_AHEAD, make_plan
from tests.stages.torch.staged_run import CPU, StagedRun
from tests.stages.world import Issued

pytestmark = pytest.mark.needs_torch

SP = {"tp": 2, "sequence_parallel": True}
LATENT = {**MLA, "q_rank": 6}
ISSUING = {
    "tp": ({"tp": 2}, {}, {}),
    "sp, tied": (SP, {}, {"tied_embedding": True}),
    "sp, gathered again": (SP, {"memory": {"sequence_parallel_activations": "regather"}}, {"moe": MOE}),
    "sp, latent, gathered again": (
        SP,
        {"memory": {"sequence_parallel_activations": "regather"}},
        {"mla": LATENT, **TWO_AHEAD},
    ),
    "sp, again": (SP, {"memory": {"recompute": "full"}}, {"mla": LATENT}),
    "sp, embedded again": (SP, {}, {"mtp": {"num_modules": 2, "magic_send": True}}),
    "ep, sp": ({**SP, "ep": 2}, {}, {"moe": {**MOE, **EVEN}}),
    "cp": ({"cp": 2, "tp": 2}, {}, {"num_kv_heads": 2}),
    "streams": (SP, {}, {"hyper_connections": {"streams": 2}}),
}


@pytest.mark.parametrize("name", ISSUING)
def test_layers_issue_exactly_the_collectives_that_the_description_lists(name):
    topology, sections, model = ISSUING[name]
    plan = make_plan("plain", topology=topology, model=model, run={"steps": 1}, **sections)
    run = StagedRun(plan, cut=(2,))
    list(run.steps())
    layers = describe_gpt(plan)
    forward = [issued_as(c) for layer in layers for c in layer.forward_collectives]
    backward = [issued_as(c) for layer in reversed(layers) for c in backward_calls(plan, layer)]
    for_weights = [issued_as(c) for layer in reversed(layers) for c in weight_calls(plan, layer)]
    assert forward
    assert len(run.issued) == len(run.world.ranks) * plan.schedule.num_micro_batches
    for issued in run.issued:
        assert tuple(list(map(without_sizes_of_exchanges, calls)) for calls in issued) == (
            forward, backward, for_weights,
        )  # fmt: skip


def issued_as(collective):
    given = Issued(str(collective.kind), collective.axis, collective.numel, collective.label, collective.reduction)
    return without_sizes_of_exchanges(given)


def without_sizes_of_exchanges(issued):
    """The number of rows of an exchange depends on the choices of routers; a description has the mean."""
    return Issued(issued.kind, issued.axis, 0, issued.label) if issued.kind == "all_to_all" else issued


def test_an_activation_is_taken_exactly_where_the_model_does_not_begin():
    plan = make_plan("plain")
    layers = describe_gpt(plan)
    batches = StepBatches(plan, 0, CPU)
    batches.load(0)
    with pytest.raises(ValueError, match=r"'embed', got Tensor"):
        TorchStage(plan, layers, CPU).forward(torch.zeros(8, 2, 16), batches.work_item(0), step=0, index=0)
    with pytest.raises(ValueError, match=r"stage of \['norm', 'head'\].* got NoneType"):
        TorchStage(plan, layers[-2:], CPU).forward(None, batches.work_item(0), step=0, index=0)


@pytest.mark.parametrize(("num", "got"), [(2, r"\['embed', 'embed'\]"), (0, r"\[\]")])
def test_a_stage_has_different_layers(num, got):
    plan = make_plan("plain")
    with pytest.raises(ValueError, match=f"one or more different layers, got {got}"):
        TorchStage(plan, [describe_gpt(plan)[0]] * num, CPU)


def test_a_stage_of_one_part_of_each_sequence_needs_collectives():
    plan = make_plan("plain", topology={"cp": 2})
    with pytest.raises(ValueError, match="2 context-parallel ranks need collectives, got None"):
        TorchStage(plan, describe_gpt(plan), CPU)


def test_pytorch_starts_on_one_thread_and_says_where_there_is_no_gpu(monkeypatch):
    assert start_torch("cpu") == CPU
    assert torch.get_num_threads() == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"PyTorch sees no GPU here: run\.device gpu needs a build with CUDA"):
        start_torch("gpu")


def test_kernels_that_do_nothing_are_found(monkeypatch):
    require_kernels(CPU)
    right = torch.mm
    calls = []

    def lazy(a, b):
        calls.append(1)
        return right(a, b) if len(calls) > 1 else torch.zeros(16, 16)

    monkeypatch.setattr(torch, "mm", lazy)
    with pytest.raises(RuntimeError, match="kernels on cpu do not compute"):
        require_kernels(CPU)


@pytest.mark.parametrize(("rank", "message"), [(2, "rank 2 of 2: must be 0 to 1"), (1, "need collectives, got None")])
def test_a_region_knows_its_ranks(rank, message):
    with pytest.raises(ValueError, match=message):
        TensorParallelRegion(OPS, rank, 2, None, None)


def test_a_stage_that_only_hands_on_gives_memory_of_its_own():
    plan = make_plan("empty layers")
    stage = TorchStage(plan, [layer for layer in describe_gpt(plan) if layer.name.startswith("empty")], CPU)
    batches = StepBatches(plan, 0, CPU)
    batches.load(0)
    given = torch.randn(8, 2, 16, dtype=torch.float64, requires_grad=True)
    output = stage.forward(given, batches.work_item(0), step=0, index=0)
    assert torch.equal(output, given)
    assert output.data_ptr() != given.data_ptr()
    gradient = torch.randn_like(given)
    stage.backward_input(output, gradient).accumulate()
    assert torch.equal(given.grad, gradient)


@pytest.mark.parametrize("model", [{}, {**TWO_AHEAD, "moe": MOE}])
def test_recorded_tensors_have_the_bits_of_the_unpartitioned_model(model):
    plan = make_plan("plain", model=model, run={"dtype": "float32", "steps": 1})
    ours, reference = LayerWatch(), LayerWatch()
    list(StagedRun(plan, cut=(2, 3), watch=ours).steps())
    list(run_unpartitioned(plan, reference))
    seen, expected = ours.take(), reference.take()
    assert set(seen) == set(expected)
    assert [key for key, array in seen.items() if array.tobytes() != expected[key].tobytes()] == []
    assert {"layer.1/backward/output/0/0", "norm/forward/input/2/0", "head/forward/output/0/0"} <= set(seen)


def test_sixteen_bits_are_shown_as_float32():
    watch = LayerWatch()
    tensor = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    watch.see("layer.0", "input", 0, 0, [tensor])
    (tensor * 3).sum().backward()
    shown = watch.take()
    assert shown["layer.0/forward/input/0/0"].dtype == np.float32
    assert shown["layer.0/backward/output/0/0"].tolist() == [3.0, 3.0]


def test_batches_of_later_steps_are_in_the_memory_of_the_first():
    plan = make_plan("ahead")
    batches = StepBatches(plan, 0, CPU)
    batches.load(0)
    work_item = batches.work_item(1)
    memory = [stream.tokens.data_ptr() for stream in work_item.streams]
    before = work_item.tokens.clone()
    batches.load(1)
    later = batches.work_item(1)
    assert [stream.tokens.data_ptr() for stream in later.streams] == memory
    assert not torch.equal(later.tokens, before)
    assert later.tokens.numpy().tobytes() == micro_batch(plan, 1, 1).tokens.T.tobytes()
    assert [stream.labels[0, 0].item() for stream in later.streams[1:]] == later.labels[1:3, 0].tolist()


MEMBERS = [
    {"name": "x", "dims": "sbh"},
    {"name": "tokens", "dims": "bs", "dtype": "int64"},
    {"name": "labels", "dims": "sb", "dtype": "int32"},
    {"name": "mask", "dims": "bs", "dtype": "bool"},
]


@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_words_that_cross_a_boundary_take_the_place_of_the_unit_s_own(order):
    declared = [{**MEMBERS[0], "dims": order}, *MEMBERS[1:]]
    plan = subject(boundaries=declared, model={"activation_order": order}).plan
    members = {member.member: member for member in plan.edges[0].variants[0]}
    batches = StepBatches(plan.spec, 0, CPU)
    batches.load(0)
    own, other = batches.work_item(0), batches.work_item(1)
    batch_first = order == "bsh"
    sent = {name: member_values(other, members[name], batch_first=batch_first) for name in ("tokens", "labels", "mask")}
    for name, member in members.items():
        if name in sent:
            assert (tuple(sent[name].shape), sent[name].dtype) == (member.shape, getattr(torch, member.dtype))
    labels = with_member(own, members["labels"], sent["labels"], batch_first=batch_first)
    assert torch.equal(labels.labels, other.labels)
    assert torch.equal(labels.tokens, own.tokens)
    mask = with_member(labels, members["mask"], torch.zeros_like(sent["mask"]), batch_first=batch_first)
    assert (mask.labels == IGNORED).all()
    assert torch.equal(with_member(labels, members["mask"], sent["mask"], batch_first=batch_first).labels, other.labels)
    tokens = with_member(own, members["tokens"], sent["tokens"], batch_first=batch_first)
    assert torch.equal(tokens.tokens, other.tokens)
    dim = 1 if batch_first else 0
    counted = own.labels.narrow(dim, 0, 7) != IGNORED
    assert torch.equal(tokens.labels != IGNORED, own.labels != IGNORED)
    assert torch.equal(tokens.labels.narrow(dim, 0, 7)[counted], other.tokens.narrow(dim, 1, 7)[counted])
