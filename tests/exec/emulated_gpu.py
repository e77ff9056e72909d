"""The driver's functions for peer memory and stream words, on host memory: streams are queues that move at random.

``emulate`` replaces the driver and PyTorch's streams, so that the rest is the code of a GPU: addresses are of host
memory, and a handle is an address.
"""

import contextlib
import ctypes
import random
import threading
import time
from collections import deque

import torch

from pipeproof.exec.rank.torch import copy_channels

WAIT_S = 20.0
HOST_MEMORY_ALREADY_REGISTERED = 712


class EmulatedDriver(copy_channels.Driver):
    """All streams of all ranks; ``refuses`` has the status of functions that fail."""

    def __init__(self, seed=0):
        self.lock, self.random = threading.RLock(), random.Random(seed)
        self.queues, self.memory, self.refuses, self.pause = {}, [], {}, lambda: time.sleep(0.0005)
        self.registered = set()
        self.functions = {name: self._function(name) for name in copy_channels._SIGNATURES}
        self._library = self

    def cuGetErrorName(self, status, text):  # noqa: N802 - the driver's name
        text._obj.value = f"CUDA_ERROR_{status}".encode()

    def _function(self, name):
        def call(*arguments):
            if name in self.refuses:
                return self.refuses[name]
            with self.lock:
                return getattr(self, f"_{name}")(*arguments) or 0

        return call

    def _cuMemAlloc_v2(self, address, num_bytes):  # noqa: N802
        memory = (ctypes.c_uint8 * num_bytes)()
        self.memory.append(memory)
        address._obj.value = ctypes.addressof(memory)

    def _cuIpcGetMemHandle(self, handle, address):  # noqa: N802
        ctypes.memmove(ctypes.addressof(handle._obj), address.to_bytes(8, "little"), 8)

    def _cuIpcOpenMemHandle_v2(self, address, handle, flags):  # noqa: N802
        address._obj.value = int.from_bytes(bytes(handle)[:8], "little")

    def _cuMemHostRegister_v2(self, address, num_bytes, flags):  # noqa: N802
        if address in self.registered:
            return HOST_MEMORY_ALREADY_REGISTERED
        self.registered.add(address)
        return 0

    def _cuMemHostGetDevicePointer_v2(self, device, host, flags):  # noqa: N802
        device._obj.value = host

    def _cuStreamCreateWithPriority(self, stream, flags, priority):  # noqa: N802
        number = len(self.queues) + 1
        self.queues[number] = deque()
        stream._obj.value = number

    def _cuMemcpyDtoDAsync_v2(self, target, source, num_bytes, stream):  # noqa: N802
        first = num_bytes // 2  # two halves: the other side may come in between
        self._put(stream, lambda: ctypes.memmove(target, source, first))
        self._put(stream, lambda: ctypes.memmove(target + first, source + first, num_bytes - first))

    def _cuStreamWriteValue32_v2(self, stream, word, value, flags):  # noqa: N802
        self._put(stream, lambda: setattr(ctypes.c_uint32.from_address(word), "value", value))

    def _cuStreamWaitValue32_v2(self, stream, word, value, flags):  # noqa: N802
        self._put(stream, lambda: ctypes.c_uint32.from_address(word).value == value)

    def _put(self, stream, work):
        self.queues[stream].append(work)

    def move(self):
        """Let a stream take its next step, if it can; the first that can in random order."""
        with self.lock:
            numbers = [number for number, queue in self.queues.items() if queue]
            self.random.shuffle(numbers)
            for number in numbers:
                if self.queues[number][0]() is not False:
                    self.queues[number].popleft()
                    return True
        return False

    def run_until(self, is_over):
        """Let streams move until ``is_over``, and other threads in between."""
        last = time.monotonic() + WAIT_S
        while not is_over():
            if not self.move():
                assert time.monotonic() < last, "nothing moves"
                self.pause()


class EmulatedStream:
    """A stream of the driver as PyTorch has it."""

    def __init__(self, driver, number):
        self.driver, self.number = driver, number

    def wait_stream(self, stream):
        """Computation on the CPU is over when it returns."""

    wait_event = wait_stream  # of the current stream

    def record_event(self):
        event = threading.Event()
        with self.driver.lock:
            self.driver.queues[self.number].append(event.set)
        return event

    def query(self):
        while self.driver.move():
            pass
        return not self.driver.queues[self.number]


class CurrentStream:
    """The CPU: it waits itself."""

    def __init__(self, driver):
        self.driver = driver

    def wait_event(self, event):
        self.driver.run_until(event.is_set)

    def record_event(self):
        """Return an event that nobody needs to wait for."""


def emulate(monkeypatch, seed=0):
    """Replace the driver and PyTorch's streams; return the driver."""
    driver = EmulatedDriver(seed)
    monkeypatch.setattr(copy_channels, "driver", lambda: driver)
    for name, value in {
        "device": lambda device: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "current_stream": lambda device=None: CurrentStream(driver),
        "ExternalStream": lambda handle, device: EmulatedStream(driver, handle),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return driver
