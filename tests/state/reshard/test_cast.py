"""Casts against PyTorch's, for every pattern of 16 bits and for drawn ones of more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.state.byte_ranges import CAST_DTYPES, cast

BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


def is_nan(bits, dtype):
    return np.isnan(cast(bits, dtype, "float64").view(np.float64))


def test_a_float32_halfway_between_two_bfloat16_goes_to_the_even_one():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F80FFFF, 0x7F7FFFFF, 0xFF800000], np.uint32)
    assert [*map(hex, cast(bits, "float32", "bfloat16"))] == [
        "0x3f80",
        "0x3f82",
        "0x3f81",
        "0x3f81",
        "0x7f80",
        "0xff80",
    ]


def test_nan_stays_nan_whatever_is_cut_off():
    bits = np.array([0x7F800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    for dtype in CAST_DTYPES[:2]:
        assert is_nan(cast(bits, "float32", dtype), dtype).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_sixteen_bits_come_back_from_wider_types(dtype, wide):
    bits = np.arange(2**16, dtype=np.uint16)
    back = cast(cast(bits, dtype, wide), wide, dtype)
    assert ((back == bits) | is_nan(bits, dtype)).all()
    assert (is_nan(back, dtype) == is_nan(bits, dtype)).all()


@pytest.mark.needs_torch
@given(st.sampled_from(CAST_DTYPES), st.sampled_from(CAST_DTYPES), st.integers(0, 2**32))
def test_casts_are_those_of_torch(dtype, to, seed):
    torch = pytest.importorskip("torch")
    bits = np.random.default_rng(seed).integers(0, 2 ** BITS[dtype] - 1, 512, np.uint64, endpoint=True)
    bits = bits.astype(f"<u{BITS[dtype] // 8}")
    signed = bits.view(f"<i{BITS[dtype] // 8}").copy()
    theirs = torch.from_numpy(signed).view(getattr(torch, dtype)).to(getattr(torch, to))
    expected = theirs.view(getattr(torch, f"int{BITS[to]}")).numpy().view(f"<u{BITS[to] // 8}")
    made = cast(bits, dtype, to)
    assert ((made == expected) | (is_nan(made, to) & is_nan(expected, to))).all()
