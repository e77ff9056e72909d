"""The parts that all clusters share: an executor with its sizes, and the ways in which a cluster fails.

``dask_cluster``, ``ray_cluster`` and ``slurm_arrays`` open one kind each; ``executor_choice`` reads which one.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from pipeproof.version import __version__

AT_LEAST_IN_FLIGHT = 64
"""Calls submitted at once, for a cluster of any size."""


class ClusterError(ValueError):
    """The cluster cannot be used; the message gives the reason and the remedy."""


class TaskError(RuntimeError):
    """A call raised an exception on its worker; the message has the traceback from there."""


class WorkerDiedError(RuntimeError):
    """The worker of a call ended before the call did; the message has what is known about the reason."""


@dataclass(frozen=True)
class Cluster:
    """An open cluster: its executor, the most calls to have under way, and the points of one call."""

    executor: Executor
    num_in_flight: int
    chunk_size: int = 1


def installed_version() -> str:
    """The version of pipeproof where this is called."""
    return __version__


def require_version(found: Mapping[str, object]) -> None:
    """Raise an error for workers of another version, whose verdicts may differ.

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
