"""Parameters that the collectives below a REDUCE_GRAD sum: one each, several in a bucket, or all that are there."""

import dataclasses

import pytest

from pipeproof.schedule.ops import OpKind
from pipeproof.stages.describe.gradient_facts import Loss, ParameterGradient
from pipeproof.verify.subject import program_subject
from tests.plans import subject
from tests.verify.gradient_models import SUM, TWO_WAY_TEXT, facts, two_way
from tests.verify.gradient_mutants import drop, only, own
from tests.verify.programs import mutated


def is_part(row):
    return row.op.target is not None and row.op.target.kind is OpKind.REDUCE_GRAD


def bucketed(base, lengths):
    """The base with as many collectives below each REDUCE_GRAD as there are lengths, of so many elements."""

    def change(of_ranks):
        for program in of_ranks:
            mine = [row for row in program if is_part(row)]
            place = program.index(mine[0])
            program[:] = [row for row in program if not is_part(row)]
            program[place:place] = [
                dataclasses.replace(row, stop=length) for row, length in zip(mine, lengths, strict=False)
            ]

    return mutated(base, change)


BASE = subject(topology={"pp": 1, "dp": 2}, model={"num_layers": 1})
NUMELS = [row.stop for row in BASE.graph.rows()[0] if is_part(row)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([sum(NUMELS)], set()),  # one bucket for all
        ([sum(NUMELS) + 24], set()),  # padded
        ([sum(NUMELS[:3]), sum(NUMELS[3:5]), sum(NUMELS[5:]) + 8], set()),
        ([sum(NUMELS[:3]), sum(NUMELS[3:]), 8], {"PP613"}),  # one that has nothing left to sum
        ([sum(NUMELS[:3]) + 24, sum(NUMELS[3:]), 8], set()),  # padding leaves open what is in it
        ([sum(NUMELS[:3]) - 8, sum(NUMELS[3:]) + 8], set()),  # a border inside of a parameter
        ([sum(NUMELS[:3]) - 8, sum(NUMELS[3:])], {"PP614"}),
        ([*NUMELS[1:], NUMELS[0]], set()),  # in another order
        ([sum(NUMELS[:-1])], {"PP601"}),
        ([sum(NUMELS[:3]), sum(NUMELS[3:-1])], {"PP601"}),
        (NUMELS[:-1], {"PP601"}),
    ],
)
def test_a_bucket_takes_as_many_parameters_as_it_has_elements_for(lengths, expected):
    assert own(bucketed(BASE, lengths)) == expected


def with_parts(text, axis, num=1):
    """The text with each REDUCE_GRAD of an axis written as ``num`` collectives below it."""
    for stage in "01":
        for name in ("first", "last"):
            old = f"{stage}REDUCE_GRAD:{axis}{{@{axis} writes=grad[{name}]}}"
            new = " ".join(f"{stage}REDUCE_GRAD:{axis}/{i}.ALL_REDUCE:{axis}{{@{axis}}}" for i in range(num))
            text = text.replace(old, f"{stage}REDUCE_GRAD:{axis} {new}")
    return text


def test_a_collective_over_two_ranks_of_one_stage_sums_all_parameters_of_the_stage():
    """No weight has copies on several stages; the ranks share out the micro-batches of one."""
    text = with_parts(TWO_WAY_TEXT, "pp")
    assert "0REDUCE_GRAD:pp/0.ALL_REDUCE:pp" in text
    assert own(two_way(text)) == set()
    assert own(mutated(two_way(text), drop("0REDUCE_GRAD:pp"))) == {"PP608"}


def test_a_bucket_over_two_ranks_of_one_stage():
    given = facts(
        *(ParameterGradient(f"{name}{stage}", (stage,), numel=4) for stage in (0, 1) for name in "ab"),
        losses=(Loss("main", 1, SUM),),
    )
    text = with_parts(TWO_WAY_TEXT, "pp").replace("ALL_REDUCE:pp{", "ALL_REDUCE:pp{range=0..8 ")
    assert own(two_way(text, given)) == set()
    assert own(two_way(text.replace("range=0..8", "range=0..4"), given)) == {"PP608"}


def test_without_facts_the_collectives_below_one_reduction_are_parts_of_it():
    """The program does not declare the parameters: two of them need not sum the same gradient twice."""
    parts = "0REDUCE_GRAD:dp/0.ALL_REDUCE:dp{group=0} 0REDUCE_GRAD:dp/1.ALL_REDUCE:dp{group=0}"
    text = f"0F0 0B0 0REDUCE_GRAD:dp {parts} 0STEP"
    lines = ["group dp: 0 1", f"rank 0: {text}", f"rank 1: {text}"]
    assert own(program_subject("\n".join(lines))) == set()
    lines[1:] = [line.replace(parts, f"{parts} {parts}") for line in lines[1:]]
    only(program_subject("\n".join(lines)), "PP602")
