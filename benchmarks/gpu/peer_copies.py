"""Messages between two GPUs of one host that occupy no multiprocessor: what works, and its cost next to NCCL's.

    python benchmarks/gpu/peer_copies.py [PHASE ...]

A message is a copy into mapped memory of the other GPU by a copy engine, and a word that the stream writes after it.
The receiver's stream waits for the word. The script starts two processes with one GPU each. Each phase has a time limit
and prints its results line by line. A phase that fails or hangs ends both processes, and new ones continue with the
next phase. The whole script ends within eight minutes, and normally within two. It needs PyTorch with NCCL and two GPUs
of one host, and no pipeproof. It makes no multicast objects.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import queue
import random
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

TOTAL_S = 480.0
START_S = 60.0
STORE_S = 30.0
MIB = 2**20
SPACING = 128
"""Bytes from one word to the next."""


def main() -> int:
    """Start both processes, again after each failure."""
    names = sys.argv[1:] or list(PHASES)
    if odd := [name for name in names if name not in PHASES]:
        sys.stderr.write(f"no phase {', '.join(odd)}; there are {', '.join(PHASES)}\n")
        return 2
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if "PEER_RANK" in os.environ:
        return _work(names)
    end, bad = time.monotonic() + TOTAL_S, []
    while names and time.monotonic() < end:
        names, failed = _run_pair(names, end)
        bad += failed
    _print(f"phases that failed: {', '.join(bad) or 'none'}; not begun: {', '.join(names) or 'none'}")
    return 1 if bad or names else 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _run_pair(names: list[str], end: float) -> tuple[list[str], list[str]]:
    """Run phases until one fails; return those that have not begun, and the failed one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines: queue.Queue[tuple[int, str]] = queue.Queue()
    workers, readers = [], []
    for rank in range(2):
        env = {**os.environ, "PEER_RANK": str(rank), "PEER_PORT": str(port), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), *names]
        worker = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        reader = threading.Thread(target=_read, args=(worker, rank, lines), daemon=True)
        reader.start()
        workers.append(worker)
        readers.append(reader)
    done: dict[int, list[str]] = {0: [], 1: []}
    begun, limit, reason = None, time.monotonic() + START_S, ""
    while not reason:
        try:
            rank, line = lines.get(timeout=0.5)
        except queue.Empty:
            rank, line = -1, ""
        if line.startswith("@begin ") and line.split()[1] != begun:
            begun = line.split()[1]
            limit = time.monotonic() + PHASES[begun][1]
        _show(rank, line, done)
        codes = [worker.poll() for worker in workers]
        if codes == [0, 0]:
            break
        if time.monotonic() > min(limit, end):
            reason = "time limit"
        elif any(codes):
            time.sleep(1.0)
            reason = f"exit statuses {codes}"
    for worker in workers:
        worker.kill()
        worker.wait()
    for reader in readers:
        reader.join(timeout=5)
    while not lines.empty():
        _show(*lines.get(), done)
    left = [name for name in names if name not in done[0] or name not in done[1]]
    if not reason:
        return [], left
    _print(f"[-] {begun or 'start'}: ended both processes ({reason})")
    if begun in left:
        return left[left.index(begun) + 1 :], [begun]
    return [], left  # it fails at the start, and would again


def _show(rank: int, line: str, done: dict[int, list[str]]) -> None:
    if line.startswith("@end "):
        done[rank].append(line.split()[1])
    elif line and not line.startswith("@"):
        _print(f"[{rank}] {line}")


def _read(worker: subprocess.Popen[str], rank: int, lines: queue.Queue[tuple[int, str]]) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        lines.put((rank, line.rstrip()))


class Pair:
    """This process and the other, which exchange objects through a store."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.rank = int(os.environ["PEER_RANK"])
        self.port = int(os.environ["PEER_PORT"])
        if torch.cuda.device_count() < 2:
            raise SystemExit("two GPUs are needed")
        torch.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank)
        torch.ones(1, device=self.device)  # the context of this thread
        self.store = dist.TCPStore("127.0.0.1", self.port, 2, self.rank == 0, timeout=timedelta(seconds=STORE_S))
        self._count, self._has_group = 0, False
        self.driver = Driver()
        self._memory: PeerMemory | None = None
        self._words: dict[str, Words] = {}

    def swap(self, value: Any = None) -> Any:
        """Give a value to the other process and return its value."""
        self._count += 1
        self.store.set(f"{self._count}/{self.rank}", pickle.dumps(value))
        return pickle.loads(self.store.get(f"{self._count}/{1 - self.rank}"))

    def report(self, text: str, *, first_only: bool = True) -> None:
        """Print, by default on rank 0 alone."""
        if self.rank == 0 or not first_only:
            _print(text)

    def sync(self) -> None:
        """Wait for this GPU and for the other process."""
        self.torch.cuda.synchronize()
        self.swap()

    def group(self) -> Any:
        """NCCL's group of both processes."""
        if not self._has_group:
            store = self.dist.PrefixStore("nccl", self.store)
            limit = timedelta(seconds=STORE_S)
            self.dist.init_process_group(
                "nccl", store=store, rank=self.rank, world_size=2, timeout=limit, device_id=self.device
            )
            self._has_group = True
        return self.dist.group.WORLD

    def memory(self) -> PeerMemory:
        """Memory of both GPUs that both processes have mapped."""
        if self._memory is None:
            self._memory = PeerMemory(self, 520 * MIB)
        return self._memory

    def words(self, kind: str) -> Words:
        """Words of the device or of the host."""
        if kind not in self._words:
            self._words[kind] = (DeviceWords if kind == "device" else HostWords)(self)
        return self._words[kind]

    def stream(self, *, high: bool = True) -> Any:
        """A new stream."""
        return self.torch.cuda.Stream(self.device, priority=-1 if high else 0)


class IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


U32, U64, POINTER = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
SIGNATURES = {
    "cuDriverGetVersion": (POINTER,),
    "cuDeviceGetAttribute": (POINTER, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetP2PAttribute": (POINTER, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    "cuMemAlloc_v2": (POINTER, ctypes.c_size_t),
    "cuMemFree_v2": (U64,),
    "cuIpcGetMemHandle": (POINTER, U64),
    "cuIpcOpenMemHandle_v2": (POINTER, IpcHandle, U32),
    "cuIpcCloseMemHandle": (U64,),
    "cuMemHostRegister_v2": (POINTER, ctypes.c_size_t, U32),
    "cuMemHostGetDevicePointer_v2": (POINTER, POINTER, U32),
    "cuMemcpyAsync": (U64, U64, ctypes.c_size_t, POINTER),
    "cuMemcpyDtoDAsync_v2": (U64, U64, ctypes.c_size_t, POINTER),
    "cuMemcpyHtoDAsync_v2": (U64, POINTER, ctypes.c_size_t, POINTER),
    "cuStreamWriteValue32_v2": (POINTER, U64, U32, U32),
    "cuStreamWaitValue32_v2": (POINTER, U64, U32, U32),
}
GEQ, EQ = 0, 1


class Driver:
    """Calls of ``libcuda`` by name, which raise."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        self.calls = {}
        for name, types in SIGNATURES.items():
            call = getattr(self._library, name)
            call.argtypes, call.restype = types, ctypes.c_int
            self.calls[name] = call

    def __call__(self, name: str, *args: Any) -> None:
        """Call a function.

        Raises:
            RuntimeError: it returned an error.
        """
        status = self.calls[name](*args)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()} ({status})")

    def number(self, name: str, *args: Any) -> int:
        """Return the number that a function writes to its first argument."""
        value = ctypes.c_int()
        self(name, ctypes.byref(value), *args)
        return value.value

    def address(self, name: str, *args: Any) -> int:
        """Return the address that a function writes to its first argument."""
        value = U64()
        self(name, ctypes.byref(value), *args)
        return value.value


def _raw(stream: Any) -> int:
    return int(stream.cuda_stream)


class _View:
    """Memory as PyTorch reads it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class PeerMemory:
    """Equal memory on both GPUs, each mapped by the other process through an IPC handle."""

    def __init__(self, pair: Pair, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.own = pair.driver.address("cuMemAlloc_v2", num_bytes)
        handle = IpcHandle()
        pair.driver("cuIpcGetMemHandle", ctypes.byref(handle), self.own)
        other = IpcHandle.from_buffer_copy(pair.swap(bytes(handle)))
        self.peer = pair.driver.address("cuIpcOpenMemHandle_v2", other, 1)
        self.tensor = pair.torch.as_tensor(_View(self.own, num_bytes), device=pair.device)
        self.tensor.zero_()
        pair.sync()


class Words:
    """Words that streams write and wait for; a stream waits only for this process's own."""

    def __init__(self, pair: Pair) -> None:
        self._driver = pair.driver
        self._write, self._wait = (pair.driver.calls[f"cuStream{verb}Value32_v2"] for verb in ("Write", "Wait"))
        self.own = self.peer = 0

    def write(self, stream: int, index: int, value: int, *, at_peer: bool) -> None:
        """Launch the write of an own or of a peer's word."""
        if status := self._write(stream, (self.peer if at_peer else self.own) + SPACING * index, value, 0):
            raise RuntimeError(f"cuStreamWriteValue32: {status}")

    def wait(self, stream: int, index: int, value: int, flags: int = GEQ) -> None:
        """Launch the wait for an own word."""
        if status := self._wait(stream, self.own + SPACING * index, value, flags):
            raise RuntimeError(f"cuStreamWaitValue32: {status}")

    def set_own(self, index: int, value: int) -> None:
        """Set an own word from the host, also while streams wait for it."""
        raise NotImplementedError


class DeviceWords(Words):
    """Words in the GPU's memory, which the peer writes through its mapping."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        memory = pair.memory()
        self.own, self.peer = (base + memory.num_bytes - MIB for base in (memory.own, memory.peer))
        self._stream = pair.stream()
        self._value = pair.torch.zeros(1, dtype=pair.torch.int32, pin_memory=True)

    def set_own(self, index: int, value: int) -> None:
        """Copy on a stream of its own."""
        self._value[0] = value
        self._driver("cuMemcpyHtoDAsync_v2", self.own + SPACING * index, self._value.data_ptr(), 4, _raw(self._stream))
        self._stream.synchronize()


class HostWords(Words):
    """Words in host memory that both processes share and have registered."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        half = 128 * 1024
        path = Path("/dev/shm") / f"peer_copies_{pair.port}"
        if pair.rank == 0:
            path.write_bytes(bytes(2 * half))
        pair.swap()
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 2 * half)
        pair.swap()
        if pair.rank == 0:
            path.unlink()
        host = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        pair.driver("cuMemHostRegister_v2", host, 2 * half, 1 | 2)
        device = pair.driver.address("cuMemHostGetDevicePointer_v2", host, 0)
        self.own, self.peer = device + half * pair.rank, device + half * (1 - pair.rank)
        self._host = host + half * pair.rank

    def set_own(self, index: int, value: int) -> None:
        """Store."""
        U32.from_address(self._host + SPACING * index).value = value


class Ring:
    """Messages of both directions through slots of the receiver, by two words for each slot.

    ``full`` is of the receiver, and ``empty`` of the sender. Each is 1 for one side and is taken back to 0 by the other
    before that gives its own. So nothing counts, and a captured step can be replayed.
    """

    def __init__(self, pair: Pair, words: Words, num_slots: int, slot_bytes: int, first_word: int) -> None:
        self._copy, self.words, self._first = pair.driver.calls["cuMemcpyDtoDAsync_v2"], words, first_word
        self.num_slots, self.slot_bytes, self.memory = num_slots, slot_bytes, pair.memory()
        self.sent = self.received = 0
        for slot in range(num_slots):
            words.set_own(first_word + slot, 0)
            words.set_own(first_word + num_slots + slot, 1)
        pair.sync()

    def send(self, source: int, num_bytes: int, stream: int) -> None:
        """Launch a send of at most ``slot_bytes``."""
        slot = self.sent % self.num_slots
        self.sent += 1
        full, empty = self._first + slot, self._first + self.num_slots + slot
        self.words.wait(stream, empty, 1, EQ)
        self.words.write(stream, empty, 0, at_peer=False)
        if num_bytes:
            self._copied(self.memory.peer + slot * self.slot_bytes, source, num_bytes, stream)
        self.words.write(stream, full, 1, at_peer=True)

    def recv(self, target: int, num_bytes: int, stream: int) -> None:
        """Launch a receive; without a target the slot is released unread."""
        slot = self.received % self.num_slots
        self.received += 1
        full, empty = self._first + slot, self._first + self.num_slots + slot
        self.words.wait(stream, full, 1, EQ)
        self.words.write(stream, full, 0, at_peer=False)
        if target and num_bytes:
            self._copied(target, self.memory.own + slot * self.slot_bytes, num_bytes, stream)
        self.words.write(stream, empty, 1, at_peer=True)

    def _copied(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        if status := self._copy(target, source, num_bytes, stream):
            raise RuntimeError(f"cuMemcpyDtoDAsync: {status}")


# --- Phases ------------------------------------------------------------------------------------------------------


def facts(pair: Pair) -> None:
    """Versions, attributes and the topology."""
    torch, driver = pair.torch, pair.driver
    pair.report(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
             f"NCCL {torch.cuda.nccl.version()}, driver API {driver.number('cuDriverGetVersion')}")  # fmt: skip
    names = {"copy engines": 40, "64-bit stream words": 122, "NOR waits": 123, "host pointer is device pointer": 91}
    found = {name: driver.number("cuDeviceGetAttribute", code, pair.rank) for name, code in names.items()}
    pair.report(f"device attributes: {found}")
    peer = {name: driver.number("cuDeviceGetP2PAttribute", code, pair.rank, 1 - pair.rank)
            for name, code in {"rank": 1, "access": 2, "atomics": 3}.items()}  # fmt: skip
    pair.report(f"peer attributes: {peer}; torch: {torch.cuda.can_device_access_peer(pair.rank, 1 - pair.rank)}")
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "CUDA_MODULE_LOADING"):
        pair.report(f"{name}={os.environ.get(name)}")
    if pair.rank == 0:
        try:
            run = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
            lines = run.stdout.splitlines()[:4]
        except (OSError, subprocess.TimeoutExpired) as error:
            lines = [f"nvidia-smi: {error}"]
        for line in lines:
            _print(line)


def local_words(pair: Pair) -> None:
    """Stream writes and waits on own memory of both kinds, also captured and replayed."""
    torch = pair.torch
    device = torch.zeros(64, dtype=torch.int32, device=pair.device)
    host = torch.zeros(64, dtype=torch.int32, pin_memory=True)
    stream, other = pair.stream(), pair.stream()
    for name, tensor in (("device", device), ("pinned host", host)):
        words = Words(pair)
        words.own = tensor.data_ptr()
        words.wait(_raw(stream), 0, 7)
        time.sleep(0.05)
        is_waiting = not stream.query()
        words.write(_raw(other), 0, 7, at_peer=False)
        stream.synchronize()
        pair.report(f"{name} word: waits {is_waiting}, then released; value {int(tensor[0])}")
        words.write(_raw(other), 0, 0, at_peer=False)
        other.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            words.wait(_raw(stream), 0, 1, EQ)
            words.write(_raw(stream), 0, 0, at_peer=False)
        with torch.cuda.stream(stream):
            for _ in range(3):
                graph.replay()
                time.sleep(0.02)
                is_waiting = not stream.query()
                words.write(_raw(other), 0, 1, at_peer=False)
                stream.synchronize()
        pair.report(
            f"{name} word in a graph: each replay waits {is_waiting}, released and taken back: {int(tensor[0])}"
        )


def driver_ipc(pair: Pair) -> None:
    """Memory mapped by the driver's handles: pushes and pulls of known bytes."""
    torch, memory = pair.torch, pair.memory()
    source = torch.arange(MIB, device=pair.device, dtype=torch.int64).add_(1000 * pair.rank).to(torch.uint8)
    stream = torch.cuda.current_stream()
    pair.driver("cuMemcpyDtoDAsync_v2", memory.peer, source.data_ptr(), MIB, _raw(stream))
    pair.sync()
    expected = torch.arange(MIB, device=pair.device, dtype=torch.int64).add_(1000 * (1 - pair.rank)).to(torch.uint8)
    pushed = bool((memory.tensor[:MIB] == expected).all())
    pulled = torch.zeros_like(source)
    pair.driver("cuMemcpyDtoDAsync_v2", pulled.data_ptr(), memory.peer, MIB, _raw(stream))
    pair.sync()
    pair.report(f"IPC by the driver: pushed bytes right {pushed}, pulled bytes right {bool((pulled == source).all())}",
             first_only=False)  # fmt: skip


def torch_ipc(pair: Pair) -> None:
    """A tensor shared by ``torch.multiprocessing.reductions``: ``copy_`` into the peer's memory."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch = pair.torch
    shared = torch.zeros(4 * MIB, dtype=torch.uint8, device=pair.device)
    rebuild, args = reduce_tensor(shared)
    there_rebuild, there_args = pair.swap((rebuild, args))
    peer = there_rebuild(*there_args)
    peer.copy_(torch.full_like(shared, 17 + pair.rank))
    torch.cuda.synchronize(peer.device)
    pair.sync()
    pair.report(f"IPC by torch: the peer's tensor is on {peer.device}; bytes right "
             f"{bool((shared == 17 + 1 - pair.rank).all())}", first_only=False)  # fmt: skip
    pair.sync()
    del peer


def _handshake(pair: Pair, kind: str) -> None:
    torch, words, memory = pair.torch, pair.words(kind), pair.memory()
    for index in range(4):
        words.set_own(index, 0)
    pair.sync()
    stream = _raw(torch.cuda.current_stream())
    source = torch.full((MIB,), 5 + pair.rank, dtype=torch.uint8, device=pair.device)
    memory.tensor[:MIB].zero_()
    pair.sync()
    pair.driver("cuMemcpyDtoDAsync_v2", memory.peer, source.data_ptr(), MIB, stream)
    words.write(stream, 0, 1, at_peer=True)
    words.wait(stream, 0, 1)
    is_right = (memory.tensor[:MIB] == 5 + 1 - pair.rank).all()
    pair.sync()
    pair.report(f"words of the {kind}: written by the peer, the bytes before it are there {bool(is_right)}",
             first_only=False)  # fmt: skip


def device_words(pair: Pair) -> None:
    """Words in peer memory."""
    _handshake(pair, "device")


def host_words(pair: Pair) -> None:
    """Words in shared host memory."""
    _handshake(pair, "host")


def abort(pair: Pair) -> None:
    """A wait that nobody fulfils, released from another thread of the host."""
    torch = pair.torch
    for kind in ("host", "device"):
        words = pair.words(kind)
        words.set_own(9, 0)
        pair.sync()
        stream = pair.stream()
        with torch.cuda.stream(stream):
            words.wait(_raw(stream), 9, 1)
            torch.ones(8, device=pair.device)
        time.sleep(0.1)
        was_waiting, start = not stream.query(), time.perf_counter()
        error: list[str] = []

        def release(words: Words = words, error: list[str] = error) -> None:
            try:
                torch.cuda.set_device(pair.rank)
                pair.stream().query()  # the context of this thread
                words.set_own(9, 1)
            except RuntimeError as raised:
                error.append(str(raised))

        thread = threading.Thread(target=release)
        thread.start()
        thread.join(timeout=5)
        while not stream.query() and time.perf_counter() - start < 5:
            time.sleep(0)
        us = 1e6 * (time.perf_counter() - start)
        pair.report(f"abort by a word of the {kind}: was waiting {was_waiting}, released {stream.query()} after "
                 f"{us:.0f} us {error or ''}")  # fmt: skip
        pair.sync()


def connections(pair: Pair) -> None:
    """Numbers of streams that may wait before kernels of the default stream, or another stream, wait with them."""
    torch, words = pair.torch, pair.words("host")
    value = torch.zeros(1, device=pair.device)
    out = pair.stream()
    value.add_(1).clone()  # loads the kernels, which cannot be while a stream waits
    torch.cuda.synchronize()
    for high in (True, False):
        for count in (1, 2, 4, 8, 16, 30):
            for index in range(count):
                words.set_own(20 + index, 0)
            streams = [pair.stream(high=high) for _ in range(count)]
            for index, stream in enumerate(streams):
                words.wait(_raw(stream), 20 + index, 1)
            value.add_(1)
            kernel = torch.cuda.Event()
            kernel.record()
            with torch.cuda.stream(out):
                value.clone()
                other = torch.cuda.Event()
                other.record()
            end = time.perf_counter() + 0.5
            while not (kernel.query() and other.query()) and time.perf_counter() < end:
                time.sleep(0.001)
            text = f"default stream runs {kernel.query()}, another stream runs {other.query()}"
            for index in range(count):
                words.set_own(20 + index, 1)
            torch.cuda.synchronize()
            pair.report(f"{count} waiting streams of {'high' if high else 'usual'} priority: {text}")
    pair.sync()


def host_costs(pair: Pair) -> None:
    """Microseconds of the host for each call."""
    torch, words, memory = pair.torch, pair.words("host"), pair.memory()
    stream = _raw(torch.cuda.current_stream())
    words.set_own(0, 100)
    event, side = torch.cuda.Event(), pair.stream()
    ring = Ring(pair, words, 4, 2 * MIB, 64)
    source = torch.zeros(MIB, dtype=torch.uint8, device=pair.device)
    calls: dict[str, Callable[[], Any]] = {
        "stream write": lambda: words.write(stream, 1, 3, at_peer=True),
        "stream wait": lambda: words.wait(stream, 0, 1),
        "copy of 1 MiB to the peer": lambda: pair.driver.calls["cuMemcpyDtoDAsync_v2"](
            memory.peer + 8 * MIB, source.data_ptr(), MIB, stream
        ),
        "event record and wait": lambda: (event.record(), side.wait_event(event)),
        "message (send and receive)": lambda: (
            ring.send(source.data_ptr(), MIB, stream), ring.recv(0, 0, stream),
        ),
    }  # fmt: skip
    for name, call in calls.items():
        times = []
        for _ in range(9):
            pair.sync()
            start = time.perf_counter()
            for _ in range(50):
                call()
            times.append((time.perf_counter() - start) / 50 * 1e6)
        pair.report(f"host: {name} {median(times):.2f} us")
    pair.sync()


def replay(pair: Pair) -> None:
    """Steps of five messages each way through two slots, captured once on both sides and replayed."""
    torch = pair.torch
    for kind in ("host", "device"):
        num_bytes, num_messages = 4 * MIB, 5
        ring = Ring(pair, pair.words(kind), 2, num_bytes, 100)
        source = torch.zeros(num_messages, num_bytes, dtype=torch.uint8, device=pair.device)
        target = torch.zeros_like(source)
        wrong = torch.zeros(1, dtype=torch.int64, device=pair.device)
        step = torch.zeros(1, dtype=torch.int64, device=pair.device)
        rows = torch.arange(num_messages, device=pair.device)
        stream, side = pair.stream(), pair.stream()

        def work(
            ring: Ring = ring, source: Any = source, target: Any = target, wrong: Any = wrong, step: Any = step,
            rows: Any = rows, stream: Any = stream, side: Any = side, num_messages: int = num_messages,
            num_bytes: int = num_bytes,
        ) -> None:  # fmt: skip
            step.add_(1)
            source.copy_(((rows + step * 7 + 100 * pair.rank) % 251).to(torch.uint8)[:, None].expand_as(source))
            side.wait_stream(stream)
            for row in range(num_messages):
                ring.send(source[row].data_ptr(), num_bytes, _raw(side))
                ring.recv(target[row].data_ptr(), num_bytes, _raw(stream))
            stream.wait_stream(side)
            expected = ((rows + step * 7 + 100 * (1 - pair.rank)) % 251).to(torch.uint8)[:, None]
            wrong.add_((target != expected).sum())

        with torch.cuda.stream(stream):
            work()
        pair.sync()
        graph = torch.cuda.CUDAGraph()
        ring.sent = ring.received = 0
        eager_wrong = int(wrong)
        # the eager step used slots 0, 1, 0, 1, 0 and left all empty, so the captured one begins with slot 0 too
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        pair.swap()
        with torch.cuda.stream(stream):
            for _ in range(30):
                graph.replay()
        pair.sync()
        counts = f"wrong bytes {eager_wrong} eager, {int(wrong)} after 30 replays, step {int(step)}"
        pair.report(f"replay, words of the {kind}: {counts}", first_only=False)
        pair.swap()


def _elapsed_us(pair: Pair, work: Callable[[], None], rounds: int = 5) -> float:
    """Median microseconds of the GPU for work that both ranks launch."""
    torch, times = pair.torch, []
    for _ in range(rounds + 1):
        pair.sync()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    pair.sync()
    return median(times[1:])


def _nccl(pair: Pair, tensor: Any, *, is_send: bool) -> Any:
    dist = pair.dist
    return dist.batch_isend_irecv([dist.P2POp(dist.isend if is_send else dist.irecv, tensor, 1 - pair.rank)])[0]


def _ping(pair: Pair, count: int, send: Callable[[], object], recv: Callable[[], object]) -> None:
    """Messages forth and back, one after the other."""
    for _ in range(count):
        for call in (send, recv) if pair.rank == 0 else (recv, send):
            call()


def latency(pair: Pair) -> None:
    """Microseconds one way: half of a round trip, by the GPU's clock."""
    torch = pair.torch
    pair.group()
    stream = _raw(torch.cuda.current_stream())
    for num_bytes in (8, 32 * 1024, 256 * 1024, 2 * MIB, 16 * MIB, 32 * MIB, 128 * MIB):
        count = 100 if num_bytes <= 2 * MIB else 10
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=pair.device)
        target = torch.zeros_like(source)
        found = {}
        for kind in ("device", "host"):
            for copied_out in (True, False):
                ring = Ring(pair, pair.words(kind), 2, num_bytes, 200)
                send = partial(ring.send, source.data_ptr(), num_bytes, stream)
                recv = partial(ring.recv, target.data_ptr() if copied_out else 0, num_bytes, stream)
                us = _elapsed_us(pair, partial(_ping, pair, count, send, recv))
                found[f"{kind} words{', copied out' if copied_out else ''}"] = us / count / 2
        send, recv = partial(_nccl_message, pair, source, None), partial(_nccl_message, pair, None, target)
        found["NCCL"] = _elapsed_us(pair, partial(_ping, pair, count, send, recv)) / count / 2
        pair.report(f"latency {num_bytes} bytes, us: " + ", ".join(f"{name} {us:.1f}" for name, us in found.items()))


def _nccl_message(pair: Pair, source: Any, target: Any) -> None:
    """Send, receive, or both at once, and have the current stream wait."""
    dist, peer = pair.dist, 1 - pair.rank
    ops = [] if source is None else [dist.P2POp(dist.isend, source, peer)]
    ops += [] if target is None else [dist.P2POp(dist.irecv, target, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _copies(pair: Pair, ring: Ring, count: int, source: int, target: int, side: Any, *, both: bool) -> None:
    """A series of messages from rank 0, or both ways: sends on ``side``, receives on the current stream."""
    main = pair.torch.cuda.current_stream()
    side.wait_stream(main)
    for _ in range(count):
        if both or pair.rank == 0:
            ring.send(source, ring.slot_bytes, _raw(side))
        if both or pair.rank == 1:
            ring.recv(target, ring.slot_bytes, _raw(main))
    main.wait_stream(side)


def _nccl_series(pair: Pair, count: int, source: Any, target: Any, *, both: bool) -> None:
    for _ in range(count):
        _nccl_message(pair, source if both or pair.rank == 0 else None, target if both or pair.rank == 1 else None)


def bandwidth(pair: Pair) -> None:
    """GB/s of a series of messages, one way and both ways at once, by the GPU's clock."""
    torch = pair.torch
    pair.group()
    side = pair.stream()
    for num_bytes, count in ((2 * MIB, 60), (32 * MIB, 30), (256 * MIB, 6)):
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=pair.device)
        target = torch.zeros_like(source)
        found = {}
        for both in (False, True):
            ways = "both ways" if both else "one way"
            for kind, copied_out in (("device", False), ("host", False), ("host", True)):
                ring = Ring(pair, pair.words(kind), 2, num_bytes, 300)
                into = target.data_ptr() if copied_out else 0
                us = _elapsed_us(pair, partial(_copies, pair, ring, count, source.data_ptr(), into, side, both=both), 3)
                found[f"{ways}, {kind} words{', copied out' if copied_out else ''}"] = num_bytes * count / us / 1e3
            us = _elapsed_us(pair, partial(_nccl_series, pair, count, source, target, both=both), 3)
            found[f"{ways}, NCCL"] = num_bytes * count / us / 1e3
        figures = "; ".join(f"{name} {rate:.0f}" for name, rate in found.items())
        pair.report(f"bandwidth {num_bytes // MIB} MiB, GB/s: {figures}")


def slowdown(pair: Pair) -> None:
    """Time of bfloat16 products while nothing, NCCL or copy engines wait, or move 32 MiB messages from rank 0 to 1."""
    torch = pair.torch
    pair.group()
    side = pair.stream()
    num_bytes, repeats = 32 * MIB, 9
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=pair.device)
    target = torch.zeros_like(source)
    _nccl(pair, source, is_send=pair.rank == 0).wait()
    host, device = (
        Ring(pair, pair.words(kind), 3, num_bytes, first) for kind, first in (("host", 400), ("device", 450))
    )
    is_sender = pair.rank == 0

    def through(ring: Ring, count: int, *, out: bool) -> None:
        for _ in range(count):
            if is_sender:
                ring.send(source.data_ptr(), num_bytes, _raw(side))
            else:
                ring.recv(target.data_ptr() if out else 0, num_bytes, _raw(side))

    def by_nccl(count: int) -> None:
        works = [_nccl(pair, source if is_sender else target, is_send=is_sender) for _ in range(count)]
        with torch.cuda.stream(side):
            for each in works:
                each.wait()

    for rows, inner, columns, calls, count in (
        (8192, 8192, 8192, 8, 170), (4096, 4096, 16384, 16, 170), (4096, 4096, 4096, 60, 170),
    ):  # fmt: skip
        left = torch.randn(rows, inner, device=pair.device, dtype=torch.bfloat16)
        right = torch.randn(inner, columns, device=pair.device, dtype=torch.bfloat16)
        result = torch.empty(rows, columns, device=pair.device, dtype=torch.bfloat16)
        for _ in range(10):
            torch.mm(left, right, out=result)
        modes = ("alone", "NCCL waits", "NCCL runs", "copies wait", "copies run, host words",
                 "copies run, host words, copied out", "copies run, device words")  # fmt: skip
        products: dict[str, list[float]] = {mode: [] for mode in modes}
        messages: dict[str, list[float]] = {mode: [] for mode in modes}
        for repeat in range(repeats + 1):
            for mode in modes:
                pair.sync()
                torch.cuda._sleep(30_000_000)  # the host gets ahead meanwhile
                start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                start.record()
                side.wait_event(start)
                waits, late = mode.endswith(("wait", "waits")), 2
                if mode == "NCCL runs":
                    by_nccl(count)
                elif mode == "NCCL waits" and not is_sender:
                    by_nccl(1)
                elif mode == "copies wait" and not is_sender:
                    through(host, late, out=False)
                elif mode.startswith("copies run"):
                    through(device if "device" in mode else host, count, out="out" in mode)
                last.record(side)
                for _ in range(calls):
                    torch.mm(left, right, out=result)
                end.record()
                end.synchronize()
                pair.swap()
                if waits and is_sender:
                    if mode == "NCCL waits":
                        by_nccl(1)
                    else:
                        through(host, late, out=False)
                pair.sync()
                if repeat:
                    products[mode].append(start.elapsed_time(end))
                    messages[mode].append(start.elapsed_time(last))
        alone = median(products["alone"])
        for mode in modes:
            ms, moved = median(products[mode]), median(messages[mode])
            rate = f", messages {moved:.2f} ms ({num_bytes * count / moved / 1e6:.0f} GB/s)" if "run" in mode else ""
            pair.report(f"slowdown {'sender' if is_sender else 'receiver'} {rows}x{inner}x{columns}: {mode}: "
                     f"{ms:.3f} ms, {ms / alone - 1:+.1%}{rate}", first_only=False)  # fmt: skip
        del left, right, result
    pair.sync()


def order(pair: Pair) -> None:
    """Many messages of random sizes through two slots, each compared with its number: no early word, none lost."""
    torch = pair.torch
    for kind in ("host", "device"):
        largest, count, draw = 4 * MIB, 1500, random.Random(7)
        ring = Ring(pair, pair.words(kind), 2, largest, 500)
        buffers = torch.zeros(2, largest, dtype=torch.uint8, device=pair.device)
        wrong = torch.zeros(1, dtype=torch.int64, device=pair.device)
        stream, start = _raw(torch.cuda.current_stream()), time.perf_counter()
        for number in range(count):
            num_bytes = draw.choice((16, 4096, 65536, MIB, largest - 64))
            buffer, value = buffers[number % 2][:num_bytes], number % 251
            if pair.rank == 0:
                buffer.fill_(value)
                ring.send(buffer.data_ptr(), num_bytes, stream)
            else:
                ring.recv(buffer.data_ptr(), num_bytes, stream)
                wrong.add_((buffer != value).sum())
                buffer.fill_(255)
        pair.sync()
        if pair.rank == 1:
            _print(f"order, words of the {kind}: {count} messages, wrong bytes {int(wrong)}, "
                   f"{time.perf_counter() - start:.2f} s")  # fmt: skip
        pair.swap()


def symmetric(pair: Pair) -> None:
    """PyTorch's symmetric memory: copies into a peer's buffer, its signal kernels, and stream words on its pads."""
    import torch.distributed._symmetric_memory as symmetric_memory

    torch, group = pair.torch, pair.group()
    pair.dist.barrier(device_ids=[pair.rank])
    buffer = symmetric_memory.empty(32 * MIB, dtype=torch.uint8, device=pair.device)
    handle = symmetric_memory.rendezvous(buffer, group.group_name)
    peer = handle.get_buffer(1 - pair.rank, (32 * MIB,), torch.uint8)
    pair.report(f"symmetric memory: the peer's buffer is on {peer.device}, multicast {bool(handle.multicast_ptr)}, "
             f"pad {handle.signal_pad_size} bytes")  # fmt: skip
    peer.copy_(torch.full_like(buffer, 31 + pair.rank))
    handle.put_signal(1 - pair.rank, 0, 5000)
    handle.wait_signal(1 - pair.rank, 0, 5000)
    is_right = (buffer == 31 + 1 - pair.rank).all()
    pair.sync()
    pair.report(f"symmetric memory: put_signal and wait_signal, bytes right {bool(is_right)}", first_only=False)

    def ping() -> None:
        for _ in range(50):
            for is_send in (True, False) if pair.rank == 0 else (False, True):
                if is_send:
                    handle.put_signal(1 - pair.rank, 1, 5000)
                else:
                    handle.wait_signal(1 - pair.rank, 1, 5000)

    pair.report(f"symmetric memory: signal kernels, one way {_elapsed_us(pair, ping) / 100:.1f} us")
    words = Words(pair)
    pads = handle.signal_pad_ptrs
    words.own, words.peer = pads[pair.rank] + 1024, pads[1 - pair.rank] + 1024
    stream, numbers = _raw(torch.cuda.current_stream()), iter(range(1, 10**6))

    def stream_ping() -> None:
        for _ in range(50):
            number = next(numbers)
            for is_send in (True, False) if pair.rank == 0 else (False, True):
                if is_send:
                    words.write(stream, 0, number, at_peer=True)
                else:
                    words.wait(stream, 0, number)

    pair.report(f"symmetric memory: stream words on the pads, one way {_elapsed_us(pair, stream_ping) / 100:.1f} us")


PHASES: dict[str, tuple[Callable[[Pair], None], float]] = {
    "facts": (facts, 40),
    "local_words": (local_words, 20),
    "driver_ipc": (driver_ipc, 30),
    "device_words": (device_words, 20),
    "host_words": (host_words, 20),
    "abort": (abort, 30),
    "latency": (latency, 60),
    "bandwidth": (bandwidth, 60),
    "slowdown": (slowdown, 90),
    "host_costs": (host_costs, 30),
    "replay": (replay, 40),
    "order": (order, 60),
    "connections": (connections, 30),
    "torch_ipc": (torch_ipc, 30),
    "symmetric": (symmetric, 40),
}
"""Each phase with its limit in seconds."""


def _work(names: list[str]) -> int:
    pair = Pair()
    for name in names:
        _print(f"@begin {name}")
        try:
            PHASES[name][0](pair)
            pair.swap()
        except Exception as error:  # noqa: BLE001 - a phase may fail in any way, and others follow
            place = traceback.extract_tb(error.__traceback__)[-1]
            _print(f"{name}: FAILED at line {place.lineno} ({place.name}): {type(error).__name__}: {error}")
            sys.stdout.flush()
            os._exit(3)
        _print(f"@end {name}")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
