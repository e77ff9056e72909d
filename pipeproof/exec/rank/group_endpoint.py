"""Common part of both frameworks' endpoint processes: calls on a two-rank group, and the loop that serves probes.

``exec.measure.endpoint_pair`` starts ``python -m pipeproof.exec.rank.<framework>.endpoint FD DEVICE`` with the
environment of its rank. Over the connection FD the process reports that it has imported the framework, joins its peer
on request, and reports that it is ready. Then it runs each body that it receives and answers with the outcome. It ends
when the connection closes, even if a call of the framework blocks.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from pipeproof.exec.rank.framework_protocol import Arrays, World
from pipeproof.schedule.op_table import Channel
from pipeproof.testing.endpoint_protocol import EDGES, Array, Body, Endpoint, Handle, Outcome

# ruff: noqa: D102 - `Endpoint` documents the methods


PAUSE_S = 0.1
_POLL_S = 1e-5
"""Sleep of the host between two polls of a device's transfer."""
CHANNELS = tuple(Channel(name, src, dst) for name, (src, dst) in EDGES.items())
"""Channels of the adapter's posts, with the names of the edges."""


@dataclass(frozen=True, slots=True)
class _Waitable:
    """A transfer under way, its tensor, and the function that blocks the host until it is done."""

    request: Any
    tensor: Any
    finish: Callable[[Any], None]

    def wait(self) -> Array:
        self.finish(self.request)
        return numpy_of(self.tensor)


class GroupEndpoint(ABC):
    """A framework's calls on a two-rank group, and the adapter's posts.

    ``library`` is the framework and ``dist`` its communication. On a GPU (``on_device``) calls return before they are
    done, so the host waits after a blocking call.
    """

    def __init__(self, world: World, arrays: Arrays, library: Any, dist: Any, group: Any, *, on_device: bool) -> None:
        self.rank, self._world, self._arrays = world.rank, world, arrays
        self._library, self._dist, self._group, self._on_device = library, dist, group, on_device
        self._channels = {channel.communicator: channel for channel in CHANNELS}

    def clock_ns(self) -> int:
        """Return the kernel's monotonic clock, which all processes of a machine share."""
        return time.monotonic_ns()

    def pause(self) -> None:
        time.sleep(PAUSE_S)

    def send(self, array: Array, peer: int) -> None:
        self._dist.send(self._tensor(array), dst=peer, group=self._group)
        self._arrays.synchronize()

    def recv(self, into: Array, peer: int) -> Array:
        tensor = self._tensor(into)
        self._dist.recv(tensor, src=peer, group=self._group)
        return numpy_of(tensor)

    def post_send(self, array: Array, edge: str) -> Handle:
        return self._post(array, edge)

    def post_recv(self, into: Array, edge: str) -> Handle:
        return self._post(into, edge)

    def barrier(self) -> None:
        self._dist.barrier()

    def facts(self) -> dict[str, str]:
        """Return facts about the framework and this rank's device, by name; none on a CPU.

        ``kernels`` is the error of a product with a known result, empty if it is right.
        """
        if not self._on_device:
            return {}
        kernels = ""
        try:
            self._require_kernels()
        except RuntimeError as error:
            kernels = str(error)
        return {**self._device_facts(), "kernels": kernels}

    @abstractmethod
    def _device_facts(self) -> dict[str, str]:
        """Return versions, the name of the device and the number of GPUs."""

    @abstractmethod
    def _require_kernels(self) -> None:
        """Raise RuntimeError if kernels do not compute on this rank's device."""

    def _post(self, array: Array, edge: str) -> Handle:
        transfer: Any = self._world.channels.post(self._channels[edge], self._tensor(array))
        return _Waitable(transfer.work if self._on_device else transfer, transfer.buffer, self._finish)

    def _finish(self, request: Any) -> None:
        """Block the host until a transfer is done.

        On a device the wait would block the compute stream and so all later posts, also posts of other edges. In a plan
        a post follows a computation; here there is no computation.
        """
        if not self._on_device:
            request.wait()
            return
        while not request.is_completed():
            time.sleep(_POLL_S)

    @abstractmethod
    def _tensor(self, array: Array) -> Any:
        """Return a tensor of the framework on this rank's device, with its own memory."""


def numpy_of(tensor: Any) -> Array:
    """Return the values of a tensor; the host waits for a device."""
    array: Array = tensor.cpu().numpy()
    return array


EXIT_ALONE = 3


def serve(arguments: list[str], start: Callable[[], None], make_endpoint: Callable[[], Endpoint]) -> NoReturn:
    """Start the framework, join, and serve bodies until the connection closes, which ends the process."""
    connection = Connection(int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some probes abort: leave no core file
    inbox = _inbox(connection)
    try:
        start()
        connection.send("imported")
        inbox.get()
        endpoint = make_endpoint()
    except Exception as error:  # noqa: BLE001 - any error of an import or a framework is reported
        connection.send(_one_line(error))
        os._exit(EXIT_ALONE)
    connection.send("ready")
    while True:
        connection.send(_outcome(inbox.get(), endpoint))


def _outcome(pickled_body: bytes, endpoint: Endpoint) -> Outcome:
    try:
        body: Body = pickle.loads(pickled_body)  # noqa: S301 - from the parent process
        return Outcome("returned", body(endpoint))
    except Exception as error:  # noqa: BLE001 - any error of the framework is an outcome
        return Outcome("raised", detail=_one_line(error))


def _one_line(error: BaseException) -> str:
    """First informative line of an error, without the position in Paddle's source that follows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = next((line for line in lines if "Error: " in line), lines[0])
    return f"{type(error).__name__}: {line.partition(' (at ')[0]}"


def _inbox(connection: Connection) -> queue.SimpleQueue[bytes]:
    """Queue of received bodies; its thread ends this process when the connection closes."""
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                inbox.put(connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(EXIT_ALONE)

    threading.Thread(target=read, name="lifeline", daemon=True).start()
    return inbox
