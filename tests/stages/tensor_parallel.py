"""Tensor-parallel ranks in one process, for tests: threads that take turns, and collectives in memory.

Only one rank runs at any time: it keeps the world's lock until it waits inside
a collective. So Paddle is never entered by two threads, and a run is as
deterministic as the ranks are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import paddle

WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective as a rank issued it, in the words of the layers' description."""

    kind: str
    numel: int
    label: str
    reduction: str = "sum"


class InMemoryRank:
    """One rank's ``TensorParallelCollectives``; ``issued`` lists what it was asked for."""

    def __init__(self, world: InMemoryWorld, rank: int) -> None:
        self._world, self.rank = world, rank
        self.issued: list[Issued] = []

    def all_reduce(self, tensor: paddle.Tensor, *, label: str, reduction: str = "sum") -> paddle.Tensor:
        combine = {"sum": paddle.add, "max": paddle.maximum}[reduction]
        return self._combine("all_reduce", tensor, label, combine, reduction)

    def all_gather(self, tensor: paddle.Tensor, dim: int, *, label: str) -> paddle.Tensor:
        return paddle.concat(self._exchange(Issued("all_gather", tensor.size, label), tensor), axis=dim)

    def reduce_scatter(self, tensor: paddle.Tensor, dim: int, *, label: str) -> paddle.Tensor:
        total = self._combine("reduce_scatter", tensor, label, paddle.add, "sum")
        return paddle.split(total, self._world.num_ranks, axis=dim)[self.rank].contiguous()

    def _combine(
        self, kind: str, tensor: paddle.Tensor, label: str, combine: Callable[..., Any], reduction: str
    ) -> paddle.Tensor:
        total, *others = self._exchange(Issued(kind, tensor.size, label, reduction), tensor)
        for other in others:
            total = combine(total, other)
        return total

    def _exchange(self, call: Issued, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        assert tensor.is_contiguous(), f"{call.label}: a transport would refuse a strided tensor"
        self.issued.append(call)
        return self._world.exchange(self.rank, call, tensor.detach().clone())


class InMemoryWorld:
    """``num_ranks`` ranks; ``run`` gives each a thread."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.ranks = [InMemoryRank(self, rank) for rank in range(num_ranks)]
        self._turn = threading.Condition()
        self._put: dict[int, tuple[Issued, paddle.Tensor]] = {}
        self._taken: list[paddle.Tensor] = []
        self._num_rounds = 0
        self._failure: BaseException | None = None

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """``work(rank)`` on every rank; the results in rank order. Raises what the first failing rank raised."""
        results: list[Any] = [None] * self.num_ranks

        def on_rank(rank: int) -> None:
            with self._turn:
                try:
                    results[rank] = work(rank)
                except BaseException as error:  # noqa: BLE001 - `run` raises it in the caller's thread
                    self._failure = self._failure or error
                    self._turn.notify_all()

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def exchange(self, rank: int, call: Issued, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        """Every rank's tensor in rank order, once all have issued the same collective."""
        self._put[rank] = (call, tensor)
        if len(self._put) == self.num_ranks:
            calls = {issued for issued, _ in self._put.values()}
            if len(calls) > 1:
                raise AssertionError(f"ranks issued different collectives: {calls}")
            self._taken = [self._put[r][1] for r in range(self.num_ranks)]
            self._put.clear()
            self._num_rounds += 1
            self._turn.notify_all()
            return self._taken
        awaited = self._num_rounds + 1
        self._turn.wait_for(lambda: self._num_rounds >= awaited or self._failure is not None, timeout=WAIT_S)
        if self._num_rounds < awaited:
            raise self._failure or TimeoutError(f"rank {rank} waits alone in {call}")
        return self._taken
