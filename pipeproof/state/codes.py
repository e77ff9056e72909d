"""9xx: what can be wrong with the state that a run is to go on from, documented."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeproof.specs.codes import ExampleKind, RuleDoc
from pipeproof.specs.finding import Finding, PipeproofError, Severity

NOT_THIS_STATE = RuleDoc(
    code="PP920",
    title="a run cannot go on from this state",
    severity="error",
    explanation=(
        "A run goes on from a state where training by its plan is the same: the same framework and the same values of "
        "everything that training depends on (model, loss, seed, optimizer, micro-batches of a step over all data "
        "ranks). Topology, schedule, cut and sharding may be others: each rank reads what it holds from wherever it "
        "stands. A state of weights alone may be of another framework, and the optimizer begins anew. The state's "
        "files must all be there, as large and with the SHA-256 that the index has, and hold every element of every "
        "tensor once. Everything is looked at before the first process starts, so that nothing is ever loaded in part."
    ),
    wrong="pipeproof run plan.yaml --resume states   # saved with run.seed 7, the plan has 8",
    right="pipeproof run plan.yaml --resume states   # the plan that it was saved with",
    kind=ExampleKind.COMMAND,
)

STATE_CODES = (NOT_THIS_STATE,)


class StateError(PipeproofError):
    """A state that cannot be used, or written."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(Finding(NOT_THIS_STATE.code, Severity.ERROR, message, help=mend))


@contextmanager
def reading(path: Path, mend: str) -> Iterator[None]:
    """Name the file that the system does not read; ``mend`` is for files that are not there, or broken.

    Raises:
        StateError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError):
            mend = "give this user leave to read it"
        raise StateError(f"{path} cannot be read: {error.strerror}", mend) from error
