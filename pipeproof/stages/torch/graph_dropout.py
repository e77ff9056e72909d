"""Dropout masks as operations on the device, with the bits of ``stages.describe.dropout``.

The states of the generators are a tensor, an input of the graph: so each run of a graph draws the masks of its own step
and micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.dropout import DropoutKeys, draw_threshold, mask_key

Tensor: TypeAlias = torch.Tensor

MASKS_PER_LAYER = 4
"""The most masks of a layer: an MTP module's embedding, attention's probabilities, and the outputs of both halves."""

_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
"""Constants of Philox4x64 (Salmon et al., SC 2011), which numpy has with ten rounds."""
_ROUNDS = 10
_LOW = (1 << 32) - 1
_WORDS = 4
"""Words of a count."""


class MaskStates:
    """The generators of the masks of a graph, in the order in which its trace draws them."""

    def __init__(self, plan: PlanSpec, num_layers: int, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._num_masks = MASKS_PER_LAYER * num_layers if plan.gpt.dropout is not None else 0
        self._drawn: list[tuple[str, str]] = []

    def begin(self) -> None:
        """Begin a trace."""
        self._drawn.clear()

    def add(self, site: str, layer: str) -> int:
        """Note a mask that is drawn; return its position."""
        self._drawn.append((site, layer))
        return len(self._drawn) - 1

    def of(self, step: int, index: int) -> list[Tensor]:
        """The states of a micro-batch as an input of the graph, int64 [masks, 2]; none without dropout."""
        if not self._num_masks:
            return []
        states = [state_of(mask_key(self._plan, step, index, layer, site)) for site, layer in self._drawn]
        states += [state_of(0)] * (self._num_masks - len(states))
        return [torch.tensor(states, dtype=torch.int64, device=self._device)]


@dataclass(frozen=True, slots=True)
class TracedMasks(DropoutKeys):
    """Masks that a trace draws from ``values``, the input of its graph."""

    values: Any
    states: MaskStates

    def _kept(self, site: str, layer: str, rate: float, shape: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Any:
        return kept(self.values[self.states.add(site, layer)], rate, shape, ranges)


def state_of(key: int) -> list[int]:
    """The two words of a key."""
    return [_signed(key & (2**64 - 1)), _signed(key >> 64)]


def kept(state: Tensor, rate: float, shape: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The mask of ``ranges`` of all dims except the last, which is whole: bool, for a state int64 [2].

    It is one operation of a graph: a compiler takes minutes for its hundreds of operations.
    """
    bounds = [bound for limits in (*ranges, (0, shape[-1])) for bound in limits]
    mask: Tensor = torch.ops.pipeproof.dropout_mask(state, _signed(draw_threshold(rate)), list(shape), bounds)
    return mask


def _kept(state: Tensor, threshold: int, shape: Sequence[int], bounds: Sequence[int]) -> Tensor:
    limits = list(zip(bounds[::2], bounds[1::2], strict=True))
    index = torch.zeros((), dtype=torch.int64, device=state.device)
    for dim, (start, stop) in enumerate(limits):
        places = torch.arange(start, stop, device=state.device) * math.prod(shape[dim + 1 :])
        index = index + places.view(-1, *[1] * (len(limits) - 1 - dim))
    if shape[-1] % _WORDS == 0:  # the words of a count are neighbours
        words = torch.stack(_words(state, index[..., ::_WORDS] // _WORDS), -1).flatten(-2)
    else:
        of_count = torch.stack(_words(state, index // _WORDS), -1)
        words = of_count.gather(-1, (index % _WORDS).unsqueeze(-1)).squeeze(-1)
    least = -(2**63)  # the order of words without a sign is that of words with one whose highest bit is flipped
    return (words ^ least) >= (threshold ^ least)


def _like(state: Tensor, threshold: int, shape: Sequence[int], bounds: Sequence[int]) -> Tensor:
    sizes = [stop - start for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]
    return state.new_empty(sizes, dtype=torch.bool)


_LIBRARY = torch.library.Library("pipeproof", "FRAGMENT")
_LIBRARY.define("dropout_mask(Tensor state, int threshold, int[] shape, int[] bounds) -> Tensor")
_LIBRARY.impl("dropout_mask", _kept, "CompositeExplicitAutograd")
torch.library.register_fake("pipeproof::dropout_mask", _like, lib=_LIBRARY)


def _words(state: Tensor, count: Tensor) -> list[Tensor]:
    """The four words of each count, as numpy's generator has them after ``advance(count)``."""
    first, second = state.unbind()
    zero = torch.zeros_like(count)
    words = [count + 1, zero, zero, zero]  # numpy counts before it draws
    for number in range(_ROUNDS):
        if number:
            first, second = first + _signed(_KEY_STEPS[0]), second + _signed(_KEY_STEPS[1])
        high, low = zip(*(_product(words[2 * n], _FACTORS[n]) for n in range(2)), strict=True)
        words = [high[1] ^ words[1] ^ first, low[1], high[0] ^ words[3] ^ second, low[0]]
    return words


def _product(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of products without a sign, by products of halves."""
    low, high = words & _LOW, (words >> 32) & _LOW
    factor_low, factor_high = factor & _LOW, factor >> 32
    first = high * factor_low + ((low * factor_low >> 32) & _LOW)
    second = low * factor_high + (first & _LOW)
    return high * factor_high + ((first >> 32) & _LOW) + ((second >> 32) & _LOW), words * _signed(factor)


def _signed(word: int) -> int:
    """The int64 with the bits of a word."""
    return word - 2**64 if word >= 2**63 else word
