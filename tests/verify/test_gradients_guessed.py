"""Programs without facts: the mesh and the gradients are what their groups and rows tell of."""

import pytest

from pipeproof.schedule.optable import Group
from pipeproof.verify.program import program_subject
from tests.verify.gradient_mutants import only, own
from tests.verify.programs import program

DP_SUM = "0F0 0B0 0REDUCE_GRAD:dp{group=0} 0STEP"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [(["group dp: 0 1"], set()), (["group dp: 0", "group dp: 1"], {"PP601"})],
)
def test_a_sum_over_the_ranks_of_a_group(groups, expected):
    """Two ranks; a group of one rank tells of no other, so that a sum over it sums nothing."""
    second = DP_SUM if len(groups) == 1 else DP_SUM.replace("group=0", "group=1")
    text = "\n".join([*groups, f"rank 0: {DP_SUM}", f"rank 1: {second}"])
    print(own(program_subject(text)))


def test_a_graph_whose_ranks_stand_for_several():
    assert own(program(DP_SUM, groups=[Group("dp", (0,), 4)])) == set()
    print(own(program(DP_SUM.replace("0REDUCE_GRAD:dp{group=0}", ""), groups=[Group("dp", (0,), 4)])))
    print(own(program(DP_SUM.replace("0REDUCE_GRAD:dp{group=0}", "0REDUCE_GRAD:dp{group=0} 0REDUCE_GRAD:dp{group=0}"), groups=[Group("dp", (0,), 4)])))


def test_ranks_of_other_stages_are_not_in_the_sum():
    """Stage 0's ranks average and multiply by two, each in its own way; stage 1's only sum."""
    text = """
        group dp: 0 1
        group dp: 2 3
        rank 0: 0F0 0B0 0REDUCE_GRAD:dp{group=0 reduction=avg} 0SCALE_GRAD{scale=SCALE} 0STEP
        rank 1: 0F0 0B0 0REDUCE_GRAD:dp{group=0 reduction=avg scale=SCALE} 0STEP
        rank 2: 1F0 1B0 1REDUCE_GRAD:dp{group=1} 1STEP
        rank 3: 1F0 1B0 1REDUCE_GRAD:dp{group=1} 1STEP
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    print(own(program_subject("\n".join(lines).replace("SCALE}", "2}"))))
    print(own(program_subject("\n".join(lines).replace("SCALE}", "4}"))))
    print(own(program_subject("\n".join(lines).replace("SCALE}", "dp}"))))
    assert 0
