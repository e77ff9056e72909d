"""Ring of a rank's last operations: a file of fixed size that another process can read at any time.

The rank maps the file into its memory and writes to it without system calls,
so the content survives a rank that hangs or is killed. A file has four parts:

header    the rank's identity; then changing values: heartbeat, processor time, number of events, stack, end; at 4096
          the digests of each group (``SequenceDigest``)
strings   texts that records refer to by their offset: source positions, groups, types; each is written once
records   ``capacity`` records of 128 bytes; operation ``seq`` is in record ``seq % capacity``

A record is written with its sequence number last, and a reader leaves out a
record whose number does not fit its position. Times are nanoseconds since the
epoch of the rank's host. All numbers are little endian.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.exec.monitor.monitor_codes import UNREADABLE_RING
from pipeproof.exec.store.process_state import ProcessId, boot_id
from pipeproof.foreign_text import MALFORMED, MOST_RANKS, decode_json, open_foreign, read_foreign
from pipeproof.interop.hang.recorder_names import UNEVEN, num_elements

# --- Running digests of each group's collectives, which find two members whose sequences differ ---
# The digest of a group at position p covers its collectives 0 to p - 1: the operation, elements and type of each. For
# each power of four, a ring keeps the digests at the last two multiples of it. So two ranks that are d collectives
# apart always have digests at one position at most 8 d back, however many records are overwritten.


FACTOR: Final = 0x9E3779B97F4A7C15
"""An odd number without a pattern in its bits."""


class SequenceDigest:
    """Digest of a group's collectives so far; ``slot`` is its position in the ring."""

    __slots__ = ("position", "slot", "value")

    def __init__(self, slot: int) -> None:
        self.slot, self.position, self.value = slot, 0, 0

    def add(self, op: str, num_inputs: int, num_outputs: int, dtype: str) -> None:
        """Add the next collective."""
        self.position += 1
        value = (self.value ^ _signature(op, num_inputs, num_outputs, dtype)) * FACTOR & 0xFFFFFFFFFFFFFFFF
        self.value = value ^ value >> 32


@lru_cache(maxsize=4096)
def _signature(op: str, num_inputs: int, num_outputs: int, dtype: str) -> int:
    """Return a number from the properties that must be equal on all members of a collective."""
    return _hash(repr((op,) if op in UNEVEN else (op, dtype, num_elements(op, num_inputs, num_outputs))))


@lru_cache(maxsize=4096)
def group_key(text: str) -> int:
    """Return the key of a group's digests, not 0, from its text in the ring."""
    return _hash(text) | 1


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Members of a group whose collectives differ: they agree before ``agreed``, and differ before ``different``."""

    key: int
    agreed: int
    different: int
    digests: Mapping[int, int]
    """Digests by rank, at ``different``."""


def divergences(digests: Iterable[tuple[int, Mapping[int, Mapping[int, int]]]]) -> Iterator[Divergence]:
    """Find the groups whose members have issued different collectives.

    Args:
        digests: each rank with its digests, by the key of a group and the position.
    """
    groups: dict[int, dict[int, dict[int, int]]] = {}
    for rank, by_key in digests:
        for key, by_position in by_key.items():
            for position, value in by_position.items():
                groups.setdefault(key, {}).setdefault(position, {})[rank] = value
    for key, positions in groups.items():
        different = min((each for each, values in positions.items() if len(set(values.values())) > 1), default=None)
        if different is not None:
            ranks = positions[different].keys()
            agreed = max(
                (each for each in positions if each < different and positions[each].keys() >= ranks), default=0
            )
            yield Divergence(key, agreed, different, positions[different])


MAGIC: Final = b"PPRING02"
RECORD_BYTES: Final = 128
_DIGESTS_AT: Final = 4096
_MOST_GROUPS: Final = 64
"""Groups with digests; for later groups a ring only has records."""
_LEVELS: Final = 12
_DIGEST: Final = struct.Struct("<QQQ")
"""Position, digest, and both combined: a value that is read while it is written does not fit."""
_SLOT_BYTES: Final = 8 + 2 * _LEVELS * 24
HEADER_BYTES: Final = 49152
STRINGS_BYTES: Final = 1 << 18
CAPACITY: Final = 2048
"""Operations that a ring keeps by default."""
MAX_DIMS: Final = 4
"""Dimensions of a shape that a record has; the number of elements is exact for any shape."""

_IDENTITY: Final = struct.Struct("<8s6IQ32s64s64s64s")
_PULSE: Final = struct.Struct("<QQQ")
_PULSE_AT: Final = 512
_END: Final = struct.Struct("<QI")
_END_AT: Final = 544
_MOST_BYTES: Final = 2**28
_PLACE: Final = struct.Struct("<QIii48s")
_PLACE_AT: Final = 576
_STRINGS_USED: Final = struct.Struct("<I")
_STRINGS_AT: Final = 560
_TEXT: Final = struct.Struct("<QI")
_STACK_AT: Final = 1024
_ERROR_AT: Final = 2560
_TEXT_BYTES: Final = 1500
_RECORD: Final = struct.Struct("<QBBBBiiIIIIIIiiiqq4qQ")
_TIMES: Final = struct.Struct("<QQ")
_TIMES_AT: Final = RECORD_BYTES - 16
_NONE: Final = -1

OPS: Final = (
    "send", "recv", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
    "scatter", "barrier",
)  # fmt: skip
"""Operations by their number in a record."""
OP_NUMBERS: Final = {op: number for number, op in enumerate(OPS)}


class OpState(IntEnum):
    """Progress of an operation."""

    ISSUED = 1
    """The host is in the call."""
    LAUNCHED = 2
    """The call has returned, and nothing has waited for the operation."""
    WAITED = 3
    """The host is in a wait for the operation."""
    QUEUED = 4
    """The host has passed the wait, and the device has not finished the operation."""
    DONE = 5
    FAILED = 6
    """The call or the wait raised."""


class End(IntEnum):
    """End of a rank's program, as the program itself noted it."""

    NONE = 0
    ENDED = 1
    RAISED = 2


@dataclass(frozen=True, slots=True)
class RingGroup:
    """A process group: name, global ranks in the order of group ranks, backend, purpose."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    about: str


@dataclass(frozen=True, slots=True)
class RingOp:
    """An operation in a ring.

    ``number`` counts the operations of its group from 0; for a message, the messages of its channel (group, peer,
    direction, tag). ``shape`` is the first tensor's, of at most four dimensions; the number of elements is the total of
    all tensors. ``batch`` is common to the messages of one batch. ``plan_op`` is the operation of the plan, empty for
    jobs that pipeproof does not execute. Times are in nanoseconds since the epoch, 0 before the event.
    """

    seq: int
    op: str
    state: OpState
    group: RingGroup
    number: int
    peer: int | None
    tag: int
    batch: int | None
    dtype: str
    shape: tuple[int, ...]
    num_inputs: int
    num_outputs: int
    at: str
    stage: int | None
    micro_batch: int | None
    kind: str
    plan_op: str
    step: int | None
    issued_ns: int
    waited_ns: int
    done_ns: int

    @property
    def is_message(self) -> bool:
        """True for a send or a receive."""
        return self.op in ("send", "recv")

    @property
    def meaning(self) -> str:
        """``0SEND_F3 of the plan: activation of micro-batch 3, stage 0, step 2``; empty without a mark."""
        tensor = {"F": "activation", "B": "gradient"}.get(self.kind, "")
        micro_batch = "" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        of = " of ".join(filter(None, (tensor, micro_batch)))
        stage = "" if self.stage is None else f"stage {self.stage}"
        step = "" if self.step is None else f"step {self.step}"
        named = f"{self.plan_op} of the plan: " if self.plan_op else ""
        return f"{named}{', '.join(filter(None, (of, stage, step)))}"


@dataclass(frozen=True, slots=True)
class RingHeader:
    """The header of a ring: a rank and its last activity; ``stack`` is of its main thread, innermost frame first.

    ``num_events`` counts issues, waits and ends of operations. ``stack_ns`` is the time since which the main thread is
    at the same lines; 0 if the rank makes progress. ``plan_op`` is the operation of the plan that the rank has entered
    last, and ``plan_op_ns`` the time; it is empty outside of a plan's steps.
    """

    rank: int
    num_ranks: int
    pid: int
    process_start: str
    host: str
    boot_id: str
    framework: str
    started_ns: int
    heartbeat_ns: int
    cpu_ns: int
    num_events: int
    end: End
    end_ns: int
    stack: tuple[str, ...]
    stack_ns: int
    error: str
    capacity: int
    plan_op: str
    step: int | None
    stage: int | None
    micro_batch: int | None
    plan_op_ns: int
    digests: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """By the key of a group: the digest of its collectives at some positions."""


class RingWriter:
    """Writes the ring of this process, in place of an older ring of the same name.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, rank: int, num_ranks: int, framework: str, *, now_ns: int, capacity: int) -> None:
        size = HEADER_BYTES + STRINGS_BYTES + capacity * RECORD_BYTES
        new = path.with_name(f".{path.name}.{os.getpid()}")
        with new.open("w+b") as file:
            file.truncate(size)
            self._file = os.dup(file.fileno())
        self._memory = mmap.mmap(self._file, size)
        self._capacity = capacity
        self._num_events = self._num_groups = 0
        self._strings: dict[str, int] = {"": 0}
        self._strings_used = 2
        self._lock = threading.Lock()
        process = ProcessId.own()
        _IDENTITY.pack_into(
            self._memory, 0, MAGIC, RECORD_BYTES, capacity, STRINGS_BYTES, process.pid, rank, num_ranks, now_ns,
            *(text.encode() for text in (process.started, socket.gethostname(), boot_id(), framework)),
        )  # fmt: skip
        self.pulse(now_ns, 0)
        new.replace(path)  # it appears when it can be read

    def intern(self, text: str) -> int:
        """Return the offset of a text in the table of strings, writing it at first use; 0 if the table is full."""
        offset = self._strings.get(text)
        if offset is not None:
            return offset
        raw = text.encode(errors="replace")[:4000]
        with self._lock:
            offset, end = self._strings_used, self._strings_used + 2 + len(raw)
            if end > STRINGS_BYTES:
                return 0
            start = HEADER_BYTES + offset
            self._memory[start : start + 2 + len(raw)] = len(raw).to_bytes(2, "little") + raw
            self._strings[text] = offset
            self._strings_used = end
            _STRINGS_USED.pack_into(self._memory, _STRINGS_AT, end)
        return offset

    def issue(
        self, seq: int, op: int, group: int, number: int, peer: int | None, tag: int, batch: int | None, dtype: int,
        shape: tuple[int, ...], num_inputs: int, num_outputs: int, at: int, mark: tuple[int, int, int], now_ns: int,
        plan_op: int = 0, step: int = _NONE,
    ) -> None:  # fmt: skip
        """Write a record of state ISSUED; ``op``, ``group``, ``dtype``, ``at``, ``plan_op`` are numbers or offsets."""
        start = self._start(seq)
        dims = shape[:MAX_DIMS] if len(shape) <= MAX_DIMS else ()
        d0, d1, d2, d3 = (*dims, 0, 0, 0, 0)[:MAX_DIMS]
        memory = self._memory
        memory[start : start + 8] = bytes(8)
        stage, micro_batch, kind = mark
        _RECORD.pack_into(
            memory, start, 0, OpState.ISSUED, op, len(dims) if shape == dims else 255, kind,
            _NONE if peer is None else peer, tag, group, number & 0xFFFFFFFF, dtype, at, plan_op, step + 1,
            _NONE if batch is None else batch, stage, micro_batch, num_inputs, num_outputs, d0, d1, d2, d3, now_ns,
        )  # fmt: skip
        _TIMES.pack_into(memory, start + _TIMES_AT, 0, 0)
        memory[start : start + 8] = (seq + 1).to_bytes(8, "little")
        self._num_events += 1

    def add_group(self, text: str) -> SequenceDigest | None:
        """Reserve the digests of a group; None if all are used."""
        slot = self._num_groups
        if slot == _MOST_GROUPS:
            return None
        self._num_groups = slot + 1
        start = _DIGESTS_AT + slot * _SLOT_BYTES
        self._memory[start : start + 8] = group_key(text).to_bytes(8, "little")
        return SequenceDigest(slot)

    def digest(self, digest: SequenceDigest) -> None:
        """Write a digest for each power of four that divides its position."""
        multiple = position = digest.position
        value, at = digest.value, _DIGESTS_AT + digest.slot * _SLOT_BYTES + 8
        check = _check(position, value)
        for _ in range(_LEVELS):
            _DIGEST.pack_into(self._memory, at + 24 * (multiple & 1), position, value, check)
            if multiple & 3:
                return
            multiple >>= 2
            at += 48

    def launched(self, seq: int) -> None:
        """Write that the call has returned."""
        self._memory[self._start(seq) + 8] = OpState.LAUNCHED

    def waited(self, seq: int, now_ns: int) -> None:
        """Write that the host begins to wait."""
        start = self._start(seq)
        self._memory[start + 8] = OpState.WAITED
        self._memory[start + _TIMES_AT : start + _TIMES_AT + 8] = now_ns.to_bytes(8, "little")
        self._num_events += 1

    def finished(self, seq: int, state: OpState, now_ns: int) -> None:
        """Write that an operation is queued behind the wait, done, or failed."""
        start = self._start(seq)
        self._memory[start + 8] = state
        if state is not OpState.QUEUED:
            self._memory[start + _TIMES_AT + 8 : start + _TIMES_AT + 16] = now_ns.to_bytes(8, "little")
        self._num_events += 1

    def pulse(self, now_ns: int, cpu_ns: int) -> None:
        """Write the heartbeat, the processor time of the process, and the number of events."""
        _PULSE.pack_into(self._memory, _PULSE_AT, now_ns, cpu_ns, self._num_events)

    def enter(self, plan_op: bytes, step: int, stage: int, micro_batch: int, now_ns: int) -> None:
        """Write the operation of the plan that the rank has entered, of 48 bytes at most; it counts as an event."""
        _PLACE.pack_into(self._memory, _PLACE_AT, now_ns, step + 1, stage, micro_batch, plan_op)
        self._num_events += 1

    @property
    def num_events(self) -> int:
        """Number of issues, waits and ends of operations so far."""
        return self._num_events

    def stack(self, lines: Sequence[str], since_ns: int) -> None:
        """Write the position of the main thread, and since when; no lines while the rank makes progress."""
        self._text(_STACK_AT, "\n".join(lines), since_ns)

    def end(self, end: End, error: str, now_ns: int) -> None:
        """Write that the program ended, and the error that it raised."""
        self._text(_ERROR_AT, error, now_ns)
        _END.pack_into(self._memory, _END_AT, now_ns, end)

    def sync(self) -> None:
        """Write the file to its disk or server, where other hosts see it; other threads continue meanwhile."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; the ring remains."""
        self._memory.close()
        os.close(self._file)

    def _start(self, seq: int) -> int:
        return HEADER_BYTES + STRINGS_BYTES + seq % self._capacity * RECORD_BYTES

    def _text(self, at: int, text: str, now_ns: int) -> None:
        raw = text.encode(errors="replace")[: _TEXT_BYTES - _TEXT.size]
        self._memory[at + _TEXT.size : at + _TEXT.size + len(raw)] = raw
        _TEXT.pack_into(self._memory, at, now_ns, len(raw))


@dataclass(frozen=True, slots=True)
class Ring:
    """The content of a ring: the header, and the operations in the order of issue."""

    file: str
    header: RingHeader
    ops: tuple[RingOp, ...]

    @property
    def is_whole(self) -> bool:
        """True while the ring has every operation that the rank issued."""
        return not self.ops or self.ops[0].seq == 0


def read_header(path: Path) -> RingHeader:
    """Read the header of a ring.

    Raises:
        PlanFileError: PP952, the file cannot be read, or is not a ring.
    """
    try:
        with open_foreign(path) as file:
            return _header(file.read(HEADER_BYTES), str(path))
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def read_ring(path: Path) -> Ring:
    """Read a ring, while its rank writes it or later.

    Raises:
        PlanFileError: PP952, the file cannot be read, or is not a ring.
    """
    header = read_header(path)
    size = HEADER_BYTES + STRINGS_BYTES + header.capacity * RECORD_BYTES
    try:
        raw = read_foreign(path, min(size, _MOST_BYTES))
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if len(raw) != size:
        raise _unreadable(path, f"it is truncated, or has more than {_MOST_BYTES:,} bytes")
    strings = raw[HEADER_BYTES : HEADER_BYTES + STRINGS_BYTES]
    ops = []
    for position in range(header.capacity):
        start = HEADER_BYTES + STRINGS_BYTES + position * RECORD_BYTES
        seq = int.from_bytes(raw[start : start + 8], "little") - 1
        if seq >= 0 and seq % header.capacity == position:
            try:
                ops.append(_op(raw, start, strings))
            except MALFORMED as error:
                raise _unreadable(path, f"record {position} has a value of a wrong type: {error}") from error
    ops.sort(key=lambda op: op.seq)
    return Ring(str(path), header, tuple(ops))


def _header(raw: bytes, file: str) -> RingHeader:
    if len(raw) < HEADER_BYTES or raw[:8] != MAGIC:
        raise _unreadable(Path(file), "it does not begin as a ring of this version")
    (_, record_bytes, capacity, strings_bytes, pid, rank, num_ranks, started_ns, *texts) = _IDENTITY.unpack_from(raw, 0)
    if (record_bytes, strings_bytes) != (RECORD_BYTES, STRINGS_BYTES):
        raise _unreadable(Path(file), "it has another layout")
    if not rank < num_ranks <= MOST_RANKS:
        raise _unreadable(Path(file), f"it is of rank {rank} of {num_ranks}; a job has at most {MOST_RANKS:,} ranks")
    process_start, host, boot_id, framework = (
        text.rstrip(b"\0").decode(errors="replace") for text in texts
    )  # fmt: skip
    heartbeat_ns, cpu_ns, num_events = _PULSE.unpack_from(raw, _PULSE_AT)
    end_ns, end = _END.unpack_from(raw, _END_AT)
    if end not in set(End):
        raise _unreadable(Path(file), f"its end has the unknown value {end}")
    stack_ns, stack = _read_text(raw, _STACK_AT)
    _, error = _read_text(raw, _ERROR_AT)
    plan_op_ns, step, stage, micro_batch, plan_op = _PLACE.unpack_from(raw, _PLACE_AT)
    return RingHeader(
        rank, num_ranks, pid, process_start, host, boot_id, framework, started_ns, heartbeat_ns, cpu_ns, num_events,
        End(end), end_ns, tuple(stack.split("\n")) if stack else (), stack_ns, error, capacity,
        plan_op.rstrip(b"\0").decode(errors="replace"), step - 1 if step else None, None if stage == _NONE else stage,
        None if micro_batch == _NONE else micro_batch, plan_op_ns, _digests(raw),
    )  # fmt: skip


def _check(position: int, digest: int) -> int:
    return position * FACTOR & 0xFFFFFFFFFFFFFFFF ^ digest


def _digests(raw: bytes) -> dict[int, dict[int, int]]:
    groups: dict[int, dict[int, int]] = {}
    for slot in range(_MOST_GROUPS):
        start = _DIGESTS_AT + slot * _SLOT_BYTES
        key = int.from_bytes(raw[start : start + 8], "little")
        if not key:
            break
        groups[key] = {
            position: value
            for position, value, check in _DIGEST.iter_unpack(raw[start + 8 : start + _SLOT_BYTES])
            if position and check == _check(position, value)
        }
    return groups


def _read_text(raw: bytes, at: int) -> tuple[int, str]:
    time_ns, length = _TEXT.unpack_from(raw, at)
    return time_ns, raw[at + _TEXT.size : at + _TEXT.size + length].decode(errors="replace")


def _op(raw: bytes, start: int, strings: bytes) -> RingOp:
    (
        seq, state, op, num_dims, kind, peer, tag, group, number, dtype, at, plan_op, step, batch, stage, micro_batch,
        num_inputs, num_outputs, d0, d1, d2, d3, issued_ns,
    ) = _RECORD.unpack_from(raw, start)  # fmt: skip
    waited_ns, done_ns = _TIMES.unpack_from(raw, start + _TIMES_AT)
    return RingOp(
        seq - 1, OPS[op], OpState(state), _group(_string(strings, group)), number, None if peer == _NONE else peer,
        tag, None if batch == _NONE else batch, _string(strings, dtype),
        (d0, d1, d2, d3)[:num_dims] if num_dims <= MAX_DIMS else (), num_inputs, num_outputs, _string(strings, at),
        None if stage == _NONE else stage, None if micro_batch == _NONE else micro_batch, "?FB"[kind].strip("?"),
        _string(strings, plan_op), step - 1 if step else None, issued_ns, waited_ns, done_ns,
    )  # fmt: skip


def _string(strings: bytes, offset: int) -> str:
    if offset == 0:
        return ""
    length = int.from_bytes(strings[offset : offset + 2], "little")
    return strings[offset + 2 : offset + 2 + length].decode(errors="replace")


@lru_cache(maxsize=4096)
def _group(text: str) -> RingGroup:
    if not text:  # the table of strings was full
        return RingGroup("?", (), "", "")
    data: dict[str, Any] = decode_json(text)
    return RingGroup(str(data["name"]), tuple(map(int, data["ranks"])), str(data["backend"]), str(data["about"]))


def group_text(group: RingGroup) -> str:
    """Return the text of a group in the table of strings."""
    return json.dumps(
        {"name": group.name, "ranks": list(group.ranks), "backend": group.backend, "about": group.about}
    )  # fmt: skip


def _unreadable(path: Path, why: str) -> PlanFileError:
    return PlanFileError(
        UNREADABLE_RING.finding(
            f"`{path}` cannot be read as a ring: {why}", Location(str(path)),
            "name the directory that `pipeproof.torch.watch` or `pipeproof.paddle.watch` wrote, with the same version",
        )
    )  # fmt: skip
