"""Overlapped pairs: a forward and a backward of one rank that alternate, in the order of the graph's rows.

The forward runs in the rank's thread and the backward in a helper thread. When one of them has issued a collective and
the next row belongs to the other, it lets the other run, and waits for the collective when it runs again.

Sometimes the host must know the result of a collective before the next one, such as the counts before the tokens. It
waits while the device computes for the other half: the next collective is issued after the other's part. It does not
wait for that part, because the result is read, and the next collective begun, on a side stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

from pipeproof.exec.rank.child_collectives import Call
from pipeproof.exec.rank.child_collectives import Host as ChildHost
from pipeproof.exec.rank.framework_protocol import (
    BegunCollective,
    Collectives,
    OverlappedCollectives,
    SideStream,
    Tensor,
)
from pipeproof.exec.rank.machine import ProtocolError
from pipeproof.exec.rank.op_log import HOST_QUEUE, LogEntry, log_queue
from pipeproof.schedule.op_table import NONE, OpGraph
from pipeproof.schedule.ops import FORWARD_KINDS, PART_KINDS, Op, OpKind
from pipeproof.stages.common.experts import Used

# --- Two alternating computations of one rank: one in the rank's own thread, the other in a helper thread ---
# Exactly one of them runs at any time: each lets the other run and waits until that one hands back. Autograd runs a
# backward inside one call, which cannot be left and entered again, so the backward of an overlapped pair needs its own
# thread. On a GPU autograd runs functions in a thread for the device; if one of them lets the other computation run,
# that thread waits, and with it only the helper's call of the backward.


JOIN_S = 10.0
"""Time that an abandoned helper has to end. Only a helper that hangs in communication needs longer; it is a daemon."""


class AlternationEndedError(RuntimeError):
    """The other computation failed, so this one does not get control again."""


class Helper:
    """A computation that runs in a thread of its own while the rank's thread waits in ``resume``, and only then.

    ``name`` names the thread, in which ``set_up`` is called before ``work``.
    """

    def __init__(self, name: str, work: Callable[[], None], set_up: Callable[[], None]) -> None:
        self._work, self._set_up = work, set_up
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._control, self._back = threading.Lock(), threading.Lock()  # each is released to pass control
        self._control.acquire()
        self._back.acquire()
        self._is_abandoned = False
        self._error: BaseException | None = None
        self.has_ended = False

    def resume(self) -> None:
        """Let the work run until it passes control back or ends; call this in the rank's thread.

        Raises:
            BaseException: the work's own error.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._control.release()
        self._back.acquire()
        if self.has_ended:
            self._thread.join()
            if self._error is not None:
                raise self._error

    def give_back(self) -> None:
        """Pass control back and wait for the next one; call this inside the work, also in another of its threads.

        Raises:
            AlternationEndedError: the pair has ended.
        """
        if not self._is_abandoned:
            self._back.release()
            self._control.acquire()
        if self._is_abandoned:
            raise AlternationEndedError("the other computation of the pair has failed")

    def close(self) -> None:
        """End the thread, in which ``give_back`` raises an error if the work has not ended."""
        if self._thread.ident is None or self.has_ended:
            return
        self._is_abandoned = True
        self._control.release()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            self._set_up()
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised in the rank's thread
            self._error = error
        self.has_ended = True
        self._back.release()


@dataclass(frozen=True, slots=True)
class PairRow:
    """A part or collective of a pair. ``owner`` is the op id of its computation; ``queue`` goes into its log entry."""

    op_id: int
    op: Op
    text: str
    owner: int
    queue: str


@dataclass(frozen=True, slots=True)
class OverlappedPair:
    """The rows of a pair, in the order in which they are issued. ``containers`` are its two computations."""

    forward: int
    backward: int
    containers: tuple[tuple[int, str], tuple[int, str]]
    """Op id and text of each, in the order of the graph."""
    rows: tuple[PairRow, ...]


def overlapped_pairs(graph: OpGraph, rank: int) -> dict[int, OverlappedPair]:
    """Return the pairs of a rank that alternate, by the op id of the first computation."""
    rows: dict[int, list[int]] = {}
    with_parts: dict[int, int] = {}
    for op_id in graph.rank_ops(rank):
        parent = int(graph.parent[op_id])
        if parent != NONE and graph.batch[parent] != NONE:
            rows.setdefault(int(graph.batch[parent]), []).append(op_id)
            if graph.ops[op_id].kind in PART_KINDS:
                with_parts.setdefault(parent, int(graph.batch[parent]))
    pairs: dict[int, OverlappedPair] = {}
    for batch in dict.fromkeys(with_parts.values()):
        first, second = sorted(parent for parent, of_batch in with_parts.items() if of_batch == batch)
        is_forward = graph.ops[first].kind in FORWARD_KINDS
        pairs[first] = OverlappedPair(
            *((first, second) if is_forward else (second, first)),
            ((first, str(graph.ops[first])), (second, str(graph.ops[second]))),
            tuple(
                PairRow(i, graph.ops[i], str(graph.ops[i]), int(graph.parent[i]), log_queue(graph, i))
                for i in rows[batch]
            ),
        )
    return pairs


def whole_pairs(graph: OpGraph, rank: int) -> dict[int, OverlappedPair]:
    """Return the pairs of a rank whose computations have no parts, by the op id of the first one."""
    pairs: dict[int, OverlappedPair] = {}
    for first, second in graph.pairs[graph.rank[graph.pairs[:, 0]] == rank].tolist():
        is_forward = graph.ops[first].kind in FORWARD_KINDS
        both = (first, second) if is_forward else (second, first)
        pairs[first] = OverlappedPair(*both, ((first, str(graph.ops[first])), (second, str(graph.ops[second]))), ())
    return pairs


class Host(ChildHost, Protocol):
    """Rank on which a pair runs."""

    def end_of(self, block: Callable[[], object]) -> int:
        """Return the time on its log's clock at which ``block`` ends; 0 if only a waiting caller knows it."""


class PairSegments:
    """One execution of a pair by its rows; a ``child_collectives.Issuer`` of the collectives of both computations.

    ``weights`` adds the weight gradients that the backward has deferred.
    """

    def __init__(self, pair: OverlappedPair, host: Host, weights: Callable[[], None], side_stream: SideStream) -> None:
        self._pair, self._host, self._weights, self._side_stream = pair, host, weights, side_stream
        self._at = 0
        """Index of the row that runs, or that is next."""
        self._owner = NONE
        self._open: LogEntry | None = None
        self._ended: set[int] = set()
        self._announced = NONE
        """The computation whose next collective is begun on the side stream."""

    def run(
        self,
        forward: Callable[[], None],
        backward: Callable[[], None],
        set_up: Callable[[], None],
    ) -> None:
        """Run both computations; ``set_up`` is called first in the thread of the backward.

        Raises:
            ProtocolError: a computation does not issue the collectives of its rows.
            Exception: any error of a computation, with the position in the pair as a note.
        """
        pair, host = self._pair, self._host
        for op_id, text in pair.containers:
            host.enter(op_id)
            entry = host.begin_entry(HOST_QUEUE, text)
            entry.end_ns = entry.start_ns  # its parts take the time, as in a simulation
        name = f"alternation of {self._text(pair.backward)}"
        self._helper = Helper(name, lambda: self._run(pair.backward, backward), set_up)
        try:
            self._alternate(forward)
        except Exception as error:
            row_text = pair.rows[self._at].text if self._at < len(pair.rows) else "its end"
            texts = " and ".join(text for _, text in pair.containers)
            error.add_note(f"{texts} alternate; control is {self._text(self._owner)}'s, and the pair is at {row_text}")
            raise
        finally:
            self._helper.close()

    def issue(self, calls: Sequence[Call]) -> list[Tensor]:
        """Issue collectives of the computation that has control, one after the other; return their results."""
        owner = self._owner
        issued = []
        for call in calls:
            issued.append(self._begin(call))
            self._pass_control(owner)
        results = [self._wait(one) for one in issued]
        self._begin_part()
        return results

    def announce(self, call: Call, use: Callable[[Tensor], Used]) -> Callable[[], Used]:
        """Issue a collective of the computation that has control; return a function that gives ``use`` of its result.

        The other computation runs before that. Everything that the next collective sends is launched earlier.
        """
        owner, issued = self._owner, self._begin(call)
        self._begin_part()

        def arrived() -> Used:
            self._end_part()
            self._side_stream.follow()
            self._pass_control(owner)
            self._announced = owner
            with self._side_stream.launching():
                return use(self._wait(issued))

        return arrived

    def _run(self, owner: int, work: Callable[[], None]) -> None:
        self._owner = owner
        self._begin_part()
        work()
        self._end_part()
        self._ended.add(owner)
        if self._is_at(owner):
            raise ProtocolError(f"{self._text(owner)} has ended before {self._pair.rows[self._at].text}")

    def _others(self) -> None:
        """Execute rows up to the forward's next one: the backward's in its own thread, all others in the rank's."""
        pair = self._pair
        while self._at < len(pair.rows) and not self._is_at(pair.forward):
            row = pair.rows[self._at]
            self._owner = row.owner
            if row.op.kind is OpKind.WEIGHTS:
                self._begin_part(OpKind.WEIGHTS)
                self._weights()
                self._end_part()
            elif pair.backward in self._ended:
                raise ProtocolError(f"{self._text(row.owner)} has ended before {row.text}")
            else:
                self._helper.resume()

    def _alternate(self, forward: Callable[[], None]) -> None:
        self._others()
        self._run(self._pair.forward, forward)
        self._others()
        if left := {self._pair.forward, self._pair.backward} - self._ended:
            raise ProtocolError(f"all rows of the pair have run, and {self._text(min(left))} has not ended")

    def _pass_control(self, owner: int) -> None:
        """Let others execute their rows until the next row is the owner's."""
        if self._is_at(owner):
            return
        if owner == self._pair.forward:
            self._others()
        else:
            self._helper.give_back()
        self._owner = owner

    def _is_at(self, owner: int) -> bool:
        """Return True if the thread of a computation executes the next row."""
        row = self._next()
        return row is not None and row.owner == owner and row.op.kind is not OpKind.WEIGHTS

    def _next(self) -> PairRow | None:
        """The row that runs, or that is next; None at the end."""
        return self._pair.rows[self._at] if self._at < len(self._pair.rows) else None

    def _begin_part(self, kind: OpKind = OpKind.PART) -> None:
        """Begin the next row if it is a part of this kind of the computation that has control."""
        rows = self._pair.rows
        if self._at < len(rows) and rows[self._at].owner == self._owner and rows[self._at].op.kind is kind:
            self._host.enter(rows[self._at].op_id)
            self._open = self._host.begin_entry(HOST_QUEUE, rows[self._at].text)

    def _end_part(self) -> None:
        if self._open is not None:
            self._open.end_ns = self._host.now()
            self._open = None
            self._at += 1

    def _begin(self, call: Call) -> _Issued:
        """Begin a collective, which must be the next row, or the one behind a late collective of the other computation.

        One on the compute queue has ended on return.
        """
        self._end_part()
        host, row = self._host, self._next()
        if row is not None and row.owner != self._owner and row.op.kind not in PART_KINDS:
            self._pass_control(self._owner)
            row = self._next()
        if row is None or row.owner != self._owner or (row.op.kind, row.op.axis) != (call.kind, call.axis):
            expected = "nothing more" if row is None else row.text
            raise ProtocolError(
                f"{self._text(self._owner)} issues {call.kind}:{call.axis}, and the graph has {expected}"
            )
        host.enter(row.op_id)
        collectives = host.collectives_over(call.axis, row.op.stage, call.weight)
        self._at += 1
        if row.queue == HOST_QUEUE:
            entry = host.begin_entry(row.queue, row.text)
            result = call.act(collectives)
            entry.end_ns = host.now()
            return _Issued(call, collectives, entry, lambda: result)
        is_aside = self._announced == row.owner
        with self._side_stream.launching() if is_aside else nullcontext():
            entry = host.begin_entry(row.queue, row.text)
            begun: BegunCollective = call.act(cast(OverlappedCollectives, collectives).begun)
            entry.posted_ns, entry.end_ns = entry.start_ns, host.end_of(begun.block)
        if is_aside:
            self._announced = NONE
        return _Issued(call, collectives, entry, begun.wait, is_aside)

    def _wait(self, issued: _Issued) -> Tensor:
        result = issued.wait()
        if issued.is_aside:
            self._side_stream.keep(result)
        if not issued.entry.end_ns:
            issued.entry.end_ns = self._host.now()
        self._host.fill_in(issued.entry, issued.collectives, issued.call, result)
        return result

    def _text(self, op_id: int) -> str:
        return dict(self._pair.containers).get(op_id, "neither")


class Alternation:
    """One execution of a pair without rows: its halves alternate at their overlap points, the backward first."""

    def __init__(self, pair: OverlappedPair, host: Host) -> None:
        self._pair, self._host = pair, host
        self.is_backward = True
        """True while the backward has control."""
        self.has_forward_ended_first = False

    def run(
        self,
        forward: Callable[[], None],
        backward: Callable[[], None],
        set_up: Callable[[], None],
    ) -> None:
        """Run both computations; ``set_up`` is called first in the thread of the backward.

        Raises:
            Exception: any error of a computation, with the pair as a note.
        """
        pair, host = self._pair, self._host
        entries = {}
        for op_id, text in pair.containers:
            host.enter(op_id)
            entries[op_id] = host.begin_entry(HOST_QUEUE, text)

        def run_backward() -> None:
            backward()
            entries[pair.backward].end_ns = host.now()

        texts = " and ".join(text for _, text in pair.containers)
        self._helper = Helper(f"alternation of {dict(pair.containers)[pair.backward]}", run_backward, set_up)
        try:
            self._resume()
            forward()
            entries[pair.forward].end_ns = host.now()
            self.has_forward_ended_first = not self._helper.has_ended
            while not self._helper.has_ended:
                self._resume()
        except Exception as error:
            error.add_note(f"{texts} alternate at their overlap points")
            raise
        finally:
            self._helper.close()

    def pass_control(self) -> None:
        """Let the other computation run up to its next overlap point or its end."""
        if self.is_backward:
            self._helper.give_back()
            self.is_backward = True
        else:
            self._resume()

    def _resume(self) -> None:
        if not self._helper.has_ended:
            self.is_backward = True
            self._helper.resume()
        self.is_backward = False


@dataclass(frozen=True, slots=True)
class _Issued:
    """A collective that was issued, with its entry in the log."""

    call: Call
    collectives: Collectives
    entry: LogEntry
    wait: Callable[[], Tensor]
    is_aside: bool = False
    """True if it began on the side stream, where its result has its memory."""
