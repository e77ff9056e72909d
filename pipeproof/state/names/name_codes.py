"""PP928 and PP929: names of other tools."""

from __future__ import annotations

from pipeproof.diagnostics.finding import ExampleKind, Finding, PipeproofError, RuleDoc, Severity

NO_NAMES = RuleDoc(
    code="PP928",
    title="a convention has no names for this model",
    explanation=(
        "A convention gives each of a model's tensors a name and a layout, so that other tools can read them. It has "
        "no names for parts that the models of other tools lack: hyper-connections, the clamped SwiGLU without its "
        "biases, routers with biases behind a softmax, norms, positions and biases that no model of the tool has "
        "together. A file without such tensors, or with names of our own, would load and compute another model. Such "
        "models can be saved under pipeproof's own names: omit `--names`."
    ),
    wrong="pipeproof state reshard states -o model.safetensors --names huggingface   # hyper_connections: {streams: 4}",
    right="pipeproof state reshard states -o model.safetensors   # under pipeproof's own names",
    kind=ExampleKind.COMMAND,
)

COPIES_DIFFER = RuleDoc(
    code="PP929",
    title="copies of one tensor differ",
    explanation=(
        "Some conventions save a tensor several times: the head in addition to the embedding that it is tied to; in "
        "modules of multi-token prediction the embedding, the last norm and the head. A plan has such a tensor once. "
        "If the copies differ in any byte, it is unknown which one is right, or the model is not the plan's: the head "
        "is not tied, or a module has a norm of its own. Copies are compared before any tensor is moved."
    ),
    wrong="pipeproof state reshard m.safetensors --to plan.yaml -o states --names huggingface  # tied_embedding: true",
    right="pipeproof state reshard m.safetensors --to plan.yaml -o states --names huggingface  # tied_embedding: false",
    kind=ExampleKind.COMMAND,
)

NAMES_CODES = (NO_NAMES, COPIES_DIFFER)


class NoNamesError(PipeproofError):
    """PP928: a convention that lacks names for the model, or an unknown convention."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(Finding(NO_NAMES.code, Severity.ERROR, message, help=fix))


class CopiesDifferError(PipeproofError):
    """PP929: several tensors of a checkpoint represent one of the plan's, and differ."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(Finding(COPIES_DIFFER.code, Severity.ERROR, message, help=fix))
