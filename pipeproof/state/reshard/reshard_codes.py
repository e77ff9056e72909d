"""Codes of reshards: PP213 to PP216 of the proof, PP923 and PP924 for requests that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeproof.diagnostics.finding import BadPlanError, ExampleKind, RuleDoc
from pipeproof.state.checkpoint import SUFFIX
from pipeproof.state.state_index import INDEX_FILE, read_index

TENSOR_MISMATCH = RuleDoc(
    code="PP213",
    title="a tensor is missing or unexpected",
    explanation=(
        "Each tensor of the target needs a source, and each tensor of the source must be used or be removed by name. A "
        "loader that skips unknown tensors continues with initial weights and does not report it. So no tensor is "
        "skipped. Names are compared exactly, and the nearest ones are shown."
    ),
    wrong="pipeproof state reshard states --to deeper.yaml -o out   # a plan of 9 layers, and the state has 8",
    right="pipeproof state reshard states --to plan_b.yaml -o out   # the same model on another topology",
    kind=ExampleKind.COMMAND,
)

SHAPE_MISMATCH = RuleDoc(
    code="PP214",
    title="a tensor has another shape or type than the target",
    explanation=(
        "Resharding changes where tensors are split, and never their content. A vocabulary that is padded for another "
        "number of tensor-parallel ranks is the exception: if both plans give the number of token ids "
        "(`model.unpadded_vocab_size`), padding is dropped on one side and zero on the other. A type changes only by "
        "an explicit cast."
    ),
    wrong="pipeproof state reshard tp2.yaml tp4.yaml --check   # vocab_size 50432 and 50688, without the number of ids",
    right="pipeproof state reshard tp2.yaml tp4.yaml --check   # both have unpadded_vocab_size: 50257",
    kind=ExampleKind.COMMAND,
)

LOST_ELEMENTS = RuleDoc(
    code="PP215",
    title="elements of a saved tensor are lost",
    explanation=(
        "A map between the tensors of two checkpoints is a bijection: every element of the source is in the target, or "
        "was removed by name, or is padding. If a map reads one region twice and another one never, sizes agree on "
        "both sides. Training then continues with some experts duplicated and others lost."
    ),
    wrong="pipeproof state reshard states --to plan_b.yaml --aoa names.txt -o out   # experts 0 to 3 are read twice",
    right="pipeproof state reshard states --to plan_b.yaml --aoa names.txt -o out   # each expert read by its number",
    kind=ExampleKind.COMMAND,
)

DUPLICATED_ELEMENTS = RuleDoc(
    code="PP216",
    title="elements of a saved tensor are duplicated",
    severity="warning",
    explanation=(
        "Some tensors are saved twice on purpose: an embedding that is also the head, and the copies in modules of "
        "multi-token prediction. Conventions list them. Any other copy is reported: in training each copy gets its own "
        "gradients, and the two diverge."
    ),
    wrong="pipeproof state reshard m.safetensors --to plan.yaml --aoa names.txt -o out   # up is read as gate and up",
    right="pipeproof state reshard m.safetensors --to plan.yaml --aoa names.txt -o out   # gate and up, each its own",
    kind=ExampleKind.COMMAND,
)

PROOF_CODES = (TENSOR_MISMATCH, SHAPE_MISMATCH, LOST_ELEMENTS, DUPLICATED_ELEMENTS)


OUTPUT_UNUSABLE = RuleDoc(
    code="PP923",
    title="a checkpoint cannot be written to this output",
    explanation=(
        "A reshard writes into a hidden directory next to its output, and renames it when it is whole. This needs a "
        "name that is free, a writable directory outside of the source, enough free space for the new files, and no "
        "other process with the same output. An interrupted reshard is resumed only with the same source, the same "
        "target and the same options."
    ),
    wrong="pipeproof state reshard states --to plan_b.yaml -o there    # `there` exists already",
    right="pipeproof state reshard states --to plan_b.yaml -o moved",
    kind=ExampleKind.COMMAND,
)

NOT_CONVERTIBLE = RuleDoc(
    code="PP924",
    title="this checkpoint cannot be converted as requested",
    explanation=(
        "A whole state has the optimizer's states, the step, and the values that training depends on. Files of other "
        "tools have weights only: they can become a plan's state at step 0, and no later one. The names of a "
        "convention depend on the model, which a plan or a state records and a plain file does not."
    ),
    wrong="pipeproof state reshard model.safetensors --names huggingface -o ours.safetensors    # the model is unknown",
    right="pipeproof state reshard model.safetensors --names huggingface --to plan.yaml -o state",
    kind=ExampleKind.COMMAND,
)

REFUSED_CODES = (OUTPUT_UNUSABLE, NOT_CONVERTIBLE)


class RefusedError(BadPlanError):
    """A reshard that cannot begin, or cannot be finished."""

    def __init__(self, doc: RuleDoc, message: str, fix: str) -> None:
        super().__init__(doc.finding(message, help=fix))


def require_not_state_file(path: Path) -> None:
    """Refuse a single file of a state, which has shards of tensors.

    Raises:
        RefusedError: It is one.
        StateError: The index next to it cannot be read.
    """
    directory = path.parent
    if path.suffix != SUFFIX or not path.is_file() or not (directory / INDEX_FILE).is_file():
        return
    if any(file.name == path.name for file in read_index(directory).files):
        message = f"{path} is one file of the state {directory}, with shards of its tensors"
        raise RefusedError(NOT_CONVERTIBLE, message, f"name the state: {directory}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the system into a finding that names the file.

    Raises:
        RefusedError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        fix = "free space or allow writing there, and run the command again"
        raise RefusedError(OUTPUT_UNUSABLE, f"{path} cannot be written: {error.strerror}", fix) from error
