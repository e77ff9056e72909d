"""Times bare messages over the channels that the plan itself will use."""

from __future__ import annotations

import time

import paddle
import paddle.distributed as dist

from pipeproof.exec.bare import REPEATS, BareEnd, bare_sizes
from pipeproof.exec.paddle_comm import PaddleWorld
from pipeproof.schedule.optable import OpGraph

_HEAD_START_S = 0.005
"""How long the receiver has, after the barrier, to post before the sender does."""


def bare_messages(world: PaddleWorld, graph: OpGraph) -> list[BareEnd]:
    """This rank's ends of all bare messages, channel by channel; every rank must call this.

    All ranks wait at a barrier before each message, so that no two are under way at once.
    """
    ends = []
    for channel in graph.channels:
        for num_bytes in bare_sizes(graph):
            for _ in range(REPEATS):
                dist.barrier()
                if world.rank not in (channel.src, channel.dst):
                    continue
                buffer = paddle.zeros([num_bytes], dtype="uint8")
                is_send = world.rank == channel.src
                if is_send:
                    time.sleep(_HEAD_START_S)
                transfer = world.channels.post(channel, buffer)
                transfer.wait()
                ends.append(BareEnd(str(channel), is_send, num_bytes, transfer.posted_ns, transfer.end_ns))
    return ends
