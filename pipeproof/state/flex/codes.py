"""What can be wrong with Paddle's checkpoints, documented."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc
from pipeproof.specs.finding import Finding, PipeproofError, Severity
from pipeproof.state.codes import StateError

NOT_THIS_FLEX = RuleDoc(
    code="PP926",
    title="a checkpoint of Paddle cannot be used",
    severity="error",
    explanation=(
        "Paddle's flex checkpoint is a directory with files of arrays and a metadata file that says which part of "
        "which tensor each file holds. The metadata file is a pickle. It is read here without running anything: a "
        "pickle that asks for more than Paddle's three classes is refused, whatever it asks for. What the metadata "
        "says is held against the headers of all files before anything is used: Paddle itself loads what it finds, "
        "and leaves the rest as it was."
    ),
    wrong="pipeproof reshard states/flex --to plan_b.yaml -o new   # 1_0.safetensors was not copied",
    right="pipeproof reshard states/flex --to plan_b.yaml -o new   # every file that 0.metadata names is there",
    kind=ExampleKind.COMMAND,
)
NOT_AS_FLEX = RuleDoc(
    code="PP927",
    title="a state cannot be saved as a checkpoint of Paddle",
    severity="error",
    explanation=(
        "With `--save-format flex` Paddle itself writes the arrays, in the ranks of a run. Runs on another framework "
        "have no Paddle. A state of theirs has other counters, too, so it could not be loaded by Paddle's optimizers."
    ),
    wrong="pipeproof run plan.yaml --save states --save-format flex   # run.backend: torch",
    right="pipeproof run plan.yaml --save states   # pipeproof's own format, on every framework",
    kind=ExampleKind.COMMAND,
)

FLEX_CODES = (NOT_THIS_FLEX, NOT_AS_FLEX)


class FlexError(StateError):
    """A checkpoint of Paddle that cannot be read, or that contradicts itself."""

    def __init__(self, message: str, mend: str) -> None:
        PipeproofError.__init__(self, Finding(NOT_THIS_FLEX.code, Severity.ERROR, message, help=mend))
