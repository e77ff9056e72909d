"""PP928 and PP929: what can be wrong with names of other tools, documented."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc
from pipeproof.specs.finding import Finding, PipeproofError, Severity

NO_NAMES = RuleDoc(
    code="PP928",
    title="a convention has no names for this model",
    severity="error",
    explanation=(
        "A convention gives each of a model's tensors a name and a layout, so that other tools read them. It has none "
        "for what the models of other tools do not have: hyper-connections, the clamped SwiGLU without its biases, "
        "routers with biases behind a softmax. Leaving such tensors out, or under a name of our own, would give a file "
        "that loads and computes something else. What has no names can be kept under pipeproof's own: leave `--names` "
        "away."
    ),
    wrong="pipeproof reshard states -o model.safetensors --names huggingface   # hyper_connections: {streams: 4}",
    right="pipeproof reshard states -o model.safetensors   # under pipeproof's own names",
    kind=ExampleKind.COMMAND,
)

COPIES_DIFFER = RuleDoc(
    code="PP929",
    title="copies of one tensor differ",
    severity="error",
    explanation=(
        "Some conventions keep a tensor several times: the head beside the embedding that it is tied to; in modules of "
        "multi-token prediction the embedding, the last norm and the head. A plan has such a tensor once. Where the "
        "copies are not equal byte for byte it is not known which one is meant, or the model is another one than the "
        "plan's: a head that is not tied, a module with a norm of its own. They are compared before anything is moved."
    ),
    wrong="pipeproof reshard model.safetensors --to plan.yaml -o states --names huggingface   # tied_embedding: true",
    right="pipeproof reshard model.safetensors --to plan.yaml -o states --names huggingface   # tied_embedding: false",
    kind=ExampleKind.COMMAND,
)

NAMES_CODES = (NO_NAMES, COPIES_DIFFER)


class NoNamesError(PipeproofError):
    """PP928: a convention that cannot say what the model has, or no convention at all."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(Finding(NO_NAMES.code, Severity.ERROR, message, help=mend))


class CopiesDifferError(PipeproofError):
    """PP929: several tensors of a checkpoint stand for one of the plan's, and are not equal."""

    def __init__(self, message: str, mend: str) -> None:
        super().__init__(Finding(COPIES_DIFFER.code, Severity.ERROR, message, help=mend))
