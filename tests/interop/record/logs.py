"""Logs of programs that nobody ran: the recorder, with tensors that are only addresses."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path

from pipeproof.interop.traces.recorder import Call, Recorder, Tensor


class Rank:
    """One rank that writes its log; every tensor lies at an address of its own, unless one is given."""

    def __init__(self, directory: Path, rank: int, num_ranks: int = 2, *, framework="torch 2", backend="gloo"):
        self.recorder = Recorder(directory, rank, num_ranks, framework, lambda kept: kept["version"])
        self._ranks = range(num_ranks)
        self.backend = backend
        self._next = 0x1000

    def tensor(self, *shape: int, dtype="float32", at: int | None = None, strides: Sequence[int] = ()) -> Tensor:
        start = self._next if at is None else at
        self._next += 0x1000
        strides = tuple(strides) or tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return Tensor(shape, dtype, strides, start, start + 4 * prod(shape), 0, {"version": 0})

    def issue(self, call: Call) -> int:
        seq = self.recorder.call(call)
        self.recorder.issued(seq)
        return seq

    def group(self, ranks: Sequence[int] | None = None, name="0") -> str:
        self.recorder.group(name, list(ranks or self._ranks), self.backend)
        return name

    def send(self, peer: int, tensor: Tensor | None = None, **about) -> int:
        tensor = tensor or self.tensor(4)
        return self.issue(Call("send", self.group(), (tensor,), peer=peer, **about))

    def recv(self, peer: int, tensor: Tensor | None = None, **about) -> int:
        tensor = tensor or self.tensor(4)
        return self.issue(Call("recv", self.group(), outputs=(tensor,), peer=peer, **about))

    def collective(self, op: str, *shape: int, group: str | None = None, **about) -> int:
        tensor = (self.tensor(*shape),) if shape else ()
        return self.issue(Call(op, group or self.group(), tensor, tensor, **about))

    def wait(self, *seqs: int) -> None:
        self.recorder.waits(seqs)
        self.recorder.done(seqs)

    def end(self, error: BaseException | None = None) -> None:
        self.recorder.close(error)


def end(*of_ranks: Rank) -> None:
    for rank in of_ranks:
        rank.end()


def ranks(directory: Path, num_ranks: int = 2, **about) -> list[Rank]:
    return [Rank(directory, rank, num_ranks, **about) for rank in range(num_ranks)]
