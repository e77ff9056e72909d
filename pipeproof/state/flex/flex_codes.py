"""PP926 and PP927: checkpoints of Paddle that cannot be used or written."""

from __future__ import annotations

from pipeproof.diagnostics.finding import ExampleKind, RuleDoc
from pipeproof.state.state_codes import StateError

FLEX_UNUSABLE = RuleDoc(
    code="PP926",
    title="a checkpoint of Paddle cannot be used",
    explanation=(
        "Paddle's flex checkpoint is a directory with files of arrays and a metadata file, which lists the shards of "
        "each file. The metadata file is a pickle. It is read without executing anything: a pickle that names more "
        "than Paddle's three classes is refused. The metadata is compared with the headers of all files before "
        "anything is used. Paddle itself loads the tensors that it finds, and leaves the others unchanged."
    ),
    wrong="pipeproof state reshard states/flex --to plan_b.yaml -o new   # 1_0.safetensors was not copied",
    right="pipeproof state reshard states/flex --to plan_b.yaml -o new   # every file that 0.metadata names is there",
    kind=ExampleKind.COMMAND,
)
FLEX_UNSUPPORTED = RuleDoc(
    code="PP927",
    title="a state cannot be saved as a checkpoint of Paddle",
    explanation=(
        "With `--save-format flex` Paddle itself writes the arrays, in the ranks of a run. Runs on another framework "
        "do not have Paddle. Their optimizers have other counters, too, so Paddle's optimizers could not load them."
    ),
    wrong="pipeproof run plan.yaml --save states --save-format flex   # run.backend: torch",
    right="pipeproof run plan.yaml --save states   # pipeproof's own format, on every framework",
    kind=ExampleKind.COMMAND,
)

FLEX_CODES = (FLEX_UNUSABLE, FLEX_UNSUPPORTED)


class FlexError(StateError):
    """A checkpoint of Paddle that cannot be read, or that contradicts itself."""

    doc = FLEX_UNUSABLE
