"""State of every rank by its events, and the findings about a rank that died, raised or hangs; starts no process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeproof.diagnostics.finding import Finding, OpsWitness, Severity, WitnessOp
from pipeproof.diagnostics.wait_graph import Wait, WaitGraph, cycle_headline, wait_lines
from pipeproof.exec.rank.failures import Failure, failure_from, received_before
from pipeproof.exec.store.run_codes import HUNG
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import TRANSFER_KINDS, OpKind
from pipeproof.verify.fifo_matching import partner_of
from pipeproof.verify.subject import Subject

_MOST_OTHERS = 16
"""Other ranks whose state a finding names."""


@dataclass(slots=True)
class RankState:
    """Last known state of a rank."""

    phase: str = "starting"
    step: int = -1
    op_id: int = NONE
    device: tuple[int, int] | None = None
    """Step and last known operation of its GPU, if the GPU is followed."""
    steps_done: int = 0
    threads: int = 0
    """Compute threads that the worker measured after pinning; 0 until it reports them."""
    finished: bool = False
    failure: Failure | None = None
    """The error that ended the worker, if the worker reported it."""
    heard_s: float = 0.0
    """Time of the last event; 0 before the first."""

    @property
    def is_ahead(self) -> bool:
        """True if the GPU is still at an earlier operation than the host."""
        return self.device is not None and self.op_id != NONE and self.device < (self.step, self.op_id)

    @property
    def position(self) -> tuple[int, int]:
        """Step and operation of the rank, or of its GPU if the host is ahead."""
        return self.device if self.device is not None and self.is_ahead else (self.step, self.op_id)


@dataclass
class JobState:
    """States of all ranks, updated by their events. Times are passed in, in seconds of any monotonic clock."""

    subject: Subject
    ranks: list[RankState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [RankState() for _ in range(self.subject.graph.num_ranks)]

    def handle(self, rank: int, event: dict[str, Any], now_s: float) -> None:
        """Handle one event of one rank."""
        state = self.ranks[rank]
        state.heard_s = now_s
        match event["kind"]:
            case "setup":
                state.phase, state.op_id, state.device = event["what"], NONE, None
            case "ready":
                state.phase, state.threads = "running", event["threads"]
            case "at":
                state.step, state.op_id = event["step"], event["op"]
            case "device":
                state.device = event["step"], event["op"]
            case "step":
                state.steps_done = event["step"] + 1
            case "finished":
                state.finished = True
            case "error":
                state.failure = failure_from(event)

    @property
    def phase(self) -> str:
        """Phase of the first rank that is still in its set-up, else ``running``."""
        return next((rank.phase for rank in self.ranks if rank.phase != "running"), "running")

    @property
    def all_ready(self) -> bool:
        """True if every rank has finished its set-up and begun its program."""
        return all(state.threads > 0 for state in self.ranks)

    @property
    def all_finished(self) -> bool:
        """True if every rank has finished its last step."""
        return all(state.finished for state in self.ranks)

    @property
    def last_heard_s(self) -> float:
        """Time of the last event of any rank."""
        return max(state.heard_s for state in self.ranks)

    @property
    def threads(self) -> int:
        """Largest number of compute threads that a worker has reported."""
        return max(state.threads for state in self.ranks)

    def died(self, rank: int, end: str) -> Finding:
        """Finding that a rank's process ended early; ``end`` (signal, exit status) is used if it reported no error."""
        failure = self.ranks[rank].failure or Failure(end, 0)
        text = failure.text if self.ranks[rank].failure else end
        return Finding(
            failure.code,
            Severity.ERROR,
            f"{self.subject.coords_text(rank)} {text}, {self.position_text(rank)}{self._input_text(rank)}; "
            f"{self._others_text(rank)}",
            help=failure.help,
            witness=self._witness(rank),
        )

    def hung(self, timeout_s: float, stopped: int | None = None) -> Finding:
        """Finding that no rank made progress for ``timeout_s``; names the rank that the others wait for.

        ``stopped`` is a rank whose process is stopped (SIGSTOP), if there is one.
        """
        waits = self._wait_graph()
        end = next(waits.ends(rank for rank, state in enumerate(self.ranks) if not state.finished), (0,))
        cycle = waits.cycle(end) if stopped is None else []
        rank = end[0] if stopped is None else stopped
        circle = f"{cycle_headline(cycle)}: {'; '.join(wait_lines([wait for _, wait in cycle]))}; " if cycle else ""
        return HUNG.finding(
            f"{self.subject.coords_text(rank)} hangs: no rank has made progress for {timeout_s:g} s; it is "
            f"{self.position_text(rank).removeprefix('while ')}; {circle}{self._others_text(rank)}",
            help="all ranks were stopped; `--timeout` sets the watchdog's time, `--logs DIR` keeps the output",
            witness=self._witness(rank),
        )

    def _wait_graph(self) -> WaitGraph[int]:
        graph = WaitGraph(range(len(self.ranks)))
        for rank, state in enumerate(self.ranks):
            for other in () if state.finished else self._awaited_ranks(rank):
                op = state.phase if state.op_id == NONE else str(self.subject.graph.ops[state.position[1]])
                graph.add(rank, other, Wait(rank, op, f"rank {other}"))
        return graph

    def _awaited_ranks(self, rank: int) -> Iterator[int]:
        """Ranks that this rank's current operation needs and that have not reached their part yet."""
        graph, state = self.subject.graph, self.ranks[rank]
        if state.op_id == NONE:
            yield from self._behind_at_setup(state)
            return
        step, op_id = state.position
        needed = list(graph.members_of(op_id))
        if graph.ops[op_id].kind is OpKind.WAIT:
            partner = graph.match_of.get(int(graph.waits_for[op_id]), NONE)
            needed = [partner] if partner != NONE else []
        for each in needed:
            other = int(graph.rank[each])
            if other != rank and self.ranks[other].position < (step, each):
                yield other

    def _behind_at_setup(self, state: RankState) -> list[int]:
        """Rank in another phase whose last event is the oldest, and older than this rank's.

        A barrier ends each phase, so ranks in a later phase sent an event after all ranks of the earlier one.
        """
        behind = [r for r, s in enumerate(self.ranks) if s.phase != state.phase and s.heard_s < state.heard_s]
        return sorted(behind, key=lambda r: self.ranks[r].heard_s)[:1]

    def position_text(self, rank: int) -> str:
        """Text on a rank's position: its phase, or its operation and the graph's expectation there."""
        state = self.ranks[rank]
        if state.op_id == NONE:
            return f"while {state.phase}"
        ops, (step, op_id) = self.subject.graph.ops, state.position
        ahead = f" on its GPU (its host is ahead, at {ops[state.op_id]} of step {state.step})" if state.is_ahead else ""
        return f"at {ops[op_id]} of step {step}{ahead}; {self._expectation(op_id)}"

    def _input_text(self, rank: int) -> str:
        op_id = self.ranks[rank].position[1]
        text = "" if op_id == NONE else received_before(self.subject.graph, op_id)
        return text and f"; {text}"

    def _expectation(self, op_id: int) -> str:
        """Text on the graph's expectation at an operation: its counterpart, or the next transfer that depends on it."""
        graph = self.subject.graph
        op = graph.ops[op_id]
        if op.kind is OpKind.WAIT and op.target is not None and op.target.kind in TRANSFER_KINDS:
            peer = int(graph.peer[int(graph.waits_for[op_id])])
            return f"the graph expects its peer rank {peer} to issue {partner_of(op.target)}"
        members = graph.members_of(op_id)
        if members:
            group = graph.groups[int(graph.group[members[0]])]
            return f"the graph expects ranks {list(group.ranks)} to join this {group.axis} collective"
        end = int(graph.offsets[int(graph.rank[op_id]) + 1])
        for later in range(op_id + 1, end):
            if graph.ops[later].kind in TRANSFER_KINDS:
                return (
                    f"the graph expects it to continue with {graph.ops[later]}, which its peer rank "
                    f"{int(graph.peer[later])} matches with {partner_of(graph.ops[later])}"
                )
        return "the graph expects no more transfers of this rank in this step"

    def _others_text(self, rank: int) -> str:
        if len(self.ranks) == 1:
            return "it was the only rank"
        others = [other for other, state in enumerate(self.ranks) if other != rank and state.heard_s > 0.0]
        texts: list[str] = []
        for other in others[:_MOST_OTHERS]:
            state = self.ranks[other]
            op = "" if state.op_id == NONE else f" at {self.subject.graph.ops[state.position[1]]}"
            texts.append(f"rank {other} {'finished' if state.finished else state.phase}{op}")
        if len(others) > _MOST_OTHERS:
            texts.append(f"and {len(others) - _MOST_OTHERS} more ranks")
        return "meanwhile " + ", ".join(texts) if texts else "nothing is known here about the other ranks"

    def _witness(self, rank: int) -> OpsWitness | None:
        graph = self.subject.graph
        others = [s.position[1] for r, s in enumerate(self.ranks) if s.op_id != NONE and r != rank]
        op_id = self.ranks[rank].position[1]
        ops = [op_id, *others] if op_id != NONE else others
        if not ops:
            return None
        return OpsWitness(tuple(WitnessOp(int(graph.rank[i]), str(graph.ops[i]), i) for i in ops))
