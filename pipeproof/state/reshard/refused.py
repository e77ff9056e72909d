"""Why a checkpoint is not moved, beside what the proof finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeproof.specs.codes import ExampleKind, RuleDoc
from pipeproof.specs.finding import BadPlanError, Finding, Severity
from pipeproof.state.checkpoint import SUFFIX
from pipeproof.state.index import INDEX_FILE, read_index

NO_PLACE = RuleDoc(
    code="PP923",
    title="a checkpoint cannot be written there",
    severity="error",
    explanation=(
        "A reshard writes into a hidden directory beside what it is to make, and gives it its name when it is whole. "
        "That asks for a name that is free, a directory that may be written to and lies outside of the source, as much "
        "room on the disk as the new files take, and nobody else who makes the same. What an interrupted reshard left "
        "is gone on with by the same source, the same target and the same options alone."
    ),
    wrong="pipeproof reshard states --to plan_b.yaml -o there    # `there` exists already",
    right="pipeproof reshard states --to plan_b.yaml -o moved",
    kind=ExampleKind.COMMAND,
)

NOT_MADE_OF_IT = RuleDoc(
    code="PP924",
    title="that cannot be made of this checkpoint",
    severity="error",
    explanation=(
        "A whole state has what the optimizer keeps, the step, and the values that training depends on. Other people's "
        "files have weights alone: of them a plan's state at step 0 can be made, and no later one. Names of a "
        "convention say which tensor is which by the model, which a plan or a state tells and a bare file does not."
    ),
    wrong="pipeproof reshard model.safetensors --names huggingface -o ours.safetensors    # of which model?",
    right="pipeproof reshard model.safetensors --names huggingface --to plan.yaml -o state",
    kind=ExampleKind.COMMAND,
)

REFUSED_CODES = (NO_PLACE, NOT_MADE_OF_IT)


class RefusedError(BadPlanError):
    """A reshard that is not begun, or cannot be ended."""

    def __init__(self, doc: RuleDoc, message: str, mend: str) -> None:
        super().__init__(Finding(doc.code, Severity.ERROR, message, help=mend))


def require_no_part(place: Path) -> None:
    """Refuse one file of a state, which has parts of tensors.

    Raises:
        RefusedError: it is one.
        StateError: the index beside it cannot be read.
    """
    directory = place.parent
    if place.suffix != SUFFIX or not place.is_file() or not (directory / INDEX_FILE).is_file():
        return
    if any(file.name == place.name for file in read_index(directory).files):
        message = f"{place} is one file of the state {directory}, with parts of its tensors"
        raise RefusedError(NOT_MADE_OF_IT, message, f"name the state: {directory}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file that the system did not write.

    Raises:
        RefusedError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        mend = "make room or give leave to write there; the same command goes on"
        raise RefusedError(NO_PLACE, f"{path} cannot be written: {error.strerror}", mend) from error
