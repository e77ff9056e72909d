"""Part of the store with which Paddle's processes found each other, for the pipelines of a script."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from pipeproof.exec.launch.launcher_table import PADDLE, value_of
from pipeproof.exec.store.paddle_store import Alone, PaddleStore, send_at_once
from pipeproof.exec.train.train_errors import PipelineError

_COUNTS: Counter[str] = Counter()
"""Pipelines of each group that this process has made: all members make them in one order."""


def store_of(ranks: Sequence[int]) -> PaddleStore:
    """A part of the world's store for the next pipeline of some global ranks, over a connection of its own.

    Raises:
        PipelineError: Paddle's distributed environment has no store.
    """
    name = ".".join(map(str, ranks))
    _COUNTS[name] += 1
    prefix = f"pipeproof/{name}/{_COUNTS[name]}/"
    if len(ranks) == 1:
        return PaddleStore(Alone(), prefix)
    host, port = store_address()
    client: Any = paddle.base.core.TCPStore(host, port, False, dist.get_world_size())  # noqa: FBT003 - not the master
    send_at_once({port})
    return PaddleStore(client, prefix)


def store_address() -> tuple[str, int]:
    """Host and port at which rank 0's store listens, as ``init_parallel_env`` finds them.

    Raises:
        PipelineError: the environment does not have them, or has no valid ones.
    """
    try:
        host, port = value_of(PADDLE.master_host, os.environ), value_of(PADDLE.master_port, os.environ)
    except ValueError as error:
        raise PipelineError(str(error)) from error
    if host is None or port is None:
        raise PipelineError("there is no PADDLE_MASTER: start the script with `python -m paddle.distributed.launch`")
    return host, port
