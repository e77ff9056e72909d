"""A Dask cluster as the executor of a sweep (extra ``dask``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import ParamSpec, Protocol, TypeVar, cast

from pipeproof.analysis.sweep.cluster import (
    AT_LEAST_IN_FLIGHT,
    Cluster,
    ClusterError,
    installed_version,
    require_version,
)

_Params = ParamSpec("_Params")
_T = TypeVar("_T")

_TIMEOUT_S = 15
"""For the scheduler to answer, and for a first worker to be there."""
_LOOK_S, _GRACE_S = 0.5, 2.0
"""Interval of checks that the cluster is alive, and the time that its futures then have to report it themselves."""


@contextmanager
def open_dask(address: str, timeout_s: float = _TIMEOUT_S) -> Iterator[Cluster]:
    """Connect to a Dask scheduler.

    What is still under way is cancelled in the end; the cluster stays as it is.

    Raises:
        ClusterError: nobody answers in time, there is no worker, or workers lack pipeproof or have another version.
        ModuleNotFoundError: the ``distributed`` package is not installed.
    """
    from distributed import Client

    try:
        client = Client(address, timeout=timeout_s)
    except OSError as error:
        raise ClusterError(f"no Dask scheduler answers at {address} within {timeout_s:g} s") from error
    except ValueError as error:
        raise ClusterError(f"{address!r} is no address of a Dask scheduler: {error}") from error
    with client:
        try:
            client.wait_for_workers(1, timeout=timeout_s)
        except OSError as error:
            raise ClusterError(f"the cluster at {address} has no workers after {timeout_s:g} s") from error
        require_version(client.run(installed_version, on_error="return"))
        executor = cast(Executor, client.get_executor(pure=False))  # a point that is tried again is evaluated again
        watched = WatchedExecutor(executor, client)
        try:
            yield Cluster(watched, max(AT_LEAST_IN_FLIGHT, 2 * sum(client.nthreads().values())))
        finally:
            watched.shutdown()


class _HasStatus(Protocol):
    status: str


class WatchedExecutor(Executor):
    """An executor on a cluster, whose futures all end: with ``BrokenExecutor`` once ``client`` has closed.

    Dask's own do not always: one whose client loses its scheduler while it fetches the result is forgotten
    (``_cascade_future`` in distributed/cfexecutor.py), and its waiters never return.
    """

    def __init__(
        self, executor: Executor, client: _HasStatus, look_s: float = _LOOK_S, grace_s: float = _GRACE_S
    ) -> None:
        self._executor, self._client = executor, client
        self._look_s, self._grace_s = look_s, grace_s
        self._under_way: set[Future[object]] = set()
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def submit(self, function: Callable[_Params, _T], /, *args: _Params.args, **kwargs: _Params.kwargs) -> Future[_T]:
        """Submit a call."""
        if self._client.status == "closed":
            raise BrokenExecutor("the cluster has gone")
        future = self._executor.submit(function, *args, **kwargs)
        known = cast("Future[object]", future)
        self._under_way.add(known)
        known.add_done_callback(self._under_way.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT002
        """Look no further; the cluster stays as it is."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._look_s):
            if self._client.status == "closed" and not self._over.wait(self._grace_s):
                for future in list(self._under_way):
                    with suppress(InvalidStateError):  # it has ended by now
                        future.set_exception(BrokenExecutor("the cluster has gone"))
