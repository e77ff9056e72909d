"""Dropout masks that depend only on the element, not on the rank or the time of the draw.

The key of a mask is the run's seed, the step, the micro-batch (counted over all data ranks), the layer and the site in
it. The i-th 64-bit word of a counter-based generator (Philox, Salmon et al., SC 2011) belongs to the i-th element of
the whole tensor, so a part of a mask can be drawn without the rest.

The order of the whole tensor does not depend on that of activations: rows, then positions, then the elements of a
token; for attention rows, heads, queries, keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import micro_batch_size
from pipeproof.stages.describe.synthetic import key_of

DropoutMask = npt.NDArray[np.bool_]
"""True for elements that are kept."""
DropoutSite = Literal["embedding", "attention", "hidden"]

MASK_BYTES = 1
"""Bytes of an element of a mask that frameworks store from forward to backward."""

WORDS_OF_COUNT = 4
"""Words per count of the generator."""


def dropout_rate(plan: PlanSpec, site: DropoutSite) -> float:
    """The fraction of elements that is dropped at a site; 0 without dropout."""
    dropout = plan.gpt.dropout
    rate: float = 0.0 if dropout is None else getattr(dropout, site)
    return rate


def dropout_sites(plan: PlanSpec) -> frozenset[DropoutSite]:
    """The sites with dropout in the plan."""
    sites: tuple[DropoutSite, ...] = ("embedding", "attention", "hidden")
    return frozenset(site for site in sites if dropout_rate(plan, site))


def dropout_gain(rate: float) -> float:
    """The factor of kept elements, which preserves the mean."""
    return 1.0 / (1.0 - rate)


def draw_threshold(rate: float) -> int:
    """The least word of an element that is kept."""
    return round(rate * 2.0**64)


def mask_key(plan: PlanSpec, step: int, index: int, layer: str, site: str) -> int:
    """The key of a mask, 128 bits; ``index`` counts over all data ranks."""
    return key_of("dropout", plan.run.seed, step, index, layer, site)


@dataclass(frozen=True, slots=True)
class DropoutKeys:
    """The masks of one micro-batch of a step; ``index`` counts over all data ranks."""

    plan: PlanSpec
    step: int
    index: int

    def of_tokens(self, layer: str, rate: float, positions: tuple[int, int]) -> DropoutMask:
        """The mask of an activation between layers for those positions of every row: [B, S, H]."""
        size = micro_batch_size(self.plan, self.index % self.plan.schedule.num_micro_batches)
        shape = size.num_rows, size.seq_length, self.plan.gpt.hidden_size
        return self._kept("hidden", layer, rate, shape, [(0, size.num_rows), positions])

    def of_attention(self, layer: str, rate: float, heads: tuple[int, int], queries: tuple[int, int]) -> DropoutMask:
        """The mask of attention's probabilities for some heads and queries, and all earlier keys: [B, A, Q, S]."""
        size = micro_batch_size(self.plan, self.index % self.plan.schedule.num_micro_batches)
        length = size.seq_length
        shape = size.num_rows, self.plan.gpt.num_heads, length, length
        return self._kept("attention", layer, rate, shape, [(0, size.num_rows), heads, queries])[..., : queries[1]]

    def _kept(
        self, site: str, layer: str, rate: float, shape: Sequence[int], ranges: Sequence[tuple[int, int]]
    ) -> DropoutMask:
        """The mask of ``ranges`` of all dims except the last, which is whole."""
        key = mask_key(self.plan, self.step, self.index, layer, site)
        threshold = np.uint64(draw_threshold(rate))
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        *outer, (start, stop) = ranges
        run = (stop - start) * shape[-1]  # consecutive elements
        words = np.empty((*(b - a for a, b in outer), run), dtype=np.uint64)
        for index in np.ndindex(words.shape[:-1]):
            first = sum((a + i) * stride for (a, _), i, stride in zip(outer, index, strides, strict=False))
            words[index] = _words(key, first + start * shape[-1], run)
        return (words >= threshold).reshape([*words.shape[:-1], stop - start, shape[-1]])


def _words(key: int, first: int, num_words: int) -> npt.NDArray[np.uint64]:
    """``num_words`` words of the key's generator, from word ``first`` on."""
    generator = np.random.Philox(key=key)
    generator.advance(first // WORDS_OF_COUNT)
    skipped = first % WORDS_OF_COUNT
    words: npt.NDArray[np.uint64] = generator.random_raw(skipped + num_words)
    return words[skipped:]
