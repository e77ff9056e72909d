"""Scales between stages: the effect of scales on I, SEND_B and RECV_B, and the rows that show a wrong weight."""

import pytest

from pipeproof.stages.describe.gradient_facts import Loss, ParameterGradient
from pipeproof.verify.subject import program_subject
from tests.verify.gradient_models import SUM, facts, model
from tests.verify.gradient_mutants import own
from tests.verify.programs import errors


def pipeline(num_stages, num_micro_batches=2, split=False):
    """The programs of stages on one rank each; each receives, computes and sends one micro-batch after the other."""
    lines = []
    for n in range(num_stages):
        rows, last = [], num_stages - 1
        for m in range(num_micro_batches):
            rows += [f"{n}RECV_F{m}", f"WAIT({n}RECV_F{m})"] if n else []
            rows += [f"{n}F{m}"]
            rows += [f"{n}SEND_F{m}", f"{n}RECV_B{m}", f"WAIT({n}SEND_F{m})", f"WAIT({n}RECV_B{m})"] if n < last else []
            rows += [f"{n}I{m}" if split else f"{n}B{m}"]
            rows += [f"{n}SEND_B{m}", f"WAIT({n}SEND_B{m})"] if n else []
            rows += [f"{n}W{m}"] if split else []
        lines.append(" ".join([*rows, f"{n}STEP"]))
    return lines


def scaled(lines, **scales):
    """The programs with a scale on rows; ``_1SEND_B0="1/2"`` names the row ``1SEND_B0``."""
    for name, scale in scales.items():
        op = f" {name[1:]} "
        assert sum(op in f" {line} " for line in lines) == 1
        lines = [f" {line} ".replace(op, f"{op[:-1]}{{scale={scale}}} ").strip() for line in lines]
    return lines


def alone(lines):
    """The programs without facts: all tokens must have one weight."""
    return program_subject("\n".join(f"rank {rank}: {line}" for rank, line in enumerate(lines)))


def given(lines, *more):
    """The programs with facts: a weight on each stage, and the loss on the last."""
    num = len(lines)
    weights = [ParameterGradient(f"w{n}", (n,)) for n in range(num)]
    return model("\n".join(lines), facts(*weights, losses=(Loss("main", num - 1, SUM), *more)), pp=num)


def found(subject):
    """(code, counted weight, operations shown) of each error."""
    return [
        (f.code, f.message.split("counts ")[1].split(" in ")[0], [op.op for op in f.witness.ops])
        for f in errors(subject)
    ]


def at_every_boundary(lines, scale):
    names = [f"_{n}SEND_B{m}" for n in range(1, len(lines)) for m in range(2)]
    return scaled(lines, **dict.fromkeys(names, scale))


def test_a_hook_that_divides_at_every_boundary_makes_each_stage_smaller_by_one_more_factor():
    lines = pipeline(3)
    assert errors(given(lines)) == errors(alone(lines)) == []
    wrong = at_every_boundary(lines, "1/num_micro_batches")
    assert found(given(wrong)) == [
        ("PP606", "1/(4*step_tokens)", ["2SEND_B0", "1SEND_B0"]),
        ("PP606", "1/(2*step_tokens)", ["2SEND_B0"]),
    ]
    assert {(code, shown[0][1:]) for code, _, shown in found(alone(wrong))} == {("PP606", "SEND_B0")}


def test_the_program_of_two_stages_is_refused_without_facts_at_the_send():
    (finding,) = errors(alone(at_every_boundary(pipeline(2), "1/num_micro_batches")))
    assert (finding.code, finding.location.line) == ("PP606", 2)
    assert "1SEND_B0" in finding.witness.ops[0].op
    assert "`weights of stage 1`" in finding.message
    assert "in the update of `weights of stage 0`" in finding.message


@pytest.mark.parametrize("op", ["1I0", "1SEND_B0", "0RECV_B0"])
def test_each_row_between_stages_scales_what_the_stage_before_adds(op):
    lines = pipeline(2, split=True)
    assert found(given(scaled(lines, **{f"_{op}": "3"}))) == [("PP606", "3/step_tokens", [op])]


@pytest.mark.parametrize("op", ["1B0", "0B0", "1W0", "0W0"])
def test_the_scale_of_an_addition_stays_on_its_stage(op):
    """B and W multiply their contributions to the weight gradients, not the gradient that goes to the stage before."""
    wrong = given(scaled(pipeline(2, split="W" in op), **{f"_{op}": "3"}))
    assert found(wrong) == [("PP606", "3/step_tokens", [op])]
    (finding,) = errors(wrong)
    assert f"`w{op[0]}`" in finding.message


def test_the_scale_of_the_first_stages_input_gradient_reaches_nothing():
    assert found(given(scaled(pipeline(2, split=True), _0I0="3"))) == []


@pytest.mark.parametrize(
    "scales",
    [
        {"_1SEND_B0": "1/2", "_0RECV_B0": "2"},
        {"_1I0": "1/2", "_1SEND_B0": "2"},
        {"_1SEND_B0": "1/num_micro_batches", "_0B0": "num_micro_batches"},
        {"_1F0": "num_micro_batches/global_tokens", "_1B0": "1/num_micro_batches", "_1SEND_B0": "1/num_micro_batches"},
    ],
)
def test_scales_that_cancel_out_are_right(scales):
    split = "_1I0" in scales
    lines = pipeline(2, split=split)
    assert found(given(scaled(lines, **scales))) == []
    assert found(given(scaled(lines, **dict(list(scales.items())[1:])))) != []


def test_an_auxiliary_loss_of_the_receiving_stage_is_not_scaled():
    aux = Loss("aux", 1, "0.01/global_tokens")
    wrong = errors(given(scaled(pipeline(3), _2SEND_B1="1/2"), aux))
    assert [(f.code, f.witness.ops[0].op) for f in wrong] == [("PP606", "2SEND_B1")]
    assert errors(given(scaled(pipeline(3), _2SEND_B1="1/2", _1RECV_B1="2"), aux)) == []
    both = errors(given(scaled(pipeline(3), _1SEND_B1="1/2"), aux))
    assert [(f.code, "`w0`" in f.message) for f in both] == [("PP606", True)]  # both losses by one factor: one cause


def test_between_stages_of_one_rank_only_the_input_gradient_can_scale():
    text = "0F0 1F0 1I0{scale=2} 1W0 0B0 0STEP 1STEP"
    given_facts = facts(ParameterGradient("a", (0,)), ParameterGradient("b", (1,)), losses=(Loss("main", 1, SUM),))
    (finding,) = errors(model(text, given_facts, pp=1))
    assert (finding.code, finding.witness.ops[0].op) == ("PP606", "1I0")


def test_a_scale_between_stages_that_cannot_be_read():
    for scale in ("1/dpp", "aux:2"):
        assert own(given(scaled(pipeline(2), _1SEND_B0=scale))) == {"PP610"}


def test_a_program_without_an_optimizer_is_checked_where_it_scales_gradients():
    lines = [line.rsplit(" ", 1)[0] for line in pipeline(2)]
    assert errors(alone(lines)) == []
    assert [f.code for f in errors(alone(scaled(lines, _1SEND_B1="1/2")))] == ["PP606"]


def test_a_stage_with_a_whole_backward_next_to_one_that_splits_it():
    lines = [pipeline(2, split=True)[0], pipeline(2)[1]]
    assert found(given(lines)) == []
    assert found(given(scaled(lines, _1SEND_B1="3"))) == [("PP606", "3/step_tokens", ["1SEND_B1"])]
