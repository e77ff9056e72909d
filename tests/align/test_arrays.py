"""Distances between floating-point numbers, and the MD5 that records show."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.analysis.align.array_digests import FAR, max_relative, max_ulps, md5_of, norm_of, ulps_between

WIDTHS = {"float16": 16, "float32": 32, "float64": 64}


@pytest.mark.parametrize("dtype", WIDTHS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_ulps_count_the_steps_of_nextafter(dtype, data):
    start = data.draw(st.floats(-1e4, 1e4, width=WIDTHS[dtype]).filter(lambda number: number != 0))
    x = np.array([start], dtype=dtype)
    y, zeros = x.copy(), 0
    steps = data.draw(st.integers(0, 20))
    for _ in range(steps):
        y = np.nextafter(y, np.array(np.inf, dtype=dtype))
        zeros += int(y[0] != 0 and np.signbit(x[0]) and not np.signbit(y[0]) and not zeros)
    # on its way over zero, nextafter passes by one of the two zeros
    assert max_ulps(x, y) == max_ulps(y, x) == steps + zeros


def test_the_two_zeros_are_other_bits():
    assert max_ulps(np.array([0.0], "f4"), np.array([-0.0], "f4")) == 1


def test_what_is_not_finite_is_far_unless_it_has_the_same_bits():
    a = np.array([np.nan, np.inf, 1.0], "f8")
    b = np.array([np.nan, 1.0, 1.0], "f8")
    assert list(ulps_between(a, b)) == [0, FAR, 0]
    assert max_ulps(a, b) == FAR
    assert max_relative(a, b) == math.inf


def test_the_farthest_float64s_do_not_wrap_round():
    largest = np.finfo("f8").max
    assert max_ulps(np.array([-largest]), np.array([largest])) == np.iinfo(np.int64).max


def test_relative_is_of_the_largest_element():
    assert max_relative(np.array([1.0, 0.5]), np.array([4.0, 0.5])) == 0.75
    assert max_relative(np.zeros(2), np.zeros(2)) == 0.0
    assert max_relative(np.ones(2), np.zeros(2)) == math.inf
    assert max_relative(np.zeros(0), np.zeros(0)) == 0.0
    assert max_relative(np.array([3e38], "f4"), np.array([-3e38], "f4")) == 2.0  # in float64


def test_md5_is_of_the_elements_in_order_and_little_endian():
    array = np.arange(6, dtype="f4").reshape(2, 3)
    expected = hashlib.md5(array.tobytes()).hexdigest()
    assert md5_of(array) == md5_of(np.asfortranarray(array)) == md5_of(array.astype(">f4")) == expected
    assert md5_of(array.T) != expected


def test_norm():
    assert norm_of(np.array([3.0, 4.0], "f4")) == 5.0
