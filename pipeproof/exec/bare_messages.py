"""Times bare messages over the channels that the plan itself will use."""

from __future__ import annotations

import time

from pipeproof.exec.bare import REPEATS, BareEnd, bare_sizes
from pipeproof.exec.framework import Arrays, World
from pipeproof.schedule.optable import OpGraph

_HEAD_START_S = 0.005
"""How long the receiver has, after the barrier, to post before the sender does."""


def bare_messages(world: World, arrays: Arrays, graph: OpGraph, *, on_device: bool = False) -> list[BareEnd]:
    """This rank's ends of all bare messages, channel by channel; every rank must call this.

    All ranks wait at a barrier before each message, so that no two are under way at once. Where the message is one
    of a device (``on_device``), whose host a wait does not hold, it has ended when the host has waited for the device.
    """
    ends = []
    for channel in graph.channels:
        for num_bytes in bare_sizes(graph):
            buffer = arrays.empty([num_bytes], "uint8")
            for _ in range(REPEATS):
                world.barrier()
                if world.rank not in (channel.src, channel.dst):
                    continue
                is_send = world.rank == channel.src
                if is_send:
                    time.sleep(_HEAD_START_S)
                transfer = world.channels.post(channel, buffer)
                transfer.wait()
                end_ns = transfer.end_ns
                if on_device:
                    arrays.synchronize()
                    end_ns = time.monotonic_ns()
                ends.append(BareEnd(str(channel), is_send, num_bytes, transfer.posted_ns, end_ns))
    return ends
