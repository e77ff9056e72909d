"""PP920 and its error: states that a run cannot resume from. Also the guards for reading files."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from pipeproof.diagnostics.finding import ExampleKind, PipeproofError, RuleDoc

STATE_UNUSABLE = RuleDoc(
    code="PP920",
    title="a run cannot resume from this state",
    explanation=(
        "A run resumes from a state if training by its plan is the same: the same framework and the same values of "
        "everything that training depends on (model, loss, seed, optimizer). Topology, schedule, layer split and "
        "sharding may differ: each rank reads its shards from any file. A state of weights alone may be of another "
        "framework, and the optimizer starts anew. The files of the state must exist, with the size and the SHA-256 of "
        "the index, and hold every element of every tensor once. Everything is checked before the first process "
        "starts, so that nothing is loaded in part."
    ),
    wrong="pipeproof run plan.yaml --resume states   # saved with run.seed 7, the plan has 8",
    right="pipeproof run plan.yaml --resume states   # the plan that it was saved with",
    kind=ExampleKind.COMMAND,
)

DATA_CHANGES = RuleDoc(
    code="PP925",
    title="training continues with other micro-batches",
    severity="note",
    explanation=(
        "The micro-batches of a step are counted over all data-parallel ranks. If their number or size changes, each "
        "later step sums other gradients, so that no plan with the former micro-batches has its bits. The state itself "
        "is loaded bit for bit. Every micro-batch is drawn by the seed, the step and its number in the step. So the "
        "data resumes with the first micro-batch of the next step, and nothing is repeated."
    ),
    wrong="pipeproof run dp4.yaml --resume states   # saved with dp 2 and as many micro-batches: twice the batch",
    right="pipeproof run dp4.yaml --resume states   # with half of num_micro_batches: the same steps",
    kind=ExampleKind.COMMAND,
)

STATE_CODES = (STATE_UNUSABLE, DATA_CHANGES)


class StateError(PipeproofError):
    """A state that cannot be used or written; subclasses have codes of their own."""

    doc: ClassVar[RuleDoc] = STATE_UNUSABLE

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(self.doc.finding(message, help=fix))


@contextmanager
def reading(path: Path, fix: str) -> Iterator[None]:
    """Turn errors of the system into a finding that names the file; ``fix`` is for files that are missing or broken.

    Raises:
        StateError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError):
            fix = "give this user permission to read it"
        raise StateError(f"{path} cannot be read: {error.strerror}", fix) from error


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes. A read from a pipe would block, and a device has no end.

    Raises:
        OSError: The file is missing, or is a directory, a pipe or a device.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "it is a directory, a pipe or a device, and no file")
    return found.st_size
