"""One of two processes that the doctor probes a backend with: runs what it is sent on an endpoint.

Started by ``exec.pair`` as ``python -m pipeproof.exec.<framework>.endpoint FD``
with the environment of its rank. It says over the connection FD that it has
imported the framework, joins its peer once told to, says that it is ready,
then runs each body it is sent and answers with the outcome. When the
connection closes it ends, even if a call to the framework blocks.
"""

from __future__ import annotations

import os
import pickle
import queue
import resource
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from pipeproof.testing.endpoint import Body, Endpoint, Outcome

EXIT_ALONE = 3


def serve(arguments: list[str], start: Callable[[], None], make_endpoint: Callable[[], Endpoint]) -> NoReturn:
    """Start the framework, join, and serve bodies until the connection closes, which ends the process."""
    connection = Connection(int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some probes abort: leave no core file
    inbox = _inbox(connection)
    try:
        start()
        connection.send("imported")
        inbox.get()
        endpoint = make_endpoint()
    except Exception as error:  # noqa: BLE001 - whatever an import or a framework raises is told
        connection.send(_one_line(error))
        os._exit(EXIT_ALONE)
    connection.send("ready")
    while True:
        connection.send(_outcome(inbox.get(), endpoint))


def _outcome(pickled_body: bytes, endpoint: Endpoint) -> Outcome:
    try:
        body: Body = pickle.loads(pickled_body)  # noqa: S301 - from the process that started this one
        return Outcome("returned", body(endpoint))
    except Exception as error:  # noqa: BLE001 - whatever a framework raises is the outcome
        return Outcome("raised", detail=_one_line(error))


def _one_line(error: BaseException) -> str:
    """The error's first telling line, without the place in Paddle's source that follows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = next((line for line in lines if "Error: " in line), lines[0])
    return f"{type(error).__name__}: {line.partition(' (at ')[0]}"


def _inbox(connection: Connection) -> queue.SimpleQueue[bytes]:
    """What arrives, read by a thread that ends this process when the other side is gone."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                inbox.put(connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(EXIT_ALONE)

    threading.Thread(target=read, name="lifeline", daemon=True).start()
    return inbox
