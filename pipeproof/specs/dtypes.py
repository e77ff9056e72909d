"""Sizes of tensor types."""

from __future__ import annotations

import re


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element, from the bits at the end of a type's name (``bfloat16``); 1 without bits."""
    bits = re.search(r"\d+$", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
