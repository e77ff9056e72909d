"""One word of each rank to all others before a step posts anything: the kind and sizes of what the rank was given.

The words travel between hosts over gloo, also where the stages are on GPUs. A rank sends and receives a message in each
of log2(ranks) rounds (Bruck's allgather), which costs less than an operation of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

REFUSED = 0
"""The word of a rank that refuses its arguments."""
_MOST_WORDS = 1024
_PLAIN = (str, bool, type(None), torch.dtype)
_TAG = 0


class RollCall:
    """The exchange of one rank; ``backend`` returns a gloo backend of all ``num_ranks``, None for one rank.

    ``waits_for`` is called with the rank that this one waits for.
    """

    def __init__(self, backend: Callable[[], Any], rank: int, num_ranks: int, waits_for: Callable[[int], None]) -> None:
        self._backend, self._waits_for = backend, waits_for
        self._words = torch.zeros(num_ranks, dtype=torch.int64)
        self._rounds: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        held = 1
        while held < num_ranks:
            size = min(held, num_ranks - held)
            parts = self._words[:size], self._words[held : held + size]
            self._rounds.append(((rank - held) % num_ranks, (rank + held) % num_ranks, *parts))
            held *= 2

    def exchange(self, word: int) -> tuple[int, ...]:
        """The words of all ranks, from this one's on.

        Raises:
            RuntimeError: the connection to a rank has ended.
        """
        self._words[0], backend = word, self._backend()
        for target, source, own, others in self._rounds:
            received = backend.recv([others], source, _TAG)
            sent = backend.send([own], target, _TAG)
            self._waits_for(source)
            received.wait()
            sent.wait()
        return tuple(self._words.tolist())


class Words:
    """The words of one rank. With ``has_values`` another number is another word, as a replayed step contains it."""

    def __init__(self, *, has_values: bool) -> None:
        self._has_values = has_values
        self._by_form: dict[Hashable, int] = {}

    def word(self, *values: Any) -> int:
        """The word of what a step was given: equal for equal structures, shapes and types, in every process."""
        form = self._form(values)
        word = self._by_form.get(form)
        if word is None:
            if len(self._by_form) >= _MOST_WORDS:
                self._by_form.clear()
            digest = blake2b(repr(form).encode(), digest_size=8).digest()
            word = self._by_form[form] = (int.from_bytes(digest) >> 1) or 1
        return word

    def _form(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape)
        if isinstance(value, _PLAIN):
            return value
        kind = type(value).__qualname__
        if isinstance(value, tuple | list):
            return kind, tuple([self._form(item) for item in value])
        if isinstance(value, dict):
            return kind, tuple([(str(key), self._form(item)) for key, item in value.items()])
        if isinstance(value, int | float | complex):
            return (kind, value) if self._has_values else kind
        leaves, spec = tree_flatten(value)
        if spec.is_leaf():
            return kind, tuple(getattr(value, "shape", ()))
        return kind, str(spec), tuple([self._form(leaf) for leaf in leaves])
