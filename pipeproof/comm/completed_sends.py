"""Sends that are known to have ended before the plan waits for them, so that their memory can be given back.

A plan waits for the sends of gradients at the end of the step, because an earlier wait could delay the rank. But a
message from a peer that had received one of ours before it sent proves that ours has ended: after the wait for that
message, a wait for our send takes no time.
"""

from __future__ import annotations

from collections import defaultdict

from pipeproof.schedule.op_table import NONE, EdgeKind, OpGraph
from pipeproof.schedule.ops import RECV_KINDS, SEND_KINDS


def completed_sends(graph: OpGraph, rank: int) -> dict[int, tuple[int, ...]]:
    """By wait for a receive of a rank, the sends of that rank that have ended then; ids of the graph's operations.

    Sends for which the plan waits before that, and sends of which it is not known, are left out.
    """
    wait_of = {int(graph.waits_for[op_id]): op_id for op_id in range(graph.num_ops) if graph.waits_for[op_id] != NONE}
    own = graph.rank_ops(rank)
    sent: dict[int, list[tuple[int, int]]] = defaultdict(list)
    received: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for send, receive in graph.edges[EdgeKind.MATCH].tolist():
        if (
            graph.ops[send].kind not in SEND_KINDS
            or graph.ops[receive].kind not in RECV_KINDS
            or receive not in wait_of
        ):
            continue
        if send in own:
            sent[int(graph.rank[receive])].append((wait_of[receive], send))
        elif receive in own:
            received[int(graph.rank[send])].append((send, wait_of[receive]))
    completed: dict[int, tuple[int, ...]] = {}
    for peer, messages in received.items():
        ours, position = sorted(sent.get(peer, [])), 0
        for posted, wait in sorted(messages):
            known = []
            while position < len(ours) and ours[position][0] < posted:
                send = ours[position][1]
                if send < wait < wait_of.get(send, NONE):  # a deadlocked plan may order the send after its proof
                    known.append(send)
                position += 1
            if known:
                completed[wait] = (*completed.get(wait, ()), *known)
    return completed
