"""A kernel for GPUs that draws dropout masks: Philox4x64 with ten rounds (Salmon et al., SC 2011), as numpy has it."""

# ruff: noqa: ANN001 - Triton has types of its own

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pipeproof.stages.describe.synthetic import WORDS_OF_COUNT

_BLOCK = 256
_DIMS = 4


def draw_mask(state: torch.Tensor, threshold: int, shape: Sequence[int], bounds: Sequence[int]) -> torch.Tensor:
    """The mask of ``device_masks.kept``, whose last dim has whole counts; at most four dims."""
    limits = list(zip(bounds[::2], bounds[1::2], strict=True))
    mask = torch.empty([stop - start for start, stop in limits], dtype=torch.bool, device=state.device)
    missing = _DIMS - len(shape)
    sizes, starts = [1] * missing + list(mask.shape), [0] * missing + [start for start, _ in limits]
    whole = [1] * missing + list(shape)
    counts = whole[3] // WORDS_OF_COUNT
    strides = whole[1] * whole[2] * counts, whole[2] * counts, counts
    num_counts = mask.numel() // WORDS_OF_COUNT
    grid = (triton.cdiv(num_counts, _BLOCK),)
    _draw[grid](mask, state, threshold, num_counts, *sizes[1:3], counts, *starts[:3], *strides, block=_BLOCK)
    return mask


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]  # noqa: ANN202
    mask, state, threshold, num_counts, size_1, size_2, num_in_row, start_0, start_1, start_2,
    stride_0, stride_1, stride_2, block: tl.constexpr,
):  # fmt: skip
    """Each element draws the four words of one count; sizes are of the part, strides of the whole in counts."""
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_inside = place < num_counts
    row = place // num_in_row
    at_0, at_1, at_2 = row // size_2 // size_1, row // size_2 % size_1, row % size_2
    count = (at_0 + start_0) * stride_0 + (at_1 + start_1) * stride_1 + (at_2 + start_2) * stride_2 + place % num_in_row
    key_0 = tl.load(state).to(tl.uint64, bitcast=True)
    key_1 = tl.load(state + 1).to(tl.uint64, bitcast=True)
    factor_0 = tl.full([block], 0xD2E7470EE14C6C93, tl.uint64)
    factor_1 = tl.full([block], 0xCA5A826395121157, tl.uint64)
    word_0 = (count + 1).to(tl.uint64)  # numpy counts before it draws
    word_1 = tl.full([block], 0, tl.uint64)  # `tl.zeros` cannot be interpreted once Triton was imported to compile
    word_2, word_3 = word_1, word_1
    for _ in tl.static_range(10):
        high_0, high_1 = tl.umulhi(word_0, factor_0), tl.umulhi(word_2, factor_1)
        low_0, low_1 = word_0 * factor_0, word_2 * factor_1
        word_0, word_1 = high_1 ^ word_1 ^ key_0, low_1
        word_2, word_3 = high_0 ^ word_3 ^ key_1, low_0
        key_0 = key_0 + 0x9E3779B97F4A7C15
        key_1 = key_1 + 0xBB67AE8584CAA73B
    limit = tl.cast(threshold, tl.int64).to(tl.uint64, bitcast=True)
    target = mask + 4 * place
    tl.store(target, word_0 >= limit, mask=is_inside)
    tl.store(target + 1, word_1 >= limit, mask=is_inside)
    tl.store(target + 2, word_2 >= limit, mask=is_inside)
    tl.store(target + 3, word_3 >= limit, mask=is_inside)
