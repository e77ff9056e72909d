"""How findings about buffers are worded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from pipeproof.schedule.columns import QUEUES
from pipeproof.schedule.ops import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, OpKind
from pipeproof.schedule.optable import NONE, IntColumn
from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, Location, OpsWitness
from pipeproof.verify.lifetime.analysis import MOST_PER_CODE, Lifetimes
from pipeproof.verify.lifetime.tensors import FREES, WRITES
from pipeproof.verify.lifetime.uses import Uses
from pipeproof.verify.subject import Subject, finding

_STAGE_KINDS = frozenset({OpKind.REDUCE_GRAD, OpKind.SCALE_GRAD, OpKind.STEP})
_WEIGHT_KINDS = frozenset({OpKind.UNSHARD, OpKind.RESHARD, OpKind.GATHER_WEIGHT})


class Words:
    """Words for uses of one subject's buffers; ``home`` gives the graph's id of each operation, if that is another."""

    def __init__(self, found: Lifetimes, uses: Uses, home: IntColumn | None = None) -> None:
        self.subject = found.subject
        self._graph = found.subject.graph
        self._uses, self._home = uses, home

    def op(self, place: int) -> int:
        """The graph's id of the operation of a use."""
        op = int(self._uses.op[place])
        return op if self._home is None else int(self._home[op])

    def text(self, place: int) -> str:
        """The operation of a use."""
        return str(self._graph.ops[self.op(place)])

    def rank(self, place: int) -> str:
        """The rank of a use, with its coordinates."""
        return self.subject.coords_text(int(self._graph.rank[self.op(place)]))

    def does(self, place: int) -> str:
        """What a use does to its buffer, as a verb."""
        mode = int(self._uses.mode[place])
        return "frees" if mode & FREES else "writes" if mode & WRITES else "reads"

    def use(self, place: int, pair: tuple[int, int]) -> str:
        """One of a pair of uses: ``0B0 writes buffer `x```."""
        return f"{self.text(place)} {self.does(place)} {self.buffer(*pair)}"

    def buffer(self, first: int, second: int) -> str:
        """The buffer of two uses, by its name or by what makes it."""
        named = self._uses.name_of(int(self._uses.buffer[first]))
        if named is not None:
            return f"buffer `{named[1]}`"
        if self._uses.buffer[first] >= self._uses.first_lasting:
            return self._lasting(first, second)
        ids = [self.op(first), self.op(second)]
        for kinds, what in ((RECV_KINDS, "what {} receives"), (SEND_KINDS, "what {} sends")):
            for op in ids:
                if self._graph.ops[op].kind in kinds:
                    return what.format(self._graph.ops[op])
        maker = next((op for op in ids if self._graph.ops[op].kind in COMPUTE_KINDS), ids[0])
        return f"what {self._graph.ops[maker]} makes"

    def _lasting(self, first: int, second: int) -> str:
        kinds = {self._graph.ops[self.op(place)].kind for place in (first, second)}
        stage = self._graph.ops[self.op(first)].stage
        weights = kinds & _WEIGHT_KINDS or not kinds & (_STAGE_KINDS | {OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})
        return f"the {'weights' if weights else 'gradient'} of stage {stage}"

    def queue(self, place: int) -> str:
        """Where an operation runs."""
        number = int(self._graph.queue[self.op(place)])
        return "its channel" if number == NONE else f"queue `{self._graph.queues[number]}`"

    def wait(self, place: int) -> str:
        """Which wait there is for an operation: ``WAIT(x) comes too late``."""
        op = self.op(place)
        waits = (self._graph.waits_for == op).nonzero()[0]
        text = self._graph.ops[op]
        if not len(waits):
            return f"nothing waits for {text}"
        number = int(self._graph.queue[waits[0]])
        if number >= len(QUEUES):
            return f"WAIT({text}) holds only queue `{self._graph.queues[number]}`"
        return f"WAIT({text}) comes too late"


def about(subject: Subject, doc: RuleDoc, message: str, ops: Iterable[int], help: str) -> Finding:
    """A finding about operations of the graph."""
    witness = OpsWitness(tuple(subject.witness_op(op) for op in ops))
    return finding(doc, message, location=place_of_schedule(subject), help=help, witness=witness)


def place_of_schedule(subject: Subject) -> Location | None:
    """The plan's ``schedule``, where no row has a place of its own."""
    return None if subject.origins else subject.locate("schedule")


def capped(subject: Subject, doc: RuleDoc, findings: Iterator[Finding], total: int) -> Iterator[Finding]:
    """The first findings of ``total``, and one that counts the rest."""
    yield from islice(findings, MOST_PER_CODE)
    if total > MOST_PER_CODE:
        yield finding(
            doc,
            f"and {total - MOST_PER_CODE} more that look alike, not judged one by one",
            location=place_of_schedule(subject),
        )
