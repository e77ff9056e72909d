"""The operation that makes the first difference between two programs, and the tensors around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np

from pipeproof.analysis.align.array_digests import Array, largest
from pipeproof.analysis.align.record_format import WHOLE, Recorded
from pipeproof.analysis.align.record_map import Pair


@dataclass(frozen=True, slots=True)
class Operation:
    """The operation that makes a difference. ``are_inputs_equal`` is None if no record has them."""

    name: str
    are_inputs_equal: bool | None


def operation_of(first: Recorded, recorded: Sequence[Recorded], is_equal: Mapping[str, bool]) -> Operation:
    """The operation that makes the first tensor that differs; ``is_equal`` is by key of all tensors of the step."""
    layer = first.layer or "the model"
    if first.parameter:
        reads = [replace(t, parameter="").key for t in recorded if not t.parameter and t.layer == first.layer
                 and t.side == "input"]  # fmt: skip
        return Operation(f"the gradient of the weights of {layer}, or what is done to it later", _all(reads, is_equal))
    if first.side == "output":
        readers = [first.layer] if first.direction == "forward" else _readers(first, recorded)
        reads = [
            t.key for t in recorded
            if (t.parameter, t.direction, t.side, t.micro_batch) == ("", first.direction, "input", first.micro_batch)
            and t.layer in readers
        ]  # fmt: skip
        inner = [t.layer for t in recorded if t.layer.startswith(f"{first.layer}.") or first.layer == WHOLE != t.layer]
        shown = " or ".join(readers[:_MOST_READERS]) + " or others that read its input" * (len(readers) > _MOST_READERS)
        what = layer if first.direction == "forward" else f"the backward of {shown}"
        own = ", in its own code, after the modules in it" if inner and first.direction == "forward" else ""
        return Operation(f"{what}{own}", _all(reads, is_equal))
    parent = first.layer.rpartition(".")[0]
    while parent and not any(t.layer == parent for t in recorded):  # a list of modules is never called
        parent = parent.rpartition(".")[0]
    parent = parent or WHOLE
    if first.direction == "forward":
        return Operation(f"the code of {parent} before it calls {layer}", _before(first, recorded, is_equal))
    return Operation(
        f"the backward of what follows {layer}: the code of {parent}, or the loss", _before(first, recorded, is_equal)
    )


_MOST_READERS = 3


def _readers(first: Recorded, recorded: Sequence[Recorded]) -> list[str]:
    """Modules with the same input tensor as a module: its gradient is the sum over them."""
    reads = [t for t in recorded if not t.parameter and (t.direction, t.side) == ("forward", "input")
             and t.micro_batch == first.micro_batch]  # fmt: skip
    mine = next((t for t in reads if (t.layer, t.piece) == (first.layer, first.piece)), None)
    if mine is None or not mine.md5:
        return [first.layer]
    others = (t.layer for t in reads if (t.md5, t.shape) == (mine.md5, mine.shape))
    return [first.layer, *(name for name in dict.fromkeys(others)
                           if name not in (first.layer, WHOLE) and not first.layer.startswith(f"{name}."))]  # fmt: skip


def _all(keys: Sequence[str], is_equal: Mapping[str, bool]) -> bool | None:
    return all(is_equal[key] for key in keys) if keys else None


def _before(first: Recorded, recorded: Sequence[Recorded], is_equal: Mapping[str, bool]) -> bool | None:
    """True: nothing differs before the first difference; None if nothing was recorded before it."""
    position = next(i for i, t in enumerate(recorded) if t.key == first.key)
    return _all([t.key for t in recorded[:position]], is_equal)


class Surroundings:
    """The tensors of a step, as evidence for a cause: B's tensors with their partners."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs

    @cached_property
    def _by_key(self) -> Mapping[str, Pair]:
        return {pair[1].recorded.key: pair for pair in self._pairs}

    def near(self, tensor: Recorded, limit: int = 24) -> Iterator[tuple[str, Array]]:
        """Earlier tensors of a tensor's micro-batch and direction with its number of elements, the nearest first."""
        keys = list(self._by_key)
        titles: dict[str, str] = {}
        for _, made in self._pairs:
            tensor_b = made.recorded
            backward = "gradient at the " * (tensor_b.direction == "backward")
            titles.setdefault(tensor_b.md5, f"the {backward}{tensor_b.side} of {tensor_b.layer}")
        seen = set[str]()
        for key in reversed(keys[: keys.index(tensor.key)]):
            _, b = self._by_key[key]
            other = b.recorded
            same = (other.direction, other.micro_batch) == (tensor.direction, tensor.micro_batch)
            if not same or other.parameter or np.prod(other.shape) != np.prod(tensor.shape) or other.md5 in seen:
                continue
            values = b.values()
            if values is None or values.others or not np.issubdtype(values.whole.dtype, np.floating):
                continue
            seen.add(other.md5)
            yield titles[other.md5], values.whole
            if len(seen) == limit:
                return

    def parts(self, weight: Recorded, *, sizes: bool = False) -> list[Array]:
        """By micro-batch the addend of a linear layer's weight or bias in float64; ``sizes``: of absolute values.

        Empty if a record lacks the module's input or the gradients of its output.
        """
        parts = []
        for micro_batch in count():
            read = Recorded(weight.step, weight.layer, (), "", "", 0.0, (), "forward", "input", micro_batch)
            taken = replace(read, direction="backward")
            if read.key not in self._by_key or taken.key not in self._by_key:
                break
            values = [self._by_key[key][1].values() for key in (read.key, taken.key)]
            if values[0] is None or values[1] is None:
                return []
            wide, gradient = (
                v.whole.reshape(-1, v.whole.shape[-1]).astype(np.float64) for v in values if v is not None
            )
            if len(wide) != len(gradient):
                continue
            if sizes:
                wide, gradient = np.abs(wide), np.abs(gradient)
            if len(weight.shape) == 1:
                part = gradient.sum(axis=0)
            else:
                part = wide.T @ gradient if weight.in_first else gradient.T @ wide
            if part.shape != weight.shape:
                return []
            parts.append(part)
        return parts

    def cancellation(self, weight: Recorded, value: Array) -> float:
        """Ratio of the terms of a weight's gradient to their sum, at least one; computed in float64."""
        sizes = self.parts(weight, sizes=True)
        if not sizes:
            return 1.0
        total, most = largest(sum(sizes[1:], start=sizes[0])), largest(value)
        return max(1.0, total / most) if most > 0.0 else np.inf
