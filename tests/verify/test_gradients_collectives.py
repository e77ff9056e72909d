"""Gradient collectives that belong to no gradient, that are repeated, or that are below no REDUCE_GRAD."""

import dataclasses

import pytest

from pipeproof.diagnostics.finding import OpsWitness
from pipeproof.verify.subject import program_subject
from tests.plans import subject
from tests.verify.gradient_models import BIAS, DENSE, EXPERTS, NORM, facts, model
from tests.verify.gradient_mutants import only, own
from tests.verify.programs import errors, mutated

MOE = {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 16}}
DP = subject(model={"vocab_size": 40}, topology={"dp": 2})
EP = subject(model=MOE, topology={"ep": 2})
TP = subject(topology={"tp": 2, "dp": 2, "sequence_parallel": True})


def behind(block, like, **values):
    """Put one more call at the end of a block of children: a copy of the ``like``-th with the next number."""

    def change(rows):
        for program in rows:
            calls = [row for row in program if str(row.op).startswith(f"{block}/")]
            if calls:
                op = calls[like].op._replace(index=len(calls))
                program.insert(program.index(calls[-1]) + 1, dataclasses.replace(calls[like], op=op, **values))

    return change


def witnessed(found):
    assert isinstance(found.witness, OpsWitness)
    return [one.op for one in found.witness.ops]


@pytest.mark.parametrize(
    ("base", "block", "like", "numel", "owed"),
    [
        (DP, "0REDUCE_GRAD:dp", 1, 16, "all 15 gradients of stage 0"),  # one of four norms
        (DP, "1REDUCE_GRAD:dp", -3, 512, "all 16 gradients of stage 1"),
        (EP, "0REDUCE_GRAD:ep", 2, 768, "all 11 gradients of stage 0"),
        (TP, "0REDUCE_GRAD:tp", 0, 16, "all 4 gradients of stage 0"),
    ],
)
def test_a_sum_that_is_repeated_at_the_end_of_its_block_is_of_no_gradient(base, block, like, numel, owed):
    found = only(mutated(base, behind(block, like)), "PP613")
    assert f"sums {numel} elements, as many as" in found.message
    assert owed in found.message
    assert witnessed(found) == [f"{block}/{owed.split()[1]}.ALL_REDUCE:{block[-2:]}"]
    assert " and 1 more, stage" in found.message or base is TP


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"PP602"}),
        ({"scale": "1/dp"}, set()),
        ({"reduction": "avg"}, set()),
        ({"reduction": "max"}, {"PP602"}),
    ],
)
def test_a_repeated_sum_of_a_known_gradient_is_wrong_where_its_value_is(values, expected):
    """No other gradient of the stage has as many elements as the embedding's."""
    one = mutated(DP, behind("0REDUCE_GRAD:dp", 0, **values))
    assert own(one) == expected
    if expected:
        assert "`embed.weight`: 0REDUCE_GRAD:dp/15.ALL_REDUCE:dp" in only(one, "PP602").message


def test_an_expert_gradient_that_is_summed_over_ep_once_more():
    experts = [weight for weight in EP.plan.weights_of(0, 0) if "experts" in weight.name]
    found = only(mutated(EP, behind("0REDUCE_GRAD:ep", -1, stop=512)), "PP613")
    assert f"sums 512 elements, as many as `{experts[0].name}` and 6 more have" in found.message
    name = f"grad[{experts[0].name}]"
    found = only(mutated(EP, behind("0REDUCE_GRAD:ep", -1, stop=512, writes=(name,))), "PP602")
    assert "adds up different parts of the weight, which is cut over ep" in found.message


BLOCK = "0F0 0B0 0REDUCE_GRAD:dp"
PARTS = "0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0 range=0..8} 0REDUCE_GRAD:dp/1.ALL_REDUCE:dp{group=0 range=8..16}"
AGAIN = "0REDUCE_GRAD:dp/2.ALL_REDUCE:dp{group=0 range=0..8}"


def two(text):
    """A program of two data-parallel ranks that do the same."""
    return program_subject(f"group dp: 0 1\nrank 0: {text}\nrank 1: {text}")


def test_a_range_that_is_summed_twice_without_facts():
    assert errors(two(f"{BLOCK} {PARTS} 0STEP")) == []
    found = only(two(f"{BLOCK} {PARTS} {AGAIN} 0STEP"), "PP602")
    assert "0REDUCE_GRAD:dp/2.ALL_REDUCE:dp sums over dp what is summed over dp already" in found.message


SUMMED = "0F0 0B0 0REDUCE_GRAD:dp{@dp}"
CALL = "{@dp writes=grad[bias]}"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (f"{SUMMED} 0ALL_REDUCE:dp{CALL} 0STEP", "0ALL_REDUCE:dp sums over dp what is summed over dp already"),
        (f"0F0 0B0 0B0/0.ALL_REDUCE:dp{CALL} 0REDUCE_GRAD:dp{{@dp}} 0STEP", "0B0/0.ALL_REDUCE:dp sums over dp what"),
        (f"{SUMMED} 0ALL_TO_ALL:dp{CALL} 0STEP", "0ALL_TO_ALL:dp puts other ranks' gradients in place"),
        (f"0F0 0B0 0BROADCAST:dp{CALL} 0REDUCE_GRAD:dp{{@dp}} 0STEP", "0BROADCAST:dp puts other ranks' gradients"),
        (f"0F0 0B0 0ALL_GATHER:dp{CALL} 0REDUCE_GRAD:dp{{@dp}} 0STEP", "0ALL_GATHER:dp puts other ranks' gradients"),
        (f"{SUMMED} 0ALL_REDUCE:dp{CALL[:-1]} reduction=max}} 0STEP", "0ALL_REDUCE:dp takes the maximum over dp"),
    ],
)
def test_a_collective_that_spoils_a_gradient_below_no_reduction(text, fact):
    found = only(model(text, facts(BIAS), dp=2), "PP613")
    assert fact in found.message
    assert "below no REDUCE_GRAD" in found.message
    assert fact.split()[0] in witnessed(found)


@pytest.mark.parametrize(
    "text",
    [
        f"0F0 0B0 0ALL_REDUCE:dp{CALL} 0STEP",  # it is the sum
        f"{SUMMED} 0ALL_REDUCE:dp{CALL} 0SCALE_GRAD{{scale=1/dp}} 0STEP",
        f"{SUMMED} 0ALL_REDUCE:dp{CALL[:-1]} reduction=avg}} 0STEP",
        f"{SUMMED} 0BROADCAST:dp{CALL} 0STEP",
        f"{SUMMED} 0BARRIER:dp{CALL} 0STEP",
        f"{SUMMED} 0ALL_REDUCE:dp{CALL.replace('writes', 'reads')[:-1]} writes=norm}} 0STEP",
    ],
)
def test_a_collective_that_leaves_the_sum_right_is_let_pass(text):
    assert own(model(text, facts(BIAS), dp=2)) == set()


def test_an_exchange_over_ranks_that_hold_other_parts_is_found():
    text = "0F0 0B0 0BROADCAST:tp{@tp writes=grad[%s]} 0REDUCE_GRAD:dp{@dp} 0STEP"
    assert own(model(text % "bias", facts(BIAS, DENSE), tp=2, dp=2)) == set()
    assert "`dense`" in only(model(text % "dense", facts(BIAS, DENSE), tp=2, dp=2), "PP613").message


SUM = "0REDUCE_GRAD:dp{@dp}"


@pytest.mark.parametrize(
    ("rows", "parameters", "sizes", "expected"),
    [
        # The scales of a reduction and of the collectives below it are multiplied.
        ("0REDUCE_GRAD:dp 0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{@dp}", [BIAS], {"dp": 2}, set()),
        ("0REDUCE_GRAD:dp{scale=1/2} 0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{@dp scale=2}", [BIAS], {"dp": 2}, set()),
        ("0REDUCE_GRAD:dp{scale=1/2} 0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{@dp}", [BIAS], {"dp": 2}, {"PP606"}),
        ("0REDUCE_GRAD:dp 0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{@dp scale=2}", [BIAS], {"dp": 2}, {"PP606"}),
        # Over an axis of one rank nothing is summed; scales apply.
        (f"0REDUCE_GRAD:tp{{@tp}} {SUM}", [NORM], {"tp": 1, "dp": 2}, set()),
        (f"0REDUCE_GRAD:tp{{@tp scale=2}} {SUM}", [NORM], {"tp": 1, "dp": 2}, {"PP606"}),
        (f"0REDUCE_GRAD:tp{{@tp scale=2}} 0SCALE_GRAD{{scale=1/2}} {SUM}", [NORM], {"tp": 1, "dp": 2}, set()),
        # Micro-batches that are added twice count twice, wherever they are all the same.
        (f"0B0 {SUM}", [BIAS], {"dp": 2}, {"PP605"}),
        (f"0F1 0B1 0B1 0B0 {SUM}", [BIAS], {"dp": 2}, {"PP605"}),
        (f"0F1 0B1 0B1 0B0 0SCALE_GRAD{{scale=1/2}} {SUM}", [BIAS], {"dp": 2}, set()),
        # A reduction that names no axis is over all axes of tokens, and scales once.
        *(
            (f"0REDUCE_GRAD{scale}", [BIAS], sizes, expected)
            for sizes in ({"dp": 2}, {"dp": 2, "cp": 2}, {"dp": 2, "cp": 2, "ep": 2})
            for scale, expected in (("", set()), ("{scale=2}", {"PP606"}), ("{scale=2} 0SCALE_GRAD{scale=1/2}", set()))
        ),
        ("0REDUCE_GRAD", [BIAS, EXPERTS], {"dp": 2, "ep": 2}, set()),  # but for those over which a weight is cut
        # Other kinds than sums: equal values may be copied, and a barrier moves nothing.
        (f"{SUM} 0BARRIER:dp{{@dp writes=grad[bias]}}", [BIAS], {"dp": 2}, set()),
        (f"{SUM} 0BROADCAST:dp{{@dp writes=grad[bias]}}", [BIAS], {"dp": 2}, set()),
        (f"0BROADCAST:dp{{@dp writes=grad[bias]}} {SUM}", [BIAS], {"dp": 2}, {"PP613"}),
        (f"{SUM} 0ALL_TO_ALL:dp{{@dp writes=grad[bias]}}", [BIAS], {"dp": 2}, {"PP613"}),
        (
            f"0REDUCE_GRAD:tp{{@tp}} 0BROADCAST:tp{{@tp writes=grad[norm]}} {SUM}",
            [NORM], {"tp": 2, "dp": 2}, set(),
        ),
        (
            f"{SUM} 0BROADCAST:tp{{@tp writes=grad[norm]}} 0REDUCE_GRAD:tp{{@tp}}",
            [NORM], {"tp": 2, "dp": 2}, {"PP613"},
        ),
    ],
)  # fmt: skip
def test_what_a_row_does_to_a_gradient(rows, parameters, sizes, expected):
    assert own(model(f"0F0 0B0 {rows} 0STEP", facts(*parameters), **sizes)) == expected
