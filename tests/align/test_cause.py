"""Causes of planted differences are guessed right, and a difference of another kind is not taken for one."""

import numpy as np
import pytest

from pipeproof.analysis.align.array_digests import md5_of, norm_of
from pipeproof.analysis.align.likely_cause import Family, guess, guess_from_norms
from pipeproof.analysis.align.read_record import Values
from pipeproof.analysis.align.record_format import Recorded, Shard

RNG = np.random.default_rng(7)
RIGHT = RNG.standard_normal((8, 6)).astype("f4")


def recorded(array, shards=()):
    return Recorded(0, "layer.0", array.shape, array.dtype.name, md5_of(array), norm_of(array), tuple(shards))


def cause(wrong, right=RIGHT, others=None):
    return guess(Values(wrong, others or {}), Values(right, {}), recorded(wrong), recorded(right))


def summed_in_another_order():
    parts = RNG.standard_normal((50, 8, 6)).astype("f4")
    forward, backward = parts[0], parts[-1]
    for part in parts[1:]:
        forward = forward + part
    for part in parts[-2::-1]:
        backward = backward + part
    return forward, backward


def nudged():
    wrong = RIGHT.copy()
    wrong[0, 0] += 0.5
    return wrong


@pytest.mark.parametrize(
    ("wrong", "family", "evidence"),
    [
        (RIGHT * 2, Family.SCALE, "are 2 of B's, exactly"),
        (RIGHT / 4, Family.SCALE, "are 1/4 of B's, exactly"),
        (RIGHT * np.float32(1 / 3), Family.SCALE, "are 1/3 of B's, to within"),
        (-RIGHT, Family.SCALE, "are -1 of B's"),
        (RIGHT[[1, 0, 2, 3, 4, 5, 6, 7]], Family.LAYOUT, "slices along dim 0, such as A's 0 which is B's 1"),
        (np.roll(RIGHT, 3, axis=1), Family.LAYOUT, "slices along dim 1, such as A's 0 which is B's 3"),
        (RIGHT.T.reshape(8, 6), Family.LAYOUT, "the same 48 values"),
        (np.concatenate([RIGHT[:4], RIGHT[:4]]), Family.LAYOUT, "24 of B's 48 are lost"),
        (nudged(), Family.UNKNOWN, "47 of 48 elements are equal"),
        (RIGHT * np.float32(np.pi), Family.SCALE, "are 3.141593 of B's"),
        (np.zeros_like(RIGHT), Family.UNKNOWN, "0 of 48 elements are equal"),
        (np.full_like(RIGHT, np.nan), Family.UNKNOWN, "48 elements of A and 0 of B are not finite"),
    ],
)
def test_of_values(wrong, family, evidence):
    found = cause(np.ascontiguousarray(wrong))
    assert found.family is family, found
    assert evidence in found.evidence


def test_the_order_of_a_sum():
    found = cause(*summed_in_another_order())
    assert found.family is Family.ACCUMULATION_ORDER
    assert "half of them by" in found.evidence


def test_ranks_that_hold_addends():
    addends = [RNG.standard_normal(6).astype("f4") for _ in range(3)]
    total = addends[0] + addends[1] + addends[2]
    found = cause(addends[0], total, {1: addends[1], 2: addends[2]})
    assert found.family is Family.MISSING_REDUCTION
    assert "3 ranks of A hold different tensors; their sum is B's" in found.evidence
    of_mean = cause(addends[0], total / 3, {1: addends[1], 2: addends[2]})  # as data parallelism reduces
    assert "3 ranks of A hold different tensors; their mean is B's" in of_mean.evidence
    assert cause(addends[0], total / 2, {1: addends[1], 2: addends[2]}).family is Family.UNKNOWN


def test_groups_of_ranks_that_hold_addends_and_have_summed_over_another_axis():
    first, second = RNG.standard_normal((2, 6)).astype("f4")
    found = cause(first, first + second, {2: second, 3: second.copy(), 6: second.copy()})
    assert found.family is Family.MISSING_REDUCTION
    assert "2 groups of ranks of A hold different tensors; their sum is B's" in found.evidence
    same = cause(first, first + 2 * second, {1: second, 2: second.copy()})  # three addends, two of them equal
    assert "3 ranks of A hold different tensors" in same.evidence


def test_rows_that_are_equal_are_counted_where_the_others_are_not_at_all():
    wrong = RIGHT.copy()
    wrong[2:5] *= np.float32(np.pi)
    assert "30 of 48 elements are equal, which are 5 of 8 rows along the last dim" in cause(wrong).evidence
    wrong = RIGHT.copy()
    wrong[:, 0] *= np.float32(np.pi)
    assert "40 of 48 elements are equal; norms" in cause(wrong).evidence
    assert "rows" not in cause(nudged()).evidence


def test_ranks_that_disagree_and_are_no_addends():
    a, b = RNG.standard_normal((2, 6)).astype("f4")
    shards = [Shard(0, md5_of(a), ((0, 6),)), Shard(1, md5_of(b), ((0, 6),))]
    found = guess(Values(a, {1: b}), Values(b, {}), recorded(a, shards), recorded(b))
    assert found.family is Family.UNKNOWN
    assert "ranks 0 and 1 of A hold different values of the same part" in found.evidence


def test_of_norms_alone():
    assert guess_from_norms(recorded(RIGHT * 2), recorded(RIGHT)).family is Family.SCALE
    assert guess_from_norms(recorded(RIGHT[::-1]), recorded(RIGHT)).family is Family.LAYOUT
    assert guess_from_norms(recorded(nudged()), recorded(RIGHT)).family is Family.UNKNOWN
    assert guess_from_norms(recorded(RIGHT * 0), recorded(RIGHT)).family is Family.UNKNOWN
    shards = [Shard(0, "a", ((0, 8), (0, 6))), Shard(1, "b", ((0, 8), (0, 6)))]
    assert guess_from_norms(recorded(RIGHT, shards), recorded(nudged())).family is Family.MISSING_REDUCTION
