"""Which elements dropout keeps: a function of what an element is, never of who asks for it or when.

A mask is keyed by the run's seed, the step, the micro-batch (counted over all
data ranks), the layer and the place in it. Within a mask the i-th 64-bit word
of a counter-based generator (Philox, Salmon et al., SC 2011) belongs to the
i-th element of the whole tensor, so a part of a mask is drawn without the rest.

The whole tensor has one order, whatever that of activations is: rows, then
positions, then what a token has; for attention rows, heads, queries, keys.
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

Kept = npt.NDArray[np.bool_]
"""Which elements are kept."""
DropoutPlace = Literal["embedding", "attention", "hidden"]

MASK_BYTES = 1
"""Of an element of a mask, as frameworks keep it from the forward to the backward."""

_WORDS_OF_COUNT = 4
"""A count of the generator gives as many words."""


def dropout_rate(plan: PlanSpec, place: DropoutPlace) -> float:
    """The share of elements that is dropped there; 0 where the plan drops none."""
    dropout = plan.model.dropout
    rate: float = 0.0 if dropout is None else getattr(dropout, place)
    return rate


def dropped_places(plan: PlanSpec) -> frozenset[DropoutPlace]:
    """Where the plan drops anything."""
    places: tuple[DropoutPlace, ...] = ("embedding", "attention", "hidden")
    return frozenset(place for place in places if dropout_rate(plan, place))


def dropout_gain(rate: float) -> float:
    """What kept elements are multiplied by, so that the mean stays."""
    return 1.0 / (1.0 - rate)


@dataclass(frozen=True, slots=True)
class DropoutKeys:
    """The masks of one micro-batch of a step; ``index`` counts over all data ranks."""

    plan: PlanSpec
    step: int
    index: int

    def of_tokens(self, layer: str, rate: float, positions: tuple[int, int]) -> Kept:
        """Of what lies between layers, those positions of every row: [B, S, H]. ``layer`` names the place, too."""
        size = micro_batch_size(self.plan, self.index % self.plan.schedule.num_micro_batches)
        shape = size.num_rows, size.seq_length, self.plan.model.hidden_size
        return self._kept("hidden", layer, rate, shape, [(0, size.num_rows), positions])

    def of_attention(self, layer: str, rate: float, heads: tuple[int, int], queries: tuple[int, int]) -> Kept:
        """Of attention's probabilities, those heads and queries, with all keys up to the last query: [B, A, Q, S]."""
        size = micro_batch_size(self.plan, self.index % self.plan.schedule.num_micro_batches)
        length = size.seq_length
        shape = size.num_rows, self.plan.model.num_heads, length, length
        return self._kept("attention", layer, rate, shape, [(0, size.num_rows), heads, queries])[..., : queries[1]]

    def _kept(
        self, place: str, layer: str, rate: float, shape: Sequence[int], ranges: Sequence[tuple[int, int]]
    ) -> Kept:
        """The elements in ``ranges`` of all dims but the last, which is whole."""
        key = key_of("dropout", self.plan.run.seed, self.step, self.index, layer, place)
        threshold = np.uint64(round(rate * 2.0**64))
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        *outer, (start, stop) = ranges
        run = (stop - start) * shape[-1]  # elements that stand side by side
        words = np.empty((*(b - a for a, b in outer), run), dtype=np.uint64)
        for at in np.ndindex(words.shape[:-1]):
            first = sum((a + i) * stride for (a, _), i, stride in zip(outer, at, strides, strict=False))
            words[at] = _words(key, first + start * shape[-1], run)
        return (words >= threshold).reshape([*words.shape[:-1], stop - start, shape[-1]])


def _words(key: int, first: int, num_words: int) -> npt.NDArray[np.uint64]:
    """``num_words`` words of the key's generator from word ``first`` on."""
    generator = np.random.Philox(key=key)
    generator.advance(first // _WORDS_OF_COUNT)
    skipped = first % _WORDS_OF_COUNT
    words: npt.NDArray[np.uint64] = generator.random_raw(skipped + num_words)
    return words[skipped:]
