"""What every rank is at, and what to say when one dies, raises or hangs. No processes in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeproof.exec.codes import HUNG
from pipeproof.exec.failures import Failure, failure_from, received_before
from pipeproof.schedule.ops import TRANSFER_KINDS, OpKind
from pipeproof.schedule.optable import NONE
from pipeproof.specs.finding import Finding, OpsWitness, Severity, WitnessOp
from pipeproof.verify.pairs import partner_of
from pipeproof.verify.subject import Subject


@dataclass(slots=True)
class RankState:
    """The last that was heard of a rank."""

    phase: str = "starting"
    step: int = -1
    op_id: int = NONE
    device: tuple[int, int] | None = None
    """The step and operation that its GPU was last seen at, where one is followed."""
    steps_done: int = 0
    threads: int = 0
    """Compute threads that the worker measured after pinning; 0 before it said so."""
    finished: bool = False
    failure: Failure | None = None
    """What ended the worker, where it said so itself."""
    heard_s: float = 0.0
    """0 while nothing was ever heard: under another's launcher each process hears itself alone."""

    @property
    def is_ahead(self) -> bool:
        """Whether the host has gone on while its GPU is still at an earlier operation."""
        return self.device is not None and self.op_id != NONE and self.device < (self.step, self.op_id)

    @property
    def place(self) -> tuple[int, int]:
        """The step and operation that the rank is at: of its GPU, where the host has gone on."""
        return self.device if self.device is not None and self.is_ahead else (self.step, self.op_id)


@dataclass
class JobState:
    """All ranks, fed by their events. Times are given in from outside, in seconds of any monotonic clock."""

    subject: Subject
    ranks: list[RankState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [RankState() for _ in range(self.subject.graph.num_ranks)]

    def handle(self, rank: int, event: dict[str, Any], now_s: float) -> None:
        """Take one event of one rank."""
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
    def all_ready(self) -> bool:
        """Whether every rank has set up and begun its program."""
        return all(state.threads > 0 for state in self.ranks)

    @property
    def all_finished(self) -> bool:
        """Whether every rank has come to the end of its last step."""
        return all(state.finished for state in self.ranks)

    @property
    def last_heard_s(self) -> float:
        """When the last event of any rank came."""
        return max(state.heard_s for state in self.ranks)

    @property
    def threads(self) -> int:
        """The most compute threads that any worker has reported."""
        return max(state.threads for state in self.ranks)

    def died(self, rank: int, how: str) -> Finding:
        """A rank's process ended early; ``how`` says how (a signal, an exit status) where it did not say so itself."""
        failure = self.ranks[rank].failure or Failure(how, 0)
        what = failure.text if self.ranks[rank].failure else how
        return Finding(
            failure.code,
            Severity.ERROR,
            f"{self.subject.coords_text(rank)} {what}, {self._where(rank)}{self._input(rank)}; {self._others(rank)}",
            help=failure.help,
            witness=self._witness(rank),
        )

    def hung(self, timeout_s: float, stopped: int | None = None) -> Finding:
        """Nothing moved for ``timeout_s``: name the rank that the others wait for.

        ``stopped`` is a rank whose process the system holds in a stop, if there is one.
        """
        rank = self._root_of_hang() if stopped is None else stopped
        return Finding(
            HUNG.code,
            Severity.ERROR,
            f"{self.subject.coords_text(rank)} hangs: no rank has made progress for {timeout_s:g} s; it is "
            f"{self._where(rank).removeprefix('while ')}; {self._others(rank)}",
            help="all ranks were stopped; `--timeout` sets the watchdog's time, `--logs DIR` keeps the output",
            witness=self._witness(rank),
        )

    def _root_of_hang(self) -> int:
        """Follow who waits for whom, from any unfinished rank, until a rank that waits for nobody or a circle."""
        rank = next((r for r, state in enumerate(self.ranks) if not state.finished), 0)
        seen: list[int] = []
        while rank not in seen:
            seen.append(rank)
            waited_for = self._waits_for_rank(rank)
            if waited_for is None:
                return rank
            rank = waited_for
        return rank

    def _waits_for_rank(self, rank: int) -> int | None:
        """The rank whose action this rank's current operation needs and which has not come to it yet."""
        graph, state = self.subject.graph, self.ranks[rank]
        if state.op_id == NONE:
            return self._behind_at_setup(state)
        step, op_id = state.place
        op = graph.ops[op_id]
        if op.kind is OpKind.WAIT:
            partner = graph.match_of.get(int(graph.waits_for[op_id]), NONE)
            if partner == NONE:
                return None
            other = int(graph.rank[partner])
            return other if self._is_before(other, step, partner) else None
        for member in graph.members_of(op_id):
            other = int(graph.rank[member])
            if other != rank and self._is_before(other, step, member):
                return other
        return None

    def _behind_at_setup(self, state: RankState) -> int | None:
        """The rank in another phase that was heard longest ago, before this one.

        A barrier ends each phase, so whoever has come to a later phase was heard after all of the earlier one.
        """
        behind = [
            r for r, other in enumerate(self.ranks) if other.phase != state.phase and other.heard_s < state.heard_s
        ]
        return min(behind, key=lambda r: self.ranks[r].heard_s) if behind else None

    def _is_before(self, rank: int, step: int, op_id: int) -> bool:
        """Whether ``rank`` has not come past ``op_id`` of ``step`` yet."""
        return self.ranks[rank].place < (step, op_id)

    def _where(self, rank: int) -> str:
        state = self.ranks[rank]
        if state.op_id == NONE:
            return f"while {state.phase}"
        ops, (step, op_id) = self.subject.graph.ops, state.place
        ahead = (
            f" on its GPU (its host has gone on to {ops[state.op_id]} of step {state.step})" if state.is_ahead else ""
        )
        return f"at {ops[op_id]} of step {step}{ahead}; {self._expected(op_id)}"

    def _input(self, rank: int) -> str:
        """What the operation that a rank is at works on, if it computes."""
        op_id = self.ranks[rank].place[1]
        text = "" if op_id == NONE else received_before(self.subject.graph, op_id)
        return text and f"; {text}"

    def _expected(self, op_id: int) -> str:
        """What the graph expects at an operation: its counterpart, or the next transfer that hangs on it."""
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
                    f"the graph expects it to go on to {graph.ops[later]}, which its peer rank "
                    f"{int(graph.peer[later])} meets with {partner_of(graph.ops[later])}"
                )
        return "the graph expects no more transfers of it in this step"

    def _others(self, rank: int) -> str:
        if len(self.ranks) == 1:
            return "it was the only rank"
        places = []
        for other, state in enumerate(self.ranks):
            if other != rank and state.heard_s > 0.0:
                op = "" if state.op_id == NONE else f" at {self.subject.graph.ops[state.place[1]]}"
                places.append(f"rank {other} {'finished' if state.finished else state.phase}{op}")
        return "meanwhile " + ", ".join(places) if places else "of the other ranks nothing is known here"

    def _witness(self, rank: int) -> OpsWitness | None:
        graph = self.subject.graph
        ids = [s.place[1] for r, s in enumerate(self.ranks) if s.op_id != NONE and r != rank]
        mine = self.ranks[rank].place[1]
        ops = [mine, *ids] if mine != NONE else ids
        if not ops:
            return None
        return OpsWitness(tuple(WitnessOp(int(graph.rank[i]), str(graph.ops[i]), i) for i in ops))
