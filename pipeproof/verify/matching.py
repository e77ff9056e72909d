"""3xx: sends and receives meet by their place in the FIFO, and nothing else.

There are no tags on NCCL (and none that Paddle lets a user set on gloo): the
k-th send of a channel meets the k-th receive, whatever they hold. The rules
judge pairs that the graph has matched that way; ``fifo.py`` has
the same matching as it is defined, on the networkx graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.schedule.ops import KIND_CODE, KINDS, SEND_KINDS
from pipeproof.schedule.optable import NONE
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, OpsWitness
from pipeproof.verify.pairs import PARTNER, Pairs, channel_text, partner_of, rank_of
from pipeproof.verify.subject import Rule, Subject, finding

UNMATCHED = RuleDoc(
    code="PP301",
    title="a send or receive has no counterpart",
    severity="error",
    explanation=(
        "A channel carries more sends than receives, or more receives than sends. The surplus operation waits "
        "for a peer that never comes: the job hangs, or an eager backend leaves a message behind that the next "
        "step will receive. Two ends that name different communicators are on different channels."
    ),
    wrong="rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1}\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0",
    right=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"
    ),
)


def _check_unmatched(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    transfers = np.flatnonzero(graph.channel != NONE)
    is_send = graph.is_kind(SEND_KINDS)
    counts = [
        np.bincount(graph.channel[transfers[is_send[transfers] == side]], minlength=len(graph.channels))
        for side in (True, False)
    ]
    for index in np.flatnonzero(counts[0] != counts[1]).tolist():
        channel, num_sends, num_receives = graph.channels[index], int(counts[0][index]), int(counts[1][index])
        more_sends = num_sends > num_receives
        mine = transfers[(graph.channel[transfers] == index) & (is_send[transfers] == more_sends)]
        surplus = mine[min(num_sends, num_receives) :].tolist()
        missing_rank = graph.global_rank[channel.dst if more_sends else channel.src]
        first = graph.ops[surplus[0]]
        yield finding(
            UNMATCHED,
            f"channel {channel_text(graph, index)} has {num_sends} sends and {num_receives} receives; "
            f"{first} on rank {rank_of(graph, surplus[0])} never meets a counterpart",
            help=f"add {partner_of(first)} to rank {missing_rank}, or remove {first}",
            witness=OpsWitness(tuple(subject.witness_op(op_id) for op_id in surplus)),
        )


IDENTITY = RuleDoc(
    code="PP302",
    title="the k-th send of a channel meets a receive that means another tensor",
    severity="error",
    explanation=(
        "Both sides agree in size, so no backend notices: the receiver takes one micro-batch's tensor for "
        "another's, an activation for a gradient (two ranks with several stages each are both next and previous to "
        "one another), or the mask for the positions. Training goes on with wrong values."
    ),
    wrong=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F1{peer=0} 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 WAIT(1RECV_F1) 1F1"
    ),
    right=(
        "rank 0: 0F0 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} WAIT(0SEND_F0) WAIT(0SEND_F1)\n"
        "rank 1: 1RECV_F0{peer=0} 1RECV_F1{peer=0} WAIT(1RECV_F0) 1F0 WAIT(1RECV_F1) 1F1"
    ),
)


def _check_identity(subject: Subject) -> Iterator[Finding]:
    graph, pairs = subject.graph, Pairs(subject.graph)
    kind_of_partner = np.arange(len(KINDS))
    step = np.zeros(len(KINDS), dtype=np.int64)
    for kind, (partner, towards) in PARTNER.items():
        kind_of_partner[KIND_CODE[kind]] = KIND_CODE[partner]
        step[KIND_CODE[kind]] = towards
    send, receive = pairs.send, pairs.receive
    other = (
        (graph.kind[receive] != kind_of_partner[graph.kind[send]])
        | (graph.stage[receive] != graph.stage[send] + step[graph.kind[send]])
        | (graph.unit[receive] != graph.unit[send])
    )
    other_member = pairs.differ(lambda tensor: tensor.member)
    for sent, received in pairs.where(other | other_member):
        meant = partner_of(graph.ops[sent])
        of_sent = of_received = ""
        if graph.ops[received] == meant:  # so that the members differ, and both ends name a tensor
            of_sent, of_received = (f" of `{graph.tensors[int(graph.tensor[i])].member}`" for i in (sent, received))
        yield finding(
            IDENTITY,
            f"on channel {channel_text(graph, int(graph.channel[sent]))} the send at FIFO position "
            f"{int(graph.position[sent])} is {graph.ops[sent]}{of_sent} and means {meant}, but the receive there is "
            f"{graph.ops[received]}{of_received}",
            help="issue the receives in the order of the sends; a FIFO has no tags to tell them apart",
            witness=OpsWitness((subject.witness_op(sent), subject.witness_op(received))),
        )


RULES = (Rule(UNMATCHED, _check_unmatched), Rule(IDENTITY, _check_identity))
