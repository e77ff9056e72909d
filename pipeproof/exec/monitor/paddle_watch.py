"""Watch of a Paddle rank: its collectives and messages in a ring that another process reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import _GroupManager

from pipeproof.exec.monitor.ring import CAPACITY
from pipeproof.exec.monitor.ring_recorder import RingRecorder, Watch, ring_directory
from pipeproof.interop.traces.paddle_calls import PaddleCalls


def watch(
    group: Any = None, directory: str | Path | None = None, *, shared: bool = False, capacity: int = CAPACITY
) -> Watch:
    """Record the collectives and messages of this rank in ``directory/rank_N.ring``, until the program ends.

    Call it once on every rank, after ``paddle.distributed.init_parallel_env``
    or ``fleet.init``. Then ``pipeproof job hang --follow DIRECTORY`` names the
    cause of a hang.

    Args:
        group: the group to record; None for all groups of the rank.
        directory: directory of the rings, the same on all ranks; default ``$PIPEPROOF_WATCH``, or ``pipeproof-rings``.
        shared: the directory is on a file server that monitors on other hosts read.
        capacity: operations that the ring keeps.

    Raises:
        OSError: the ring cannot be created.
        ValueError: the parallel environment is not initialised, or the capacity is not positive.
    """
    if not dist.is_initialized():
        raise ValueError("watch needs process groups: call paddle.distributed.init_parallel_env first")
    recorder = RingRecorder(
        ring_directory(directory), dist.get_rank(), dist.get_world_size(), f"paddle {paddle.__version__}",
        only=None if group is None else frozenset({str(group.id)}), shared=shared, capacity=capacity,
    )  # fmt: skip
    return Watch(recorder, _WatchedCalls(recorder))


class _WatchedCalls(PaddleCalls):
    """Calls of the groups that Paddle knows; other ranks cannot find other groups by name.

    ``pipeproof.paddle.Pipeline`` has such other groups, and writes its messages itself.
    """

    def _call(
        self, method: str, on_stream: bool, function: Callable[..., Any], group: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if all(paddle_group.process_group is not group for paddle_group in _GroupManager.group_map_by_id.values()):
            return function(group, *args, **kwargs)
        return super()._call(method, on_stream, function, group, *args, **kwargs)
