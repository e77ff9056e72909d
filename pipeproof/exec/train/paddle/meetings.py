"""Meetings of both ends of a message, which wait for each other for as long as it takes.

Paddle's gloo gives up a message after 30 seconds, and a rank may wait much longer: for a data loader, or for another
rank's checkpoint. So both ends of a channel first exchange a byte over a socket, and gloo moves the message when both
are there. A peer that has gone is noticed at once.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence

from pipeproof.exec.launch.rendezvous import address_towards
from pipeproof.exec.rank.task_queue import TransfersEnded
from pipeproof.exec.train.agreement import Agreement
from pipeproof.exec.train.paddle.store import store_address
from pipeproof.exec.train.train_errors import PipelineError

_READY = b"1"
_CONNECT_S = 60.0


class Meeting:
    """This rank's end of one connection to a peer."""

    def __init__(self, end: socket.socket, peer: int) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(None)
        self._end, self._peer = end, peer

    def meet(self) -> None:
        """Wait until the peer calls this as often.

        Raises:
            TransfersEnded: the pipeline has failed meanwhile, or the peer has gone.
        """
        try:
            self._end.sendall(_READY)
            answer = self._end.recv(1)
        except OSError:
            answer = b""
        if answer != _READY:
            raise TransfersEnded(f"the peer, rank {self._peer}, has gone or has given up its transfers")

    def end(self) -> None:
        """Let nobody wait any more, on both sides."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)


def connect_meetings(pairs: Sequence[tuple[int, ...]], agreement: Agreement) -> dict[int, Meeting]:
    """Connect the pairs of ranks that have this one, by their position.

    Raises:
        PipelineError: a rank cannot connect; every rank raises it.
    """
    index = agreement.rank
    listeners: dict[int, socket.socket] = {}

    def listen() -> dict[str, tuple[str, int]]:
        own = address_towards(*store_address())
        for position, (_, second) in enumerate(pairs):
            if second == index:
                listeners[position] = socket.create_server((own, 0), backlog=1)
        return {str(position): listener.getsockname()[:2] for position, listener in listeners.items()}

    reports = agreement.gather("addresses", listen)
    addresses: Mapping[int, tuple[str, int]] = {
        int(position): (str(host), int(port)) for of_rank in reports for position, (host, port) in of_rank.items()
    }
    made: dict[int, Meeting] = {}

    def connect() -> None:
        for position, (first, second) in enumerate(pairs):
            if first == index:
                made[position] = Meeting(socket.create_connection(addresses[position], timeout=_CONNECT_S), second)
        for position, listener in listeners.items():
            with listener:
                listener.settimeout(_CONNECT_S)
                made[position] = Meeting(listener.accept()[0], pairs[position][0])

    try:
        agreement.gather("meetings", connect)
    except PipelineError:
        for meeting in made.values():
            meeting.end()
        raise
    return made
