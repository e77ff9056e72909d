"""A rank that lacks a sum over an axis is named, where other ranks have it: not the first that reads a wrong sum."""

import pytest

from tests.plans import subject
from tests.verify.gradient_mutants import drop
from tests.verify.programs import errors, mutated

TIED = subject(topology={"dp": 2}, model={"tied_embedding": True}).unfolded()
DUAL = subject(topology={"dp": 2}, schedule={"kind": "dualpipe"}).unfolded()
DP = subject(topology={"dp": 2, "tp": 2}).unfolded()


def without(base, part, *ranks):
    """The base without some rows, on some ranks."""

    def change(rows):
        for rank in ranks:
            drop(part)([rows[rank]])

    return mutated(base, change)


@pytest.mark.parametrize("base", [TIED, DUAL])
@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ((0, 2), "rank 0 (pp 0, dp 0) and 1 more,"),
        ((1, 3), "rank 1 (pp 0, dp 1) and 1 more,"),
        ((3,), "rank 3 (pp 1, dp 1),"),
        ((0, 1, 2), "rank 0 (pp 0, dp 0) and 2 more,"),
        ((0, 1, 2, 3), "rank 0 (pp 0, dp 0) and 3 more,"),
    ],
)
def test_the_replica_without_a_sum_over_copies_is_named(base, ranks, named):
    (found,) = (one for one in errors(without(base, "REDUCE_GRAD:pp", *ranks)) if one.code == "PP608")
    assert found.message.startswith(named)
    assert {one.rank for one in found.witness.ops} <= set(ranks)
    assert ("as other ranks do" in found.message) == (len(ranks) < 4)


def test_the_rank_without_a_sum_over_its_axis_is_named():
    (found,) = (one for one in errors(without(DP, "1REDUCE_GRAD:dp/2.", 7)) if one.code == "PP601")
    assert found.message.startswith("rank 7 (pp 1, dp 1, tp 1), gradient of `layer.2.attn.out.weight`:")
    assert "does not take part in the sum over dp" in found.message
    assert {one.rank for one in found.witness.ops} == {7}
