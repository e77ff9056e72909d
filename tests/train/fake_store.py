"""A store in memory whose ranks are threads: ``agreement``, ``stall_watch`` and ``clock_offsets`` need no more."""

import threading
import time


class FakeStore:
    """An ``agreement.Store``; ``end`` makes it fail as the store of a process that has ended."""

    def __init__(self):
        self._values, self._changed, self._is_lost = {}, threading.Condition(), False

    def end(self):
        self._is_lost = True

    def set(self, key, value):
        self._require_there()
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key, timeout_s):
        self._require_there()
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimeoutError(key)
            return self._values[key]

    def has(self, key):
        self._require_there()
        return key in self._values

    def remove(self, key):
        self._require_there()
        with self._changed:
            del self._values[key]

    def add(self, key, amount=0):
        self._require_there()
        with self._changed:
            self._values[key] = self._values.get(key, 0) + amount
            return self._values[key]

    def part(self, prefix):
        return _Part(self, prefix)

    def of_thread(self):
        return self

    def keys(self):
        return set(self._values)

    def _require_there(self):
        if self._is_lost:
            raise ConnectionError("closed")


class _Part:
    """A store with a prefix of all keys."""

    def __init__(self, store, prefix):
        self._store, self._prefix = store, prefix

    def __getattr__(self, name):
        if name == "of_thread":
            return lambda: self
        return lambda key, *values: getattr(self._store, name)(self._prefix + key, *values)


def wait_until(condition, limit_s=20.0):
    """Wait for a condition of another thread; fail if it does not come."""
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.005)


def on_ranks(num_ranks, work):
    """Result or error of ``work(rank)`` on each rank, each in a thread of its own."""
    results = [None] * num_ranks

    def run(rank):
        try:
            results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 - the result
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for ever"
    return results
