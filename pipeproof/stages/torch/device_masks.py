"""Dropout masks as operations on the device, with the bits of ``stages.describe.synthetic``.

The states of the generators are a tensor that each step finds in the same memory. So a graph that reads it, of a stage
or of a whole step, draws the masks of the step in which it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer import Layer, is_empty
from pipeproof.stages.describe.mtp_streams import MTP, is_mtp, num_modules
from pipeproof.stages.describe.synthetic import WORDS_OF_COUNT, DropoutKeys, draw_threshold, mask_key

Tensor: TypeAlias = torch.Tensor

_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_KEY_STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
"""Constants of Philox4x64 (Salmon et al., SC 2011), which numpy has with ten rounds."""
_ROUNDS = 10
_LOW = (1 << 32) - 1


class MaskStates:
    """The generators of the masks of ``layers``, for each micro-batch of a step."""

    def __init__(self, plan: PlanSpec, layers: Sequence[Layer], device: torch.device) -> None:
        masks = dict.fromkeys(_masks_of(plan, layers))
        self.positions: Mapping[tuple[str, str], int] = {mask: number for number, mask in enumerate(masks)}
        """The position of each site and layer among the states of a micro-batch."""
        self._plan, self._first = plan, 0
        sizes = plan.schedule.num_micro_batches, len(self.positions), 2
        self._values = torch.zeros(sizes, dtype=torch.int64, device=device)

    def load(self, step: int, first: int) -> None:
        """Put the states of a step in place, of the micro-batches from ``first`` on over all data ranks."""
        self._first = first
        states = [
            [state_of(mask_key(self._plan, step, first + number, layer, site)) for site, layer in self.positions]
            for number in range(len(self._values))
        ]
        self._values.copy_(torch.tensor(states))

    def of(self, index: int) -> Tensor:
        """The states of a micro-batch of the step that is loaded, int64 [masks, 2]."""
        return self._values[index - self._first]


def _masks_of(plan: PlanSpec, layers: Sequence[Layer]) -> Iterator[tuple[str, str]]:
    """The site and the layer of every mask that layers may draw."""
    for name in (layer.name for layer in layers):
        if name == "embed":  # it may embed for all modules
            yield "hidden", name
            yield from (("hidden", f"{MTP}.{number}.embed") for number in range(num_modules(plan.gpt)))
        elif name not in ("norm", "head") and not is_empty(name):
            if is_mtp(name):
                yield "hidden", f"{name}.embed"
            yield from (("attention", f"{name}.attn"), ("hidden", f"{name}.attn"), ("hidden", f"{name}.mlp"))


@dataclass(frozen=True, slots=True)
class DeviceMasks(DropoutKeys):
    """Masks that the device draws from ``states`` of a micro-batch, which may be traced."""

    states: Tensor
    positions: Mapping[tuple[str, str], int]

    def _kept(self, site: str, layer: str, rate: float, shape: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Any:
        return kept(self.states[self.positions[site, layer]], rate, shape, ranges)


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
    least = -(2**63)  # the order of words without a sign is that of words with one whose highest bit is flipped
    are_whole = shape[-1] % WORDS_OF_COUNT == 0  # the words of a count are neighbours
    counts = (index[..., ::WORDS_OF_COUNT] if are_whole else index) // WORDS_OF_COUNT
    of_counts = torch.stack([(words ^ least) >= (threshold ^ least) for words in _words(state, counts)], -1)
    return (
        of_counts.flatten(-2) if are_whole else of_counts.gather(-1, (index % WORDS_OF_COUNT).unsqueeze(-1)).squeeze(-1)
    )


def _kept_on_gpu(state: Tensor, threshold: int, shape: Sequence[int], bounds: Sequence[int]) -> Tensor:
    if shape[-1] % WORDS_OF_COUNT:
        return _kept(state, threshold, shape, bounds)
    from pipeproof.stages.torch.mask_kernel import draw_mask  # Triton comes with PyTorch for GPUs

    return draw_mask(state, threshold, shape, bounds)


def _like(state: Tensor, threshold: int, shape: Sequence[int], bounds: Sequence[int]) -> Tensor:
    sizes = [stop - start for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]
    return state.new_empty(sizes, dtype=torch.bool)


_LIBRARY = torch.library.Library("pipeproof", "FRAGMENT")
_LIBRARY.define("dropout_mask(Tensor state, int threshold, int[] shape, int[] bounds) -> Tensor")
_LIBRARY.impl("dropout_mask", _kept, "CompositeExplicitAutograd")
_LIBRARY.impl("dropout_mask", _kept_on_gpu, "CUDA")
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
