"""A Ray cluster as the executor of a sweep (extra ``ray``)."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from pipeproof.analysis.sweep.cluster import (
    AT_LEAST_IN_FLIGHT,
    Cluster,
    ClusterError,
    TaskError,
    WorkerDiedError,
    installed_version,
    require_version,
)

_Params = ParamSpec("_Params")
_T = TypeVar("_T")

_ANSWER_S = 15
"""For a connection to the address."""
_START_S = 60
"""For the first worker process to start."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""Ray colours the first line of a traceback."""


@contextmanager
def open_ray(address: str | None = None, timeout_s: float = _ANSWER_S) -> Iterator[Cluster]:
    """Connect to a Ray cluster; without an address, to that of this machine or of ``RAY_ADDRESS``.

    If this process is connected already, that connection is used, and stays open. What is still under way is cancelled
    in the end; the cluster stays as it is.

    Raises:
        ClusterError: nobody answers in time, or its workers lack pipeproof or have another version.
        ModuleNotFoundError: the ``ray`` package is not installed.
    """
    import ray

    ours = not ray.is_initialized()
    if ours:
        _connect(address, timeout_s)
    try:
        executor = RayExecutor()
        try:
            _require_worker(executor)
            num_cpus = int(ray.cluster_resources().get("CPU", 0))
            yield Cluster(executor, max(AT_LEAST_IN_FLIGHT, 2 * num_cpus))
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
    finally:
        if ours:
            ray.shutdown()


def _connect(address: str | None, timeout_s: float) -> None:
    import ray
    from ray.exceptions import RayError

    if address is not None:
        try:
            parts = urlsplit(address if "//" in address else f"//{address}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if host is None or port is None or parts.scheme not in {"", "ray"}:
            raise ClusterError(f"{address!r} is no address of a Ray cluster: write HOST:6379, or ray://HOST:10001")
        try:  # Ray itself tries for minutes, and may end the process
            socket.create_connection((host, port), timeout_s).close()
        except OSError as error:
            raise ClusterError(f"no Ray cluster answers at {address} within {timeout_s:g} s: {error}") from error
    try:
        ray.init(address or "auto", log_to_driver=False, logging_level="ERROR")
    except (ImportError, OSError, RuntimeError, ValueError, RayError) as error:  # ConnectionError is an OSError
        where = address or "a cluster of this machine"
        raise ClusterError(
            f"Ray refuses the connection to {where} (of a cluster with a token, set RAY_AUTH_MODE=token): {error}"
        ) from error


def _require_worker(executor: RayExecutor) -> None:
    """Call a worker process, so that a missing package is one error, not one for each point."""
    try:
        version = executor.submit_with(installed_version, num_cpus=0).result(_START_S)
    except TimeoutError as error:
        raise ClusterError(f"the Ray cluster has started no worker within {_START_S} s") from error
    except (TaskError, BrokenExecutor) as error:
        raise ClusterError(f"Ray's workers cannot run pipeproof: install the same version there\n{error}") from error
    require_version({"the first": version})


class RayExecutor(Executor):
    """Calls as Ray tasks of one CPU each, in the connection of this process."""

    def __init__(self) -> None:
        import ray

        # A call that ended its worker is not repeated here: the sweep repeats it once, alone.
        self._remote = ray.remote(max_retries=0)(_run)
        self._under_way: dict[Future[Any], Any] = {}
        """Futures with their object references."""

    def submit(self, function: Callable[_Params, _T], /, *args: _Params.args, **kwargs: _Params.kwargs) -> Future[_T]:
        """Submit a call. If it raises, the error is a ``TaskError`` with the traceback of the worker."""
        return self.submit_with(partial(function, *args, **kwargs))

    def submit_with(self, call: Callable[[], _T], num_cpus: int = 1) -> Future[_T]:
        """Submit a call with this many CPUs."""
        reference = self._remote.options(num_cpus=num_cpus).remote(call)
        future: Future[_T] = Future()
        self._under_way[future] = reference
        future.add_done_callback(self._ended)
        reference.future().add_done_callback(partial(_copy, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT002
        """Wait for the calls, or cancel them, running ones included; the connection stays open."""
        for future in list(self._under_way):
            if cancel_futures:
                future.cancel()
            elif wait:
                future.exception()

    def _ended(self, future: Future[Any]) -> None:
        reference = self._under_way.pop(future)
        if future.cancelled():
            import ray

            ray.cancel(reference, force=True)


def _run(call: Callable[[], _T]) -> _T:
    return call()


def _copy(future: Future[_T], done: Future[_T]) -> None:
    """End ``future`` as Ray's own has ended."""
    error = done.exception()
    with suppress(InvalidStateError):  # it was cancelled
        if error is None:
            future.set_result(done.result())
        else:
            future.set_exception(_translated(error))


def _translated(error: BaseException) -> Exception:
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):
        return TaskError(_COLOURS.sub("", str(error)))
    if isinstance(error, exceptions.WorkerCrashedError | exceptions.OutOfMemoryError | exceptions.NodeDiedError):
        return WorkerDiedError(str(error))
    return BrokenExecutor(f"{type(error).__name__}: {error}")
