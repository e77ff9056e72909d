"""Programs without facts: the mesh and the gradients are guessed from their groups and rows."""

import pytest

from pipeproof.schedule.op_table import Group
from pipeproof.verify.subject import program_subject
from tests.verify.gradient_mutants import own
from tests.verify.programs import program

SUM = "0REDUCE_GRAD:dp{group=0}"


def four_ranks(factor):
    """Two stages on two ranks each. Those of stage 0 average and scale, each in its own way; those of stage 1 sum."""
    lines = [
        "group dp: 0 1",
        "group dp: 2 3",
        f"rank 0: 0F0 0B0 0REDUCE_GRAD:dp{{group=0 reduction=avg}} 0SCALE_GRAD{{scale={factor}}} 0STEP",
        f"rank 1: 0F0 0B0 0REDUCE_GRAD:dp{{group=0 reduction=avg scale={factor}}} 0STEP",
        "rank 2: 1F0 1B0 1REDUCE_GRAD:dp{group=1} 1STEP",
        "rank 3: 1F0 1B0 1REDUCE_GRAD:dp{group=1} 1STEP",
    ]
    return program_subject("\n".join(lines))


@pytest.mark.parametrize(("factor", "expected"), [("2", set()), ("dp", set()), ("4", {"PP606"}), ("1", {"PP606"})])
def test_a_sum_is_over_the_ranks_of_a_group_and_not_over_those_of_other_stages(factor, expected):
    assert own(four_ranks(factor)) == expected


@pytest.mark.parametrize(("sums", "expected"), [((SUM,), set()), ((), set()), ((SUM, SUM), {"PP602"})])
def test_a_rank_may_represent_all_of_its_group(sums, expected):
    """Without any reduction over dp, no reduction is expected."""
    text = " ".join(["0F0 0B0", *sums, "0STEP"])
    assert own(program(text, groups=[Group("dp", (0,), 4)])) == expected


def test_a_group_of_one_rank_is_no_sum_over_others():
    lines = ["group dp: 0", "group dp: 1"]
    lines += [f"rank {rank}: 0F0 0B0 0REDUCE_GRAD:dp{{group={rank}}} 0STEP" for rank in range(2)]
    assert own(program_subject("\n".join(lines))) == {"PP603"}
