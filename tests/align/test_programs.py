"""A small model in plain PyTorch and plain Paddle: equal within rounding, and each planted fault is named."""

import sys
from pathlib import Path

import pytest

from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.loss_pairs import Tolerance
from tests.align.small_model import train

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs_paddle]
ROUNDING = Tolerance(rounding=True)
FRAMEWORKS = ("torch", "paddle")


@pytest.fixture(scope="module")
def correct(tmp_path_factory):
    """By framework, the record without a fault."""
    directories = {name: tmp_path_factory.mktemp(name) / "record" for name in FRAMEWORKS}
    for name, directory in directories.items():
        train(name, directory)
    return directories


def test_without_a_fault_all_is_equal_within_rounding(correct):
    found = align(correct["paddle"], correct["torch"], ROUNDING)
    assert found.equal
    tensors = found.tensors
    assert (tensors.num_compared, tensors.only_a, tensors.only_b) == (528, 0, 0)
    assert 0 < tensors.num_rounding < 528
    assert "embed, forward output" in tensors.with_equal_bits  # a copy of rows


def test_one_framework_twice_has_equal_bits(correct, tmp_path):
    train("torch", tmp_path / "again")
    assert align(tmp_path / "again", correct["torch"], Tolerance()).equal


def test_nothing_of_a_recorder_remains_on_paddle(tmp_path):
    """No hooks, no patches, and no line of the recorder runs in a step after the block: later steps are as fast as
    before."""
    import paddle

    from pipeproof.paddle import record_layers

    paddle.seed(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.GELU(), paddle.nn.Linear(8, 4))
    optimizer, x = paddle.optimizer.AdamW(parameters=model.parameters()), paddle.ones([3, 4])
    before = paddle.Tensor.backward, paddle.optimizer.AdamW.step, paddle.optimizer.Optimizer.step
    lines = set[str]()

    def step(loss):
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()

    def counted(frame, event, _):
        lines.update({frame.f_code.co_filename} if "record" in Path(frame.f_code.co_filename).name else ())

    with record_layers(model, tmp_path / "a"):
        sys.setprofile(counted)
        step(model(x).sum())
        sys.setprofile(None)
        unfinished = model(x).sum()
    assert {Path(file).name for file in lines} >= {"layer_recorder.py", "record_layers.py"}
    lines.clear()
    content = (tmp_path / "a" / "record.rank0.jsonl").read_bytes()
    sys.setprofile(counted)
    step(unfinished)  # of a forward inside of the block
    step(model(x).sum())
    sys.setprofile(None)
    assert lines == set()
    assert (tmp_path / "a" / "record.rank0.jsonl").read_bytes() == content
    assert (paddle.Tensor.backward, paddle.optimizer.AdamW.step, paddle.optimizer.Optimizer.step) == before
    assert not any(each._forward_pre_hooks or each._forward_post_hooks for each in model.sublayers(include_self=True))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_rate_of_the_optimizer_is_named(correct, tmp_path, framework):
    train(framework, tmp_path / "fault", "rate")
    found = align(tmp_path / "fault", correct[({*FRAMEWORKS} - {framework}).pop()], ROUNDING)
    first = found.tensors.first
    assert (first.a.step, first.a.micro_batch, first.a.kind) == (1, 0, "embed, forward output")
    assert first.operation.name == "the optimizer, which wrote the weights of embed"
    assert first.cause.family == "optimizer"


def test_clipped_gradients_are_those_that_the_optimizer_reads(correct, tmp_path):
    """Paddle clips inside of a step, PyTorch before it; where one side does not clip, all gradients have one ratio."""
    for framework in FRAMEWORKS:
        train(framework, tmp_path / framework, "clip")
    assert align(tmp_path / "paddle", tmp_path / "torch", ROUNDING).equal
    first = align(tmp_path / "paddle", correct["torch"], ROUNDING).tensors.first
    assert (first.a.step, first.a.kind, first.cause.family) == (0, "gradient of head.weight", "scale")
    assert "28 of 28 weights have that ratio, as by the loss's scale" in first.cause.evidence
    assert first.cause.evidence.endswith("or clipping on one side only")


FAULTS = [
    # fault, framework with it, the first tensor that differs, the operation, the cause
    ("loss", "paddle", "whole, backward input", "the code of whole, or the loss", "scale", "are 2 of B's"),
    ("scale", "torch", "gradient of head.weight", "the gradient of the weights of head", "scale", "are 1/2 of B's"),
    ("attention", "paddle", "blocks.1.attn.out, forward input",
     "the code of blocks.1.attn before it calls blocks.1.attn.out", "computation", "the inputs are equal"),
    ("rotary", "paddle", "blocks.1.attn.rotary_q, forward output", "blocks.1.attn.rotary_q", "rotary",
     "A rotates neighbours, elements 2i and 2i + 1, and B halves, elements i and i + D/2"),
    ("residual", "torch", "blocks.1.norm2, forward input", "the code of blocks.1 before it calls blocks.1.norm2",
     "residual", "with its first two dims exchanged"),
    ("norm", "paddle", "blocks.1.norm2, forward input", "the code of blocks.1 before it calls blocks.1.norm2", "norm",
     "A adds the output of blocks.1.norm1 where B adds the output of blocks.0"),
    ("reduction", "paddle", "gradient of head.weight", "the gradient of the weights of head", "missing reduction",
     "A is the addend of micro-batch 1 alone, of 2"),
    ("cast", "torch", "blocks.1.mlp.down, forward input", "the code of blocks.1.mlp before it calls blocks.1.mlp.down",
     "cast", "all numbers of A are bfloat16's"),
    ("dropout", "paddle", "blocks.1.drop, forward output", "blocks.1.drop", "dropout", "another random stream"),
    ("epsilon", "torch", "blocks.1.norm2, forward output", "blocks.1.norm2", "computation", "the inputs are equal"),
    ("detached", "paddle", "blocks.1.norm1, backward output", "the backward of blocks.1.norm1", "residual",
     "which A does not add"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "framework", "tensor", "operation", "family", "evidence"), FAULTS)
def test_a_fault_is_located_and_named(correct, tmp_path, fault, framework, tensor, operation, family, evidence):
    train(framework, tmp_path / "fault", fault)
    (other,) = {*FRAMEWORKS} - {framework}
    found = align(tmp_path / "fault", correct[other], ROUNDING)
    assert not found.equal
    first = found.tensors.first
    assert (first.a.step, first.a.micro_batch, first.a.kind) == (0, 0, tensor)
    assert operation in first.operation.name
    assert first.operation.are_inputs_equal
    assert first.cause.family == family
    assert evidence in first.cause.evidence
