"""One word from each rank to all others before a step posts anything: kind and sizes of the rank's arguments.

The words travel between hosts over TCP, also where the stages are on GPUs. A rank sends and receives a message in each
of log2(ranks) rounds (Bruck's allgather). gloo would send two messages for each, and wake a thread, because its
receiver first reports that it is ready. Here the kernel keeps the word until it is read, which costs less than an
operation of the step.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten

from pipeproof.foreign_text import decode_json

REFUSED = 0
"""The word of a rank that refuses its arguments."""
_MOST_WORDS = 1024
_PLAIN = (str, bool, type(None), torch.dtype)
_WORD = 8
"""Bytes of a word, and of the rank number at the start of a connection."""
_SECRET = 16
"""First bytes of each connection of a pipeline, by which a rank recognises it."""
_GREETING_S = 5.0
"""Time limit for the first bytes of a connection."""


@dataclass(frozen=True)
class Round:
    """One message to ``target`` and one from ``source``, with the first ``num_words`` words of each."""

    target: socket.socket
    source: socket.socket
    source_rank: int
    num_words: int

    def shut_down(self) -> None:
        """Wake threads that wait at either end of a connection, with an error."""
        for end in (self.target, self.source):
            with suppress(OSError):  # it has already ended
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this rank's ends."""
        self.target.close()
        self.source.close()


def connected_rounds(address: str, rank: int, num_ranks: int, store: dist.Store, timeout_s: float) -> tuple[Round, ...]:
    """Connect a rank with the ranks that it exchanges words with.

    ``address`` is the address of this rank's host on the network of the pipeline.

    Raises:
        RuntimeError: a rank did not connect in time, or cannot be reached.
    """
    steps = [1 << bit for bit in range((num_ranks - 1).bit_length())]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family, backlog=len(steps) + 8) as server:
            server.settimeout(timeout_s)
            secret = secrets.token_hex(_SECRET // 2)
            store.set(f"words/{rank}", json.dumps([address, server.getsockname()[1], secret]))
            targets = [_connected(store, rank, (rank - step) % num_ranks, timeout_s) for step in steps]
            sources = _accepted(server, secret.encode(), {(rank + step) % num_ranks for step in steps}, timeout_s)
    except OSError as error:
        raise RuntimeError(f"rank {rank} cannot exchange words with others over {address}: {error}") from None
    pairs = zip(steps, targets, strict=True)
    return tuple(
        Round(target, sources[(rank + step) % num_ranks], (rank + step) % num_ranks, min(step, num_ranks - step))
        for step, target in pairs
    )


def _connected(store: dist.Store, rank: int, target: int, timeout_s: float) -> socket.socket:
    address, port, secret = decode_json(store.get(f"words/{target}"))
    connection = socket.create_connection((address, port), timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(secret.encode() + struct.pack("<q", rank))
    return connection


def _accepted(server: socket.socket, secret: bytes, ranks: set[int], timeout_s: float) -> dict[int, socket.socket]:
    """The connections from these ranks; connections with other first bytes are closed."""
    accepted: dict[int, socket.socket] = {}
    while accepted.keys() != ranks:
        connection, _ = server.accept()
        connection.settimeout(_GREETING_S)
        greeting = b""
        with suppress(OSError):
            greeting = _received(connection, _SECRET + _WORD)
        if len(greeting) == _SECRET + _WORD and secrets.compare_digest(greeting[:_SECRET], secret):
            connection.settimeout(timeout_s)
            accepted[struct.unpack("<q", greeting[_SECRET:])[0]] = connection
        else:
            connection.close()
    return accepted


def _received(connection: socket.socket, size: int) -> bytes:
    """The next ``size`` bytes, fewer where the connection ends before."""
    received = connection.recv(size)
    while 0 < len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            break
        received += more
    return received


class RollCall:
    """The exchange of one rank. ``waits_for`` is called with the rank that this one waits for."""

    def __init__(self, rounds: Sequence[Round], waits_for: Callable[[int], None]) -> None:
        self._waits_for = waits_for
        self._rounds = [
            (each, struct.Struct(f"<{each.num_words}q"), each.num_words * _WORD) for each in rounds
        ]  # fmt: skip

    def exchange(self, word: int) -> tuple[int, ...]:
        """The words of all ranks, from this one's on.

        Raises:
            RuntimeError: the connection to a rank has ended.
        """
        words: tuple[int, ...] = (word,)
        for each, form, size in self._rounds:
            self._waits_for(each.source_rank)
            try:
                each.target.sendall(form.pack(*words[: each.num_words]))
                received = _received(each.source, size)
            except OSError as error:
                raise RuntimeError(f"the word of rank {each.source_rank}: {error}") from None
            if len(received) < size:
                raise RuntimeError(f"the connection to rank {each.source_rank} was closed")
            words += form.unpack(received)
        return words


class Words:
    """The words of one rank. With ``has_values`` the word depends on numbers, which a replayed step contains."""

    def __init__(self, *, has_values: bool) -> None:
        self._has_values = has_values
        self._by_form: dict[Hashable, int] = {}

    def word(self, *values: Any) -> int:
        """The word of a step's arguments: equal for equal structures, shapes and types, in every process."""
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
