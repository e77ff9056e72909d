"""504: pools of slots that transfers share, and the smallest sufficient number; 515, 516: offloaded activations.

With ``buffers.receive_slots: n`` the k-th receive of a channel goes into slot
k modulo n, and the stage works on the tensor there: the slot is free once the
gather (of slices), or else every forward and backward that reads the tensor,
is done. With ``buffers.send_slots: n`` the k-th send of a channel is copied
into slot k modulo n where it is posted, and the slot is free after the send's
wait. Counting starts anew in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from pipeproof.diagnostics.finding import Finding, RuleDoc
from pipeproof.schedule.derive import BoolColumn, packed
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import COPY_KINDS, KIND_CODE, OpKind
from pipeproof.verify.lifetime.happens_before import Order, order_of
from pipeproof.verify.lifetime.race_rules import about
from pipeproof.verify.lifetime.races import lifetimes
from pipeproof.verify.lifetime.tensor_buffers import StageTensors
from pipeproof.verify.subject import Rule, Subject

_MOST_POOLS = 4
"""Maximum number of too small pools that are named; the help has the number for all."""


@dataclass(frozen=True, eq=False)
class Pool:
    """The slots of one end of a channel: its transfers in order, and the operations that hold a slot.

    ``holders`` has shape [kinds of holders, transfers]; NONE where a transfer
    has none of that kind.
    """

    channel: int
    transfers: IntColumn
    holders: IntColumn

    def clash(self, order: Order, twice: Order | None, num_slots: int) -> tuple[int, int, int] | None:
        """The first (owner, holder, next owner) whose order is open with so many slots, as operations of a step.

        ``twice`` is the order of two steps, where it is not plain that one ends before the next begins.
        """
        held, following = self.holders[:, :-num_slots], self.transfers[num_slots:]
        conflict = self._first_open(order, order, held, following, self.transfers)
        if conflict is None and twice is not None:
            in_first, in_second = (np.flatnonzero(twice.step == step) for step in range(2))
            last = np.arange(max(0, len(self.transfers) - num_slots), len(self.transfers))
            holders = np.where(self.holders[:, last] == NONE, NONE, in_first[self.holders[:, last]])
            following = in_second[self.transfers[last % num_slots]]
            conflict = self._first_open(order, twice, holders, following, self.transfers[last])
        return conflict

    @staticmethod
    def _first_open(
        home: Order, order: Order, held: IntColumn, following: IntColumn, owners: IntColumn
    ) -> tuple[int, int, int] | None:
        kind, column = np.nonzero(held != NONE)
        holder, then = held[kind, column], following[column]
        in_program = holder < then
        ordered = np.zeros(len(then), dtype=bool)
        ordered[in_program] = order.definitely_before(holder[in_program], then[in_program])
        for i in np.flatnonzero(~ordered)[np.argsort(then[~ordered], kind="stable")].tolist():
            if not order.before(int(holder[i]), int(then[i])):
                return int(owners[column[i]]), int(order.home[holder[i]]), int(order.home[then[i]])
        return None

    @cached_property
    def by_program(self) -> int:
        """The number of slots that is enough if operations happen in program order.

        A transfer after all holders of an earlier one can take its slot; the
        transfers in between, and itself, need slots of their own.
        """
        until = np.searchsorted(self.transfers, self.holders.max(axis=0))
        return max(1, int((until - np.arange(len(self.transfers))).max(initial=1)))

    def smallest(self, order: Order) -> int:
        """The smallest number of slots that is enough within a step."""
        needed = self.by_program
        while self.clash(order, None, needed) is not None:
            needed += 1
        while needed > 1 and self.clash(order, None, needed - 1) is None:
            needed -= 1
        return needed


def pools(subject: Subject, *, incoming: bool) -> Iterator[Pool]:
    """Every pool of receive slots, or of send slots, in order of channels."""
    graph = subject.graph
    tensors = StageTensors(graph)
    wait = np.full(graph.num_ops, NONE, dtype=np.int64)
    waits = np.flatnonzero(graph.waits_for != NONE)
    wait[graph.waits_for[waits]] = waits
    kinds = (
        (OpKind.RECV_FORWARD, OpKind.GATHER_FORWARD, (OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT)),
        (OpKind.RECV_BACKWARD, OpKind.GATHER_BACKWARD, (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)),
    )
    for recv, gather, readers in kinds:
        send = OpKind.SEND_FORWARD if recv is OpKind.RECV_FORWARD else OpKind.SEND_BACKWARD
        transfers = tensors.of_kind(recv if incoming else send)
        holders = [wait[transfers]]
        if incoming:
            gathers = tensors.last_at(tensors.of_kind(gather))[tensors.place[transfers]]
            whole = gathers == NONE
            for reader in (*readers, OpKind.BACKWARD_WEIGHT):
                last = tensors.last_at(tensors.of_kind(reader))[tensors.place[transfers]]
                holders.append(np.where(whole, last, NONE))
            holders.append(gathers)
        channel = graph.channel[transfers]
        by_channel = np.argsort(channel, kind="stable")
        begins = np.flatnonzero(np.diff(channel[by_channel], prepend=NONE))
        for selected in np.split(by_channel, begins[1:]) if len(by_channel) else []:
            yield Pool(int(channel[selected[0]]), transfers[selected], np.stack(holders)[:, selected])


def smallest_slots(subject: Subject, *, incoming: bool) -> int:
    """The smallest ``receive_slots`` (or ``send_slots``) with which no slot is taken while it is held; at least 1.

    From one step to the next no number helps, for counting starts anew.
    """
    order, twice = _orders(subject)
    enough = 1
    for pool in sorted(pools(subject, incoming=incoming), key=lambda pool: -pool.by_program):
        if twice is not None or pool.by_program > enough:  # with one compute queue, program order is enough
            enough = max(enough, pool.smallest(order))
    return enough


def _orders(subject: Subject) -> tuple[Order, Order | None]:
    """The order of one step, and of two if queues of other names may reach from one step into the next."""
    graph = subject.graph
    plain = not ((graph.queue > 0).any() or (graph.batch != NONE).any())
    return subject.once(lifetimes).order, None if plain else order_of(graph, subject.backend, num_steps=2)


TOO_FEW = RuleDoc(
    code="PP504",
    title="a pool has too few slots",
    explanation=(
        "Receives (or sends) of a channel take the slots of a pool round-robin. With too few, a message is written "
        "into a slot whose tensor is still needed: a stage keeps its input until its backward, a send its copy until "
        "its wait. The message names the smallest number that is enough for this order of operations."
    ),
    wrong="schedule: {num_micro_batches: 8}\nbuffers: {receive_slots: 1}\ntopology: {pp: 4}",
    right="schedule: {num_micro_batches: 8}\nbuffers: {receive_slots: 3}\ntopology: {pp: 4}",
)


def _check_slots(subject: Subject) -> Iterator[Finding]:
    buffers = subject.plan.spec.buffers
    for declared, incoming in ((buffers.receive_slots, True), (buffers.send_slots, False)):
        if declared is not None:
            clashes = _clashes(subject, declared, incoming=incoming)
            first = list(islice(clashes, _MOST_POOLS))
            enough = smallest_slots(subject, incoming=incoming) if first else declared
            for pool, clash in first:
                yield _too_few(subject, pool, clash, declared, enough, incoming=incoming)


def _clashes(subject: Subject, declared: int, *, incoming: bool) -> Iterator[tuple[Pool, tuple[int, int, int]]]:
    order, twice = _orders(subject)
    for pool in pools(subject, incoming=incoming):
        clash = pool.clash(order, twice, declared)
        if clash is not None:
            yield pool, clash


def _too_few(
    subject: Subject, pool: Pool, clash: tuple[int, int, int], declared: int, enough: int, *, incoming: bool
) -> Finding:
    graph = subject.graph
    owner, holder, following = clash
    key = "receive_slots" if incoming else "send_slots"
    slot = int(graph.position[owner]) % declared
    wait = graph.kind[holder] == KIND_CODE[OpKind.WAIT]
    until = f"{graph.ops[holder]} {'confirms that it is done' if wait else 'is done with it'}"
    order, _ = _orders(subject)
    if pool.clash(order, None, declared) is None:
        when, fix = " in the next step", f"wait for {graph.ops[holder]} at the end of the step"
    else:
        when = ""
        fix = f"set buffers.{key} to {enough}, the smallest number that is enough for every channel"
        until += f"; this channel needs {pool.smallest(order)} slots"
    return TOO_FEW.finding(
        f"{subject.coords_text(int(graph.rank[owner]))}, channel {graph.channels[pool.channel]}: "
        f"{graph.ops[following]} takes slot {slot} of {declared}{when}, which {graph.ops[owner]} holds until {until}",
        location=subject.locate("buffers", key),
        help=fix,
        witness=subject.witness(owner, holder, following),
    )


_ROUND_TRIP = (
    "rank 0: 0F0 WAIT(0F0){queue=offload} 0OFFLOAD0{queue=offload} WAIT(0OFFLOAD0) FREE(0OFFLOAD0) "
    "0RELOAD0{queue=offload} WAIT(0RELOAD0) 0B0 0STEP"
)

NOTHING_TO_COPY = RuleDoc(
    code="PP515",
    title="a copy of activations that do not exist",
    explanation=(
        "`OFFLOAD` copies the kept activations of a forward into host memory, and `RELOAD` copies them back. A "
        "reload without an offload of the same work item on its rank, or an offload without a forward, reads memory "
        "that nothing has written: the backward computes from an earlier step's values, or from none."
    ),
    wrong="rank 0: 0F0 0RELOAD0 0B0 0STEP",
    right=_ROUND_TRIP,
)

NEVER_FREED = RuleDoc(
    code="PP516",
    title="offloaded activations stay on the device",
    severity="warning",
    explanation=(
        "`FREE(0OFFLOAD0)`, after the wait for the copy, gives the device's memory back; the copy alone saves none. "
        "Without it, the device holds the activations twice once they are reloaded."
    ),
    wrong=_ROUND_TRIP.replace(" FREE(0OFFLOAD0)", ""),
    right=_ROUND_TRIP,
)


def _check_source(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    for copy, source in ((OpKind.OFFLOAD, OpKind.FORWARD), (OpKind.RELOAD, OpKind.OFFLOAD)):
        for op_id in _without(graph, graph.kind == KIND_CODE[copy], graph.kind == KIND_CODE[source]).tolist():
            op = graph.ops[op_id]
            missing = op._replace(kind=source)
            fact = f"{op} copies what {missing} would have put there, and the rank has no {missing}"
            yield about(
                subject,
                NOTHING_TO_COPY,
                f"{subject.coords_text(int(graph.rank[op_id]))}: {fact}",
                (op_id,),
                f"add {missing} before {op}, or remove {op}",
            )


def _check_freed(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    if not graph.is_kind(COPY_KINDS).any():
        return
    frees = (graph.kind == KIND_CODE[OpKind.FREE]) & (graph.target_kind == KIND_CODE[OpKind.OFFLOAD])
    for op_id in _without(graph, graph.kind == KIND_CODE[OpKind.OFFLOAD], frees).tolist():
        op = graph.ops[op_id]
        yield about(
            subject,
            NEVER_FREED,
            f"{subject.coords_text(int(graph.rank[op_id]))}: {op} saves no memory, for nothing frees its original",
            (op_id,),
            f"add FREE({op}) after WAIT({op})",
        )


def _without(graph: OpGraph, these: BoolColumn, those: BoolColumn) -> IntColumn:
    """Operations in the mask ``these`` without one in ``those`` for the same rank, stage and work item."""
    if not these.any():
        return np.flatnonzero(these)
    key = packed(graph.rank, graph.stage, graph.work_item)
    return np.flatnonzero(these & ~np.isin(key, key[those]))


RULES: tuple[Rule, ...] = (
    Rule(NOTHING_TO_COPY, _check_source),
    Rule(NEVER_FREED, _check_freed),
    Rule(TOO_FEW, _check_slots, needs_plan=True),
)
