"""Ranks in one process, for tests: threads that run one at a time.

A rank keeps the lock until it waits for another. So no framework is entered by two threads, and a run is as
deterministic as the ranks are.
"""

import threading

WAIT_S = 60.0


class RankThreads:
    """The lock of the ranks, and the first error on one of them."""

    def __init__(self):
        self.turn = threading.Condition(threading.Lock())  # a rank may run in a thread of its turns, which waits too
        self.failure = None

    def run(self, work, num_ranks):
        """``work(rank)`` of each rank, in a thread; the results in rank order. Raises the first error."""
        results = [None] * num_ranks

        def on_rank(rank):
            with self.turn:
                try:
                    results[rank] = work(rank)
                except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                    self.failure = self.failure or error
                    self.turn.notify_all()

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        return results

    def wait_for(self, come, awaited="a transfer or a collective"):
        """Let other ranks run until ``come()``."""
        is_over = self.turn.wait_for(lambda: come() or self.failure is not None, timeout=WAIT_S)
        assert is_over, f"a rank waits alone in {awaited}"
        assert self.failure is None
