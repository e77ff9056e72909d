"""Sizes of the types that tensors have."""

from __future__ import annotations

import re


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element, by the bits that a type's name ends with (``bfloat16``); one without takes 1."""
    bits = re.search(r"\d+$", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
