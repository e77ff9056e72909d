"""Ranks as threads of one process. Queues carry the values; operations are recorded in pipeproof's text form.

Sends never block here, so a program that hangs on a cluster runs to its end,
and its record shows the rules the order in which it would hang.
"""

import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

TIMEOUT_S = 60


class Handle:
    """A message under way; ``wait`` is recorded once and returns the value of a receive."""

    def __init__(self, ops, name, take):
        self._ops, self._name, self._take, self._value = ops, name, take, None

    def wait(self):
        if self._name:
            self._ops.append(f"WAIT({self._name})")
            self._value, self._name = self._take(), None
        return self._value


class RecordedRank:
    """Communication of one rank, which the runtime calls ``comm``."""

    def __init__(self, rank, num_ranks, queues):
        self.rank, self.num_ranks, self.ops = rank, num_ranks, []
        self._queues, self._num_batches, self._attributes = queues, 0, ""

    def isend(self, value, to, name):
        self.ops.append(name + self._attributes)
        self._queues[self.rank, to].put(value.copy())
        return Handle(self.ops, name, lambda: None)

    def irecv(self, source, name):
        self.ops.append(name + self._attributes)
        return Handle(self.ops, name, lambda: self._queues[source, self.rank].get(timeout=TIMEOUT_S))

    @contextmanager
    def batch(self):
        self._num_batches += 1
        self._attributes = f"{{batch={self._num_batches}}}"
        yield
        self._attributes = ""


def run(num_ranks, program):
    """Run ``program(comm)`` on every rank; return its results and the text of the ranks' operations."""
    queues = defaultdict(queue.Queue)
    ranks = [RecordedRank(rank, num_ranks, queues) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        results = list(pool.map(program, ranks))
    return results, "\n".join(f"rank {rank.rank}: {' '.join(rank.ops)}" for rank in ranks)
