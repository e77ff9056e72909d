"""A Dask cluster as the executor of a sweep (extra ``cluster``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import cast

from pipeproof import __version__

_TIMEOUT_S = 15
"""For the scheduler to answer, and for a first worker to be there."""
_AT_LEAST = 64
"""Points handed over at once, however small the cluster is."""


class ClusterError(ValueError):
    """The cluster cannot be used; the message says why, and what to do."""


@contextmanager
def cluster_executor(address: str, timeout_s: float = _TIMEOUT_S) -> Iterator[tuple[Executor, int]]:
    """Connect to a Dask scheduler; an executor on its workers, and how many points to keep under way.

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
        yield executor, max(_AT_LEAST, 2 * sum(client.nthreads().values()))


def installed_version() -> str:
    """The version of pipeproof where this is called."""
    return __version__


def require_version(found: Mapping[str, object]) -> None:
    """Refuse workers that would not judge as we do.

    Raises:
        ClusterError: a worker has another version, or none.
    """
    other = {worker: version for worker, version in found.items() if version != __version__}
    if other:
        worker, version = next(iter(other.items()))
        what = f"pipeproof {version}" if isinstance(version, str) else f"no pipeproof ({version})"
        raise ClusterError(
            f"{len(other)} of {len(found)} workers are not of this version, {__version__}: {worker} has {what}; "
            "install the same on every worker"
        )
