"""91x: what can be wrong with own layers once their file is really loaded."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.problems import KeyPath

CANNOT_BUILD = RuleDoc(
    code="PP911",
    title="the file of own layers cannot be used",
    severity="error",
    explanation=(
        "`model.build` names a Python file beside the plan and a function in it, which returns three things: the "
        "layers, the loss function and the data function. The file is not there, has no such function, raises, or "
        "returns something else. Where it raises, the message has the line of that file. Twice built from one seed it "
        "must give the same weights and buffers: ranks and the reference each build it for themselves."
    ),
    wrong="def build(): return [paddle.nn.Linear(4, 4)]",
    right="def build(): return [paddle.nn.Linear(4, 4)], loss, data",
    kind=ExampleKind.OUTCOME,
)
NOT_AS_DECLARED = RuleDoc(
    code="PP912",
    title="own layers are not what the plan declares",
    severity="error",
    explanation=(
        "`check` and `simulate` read what `model.layers` declares and never the file itself. Before a run the layers "
        "are built and given one micro-batch, and their number, their weights and what each gives are compared with "
        "the declaration: memory is set aside and gradients are reduced by it, and a difference would hang or mix up "
        "values. Classes and buffers are compared where they are declared. A run that saves its state or goes on from "
        "one wants every buffer declared that training changes: the state has what the plan says. Layers that are "
        "built anew and get these buffers must go on with the bits of those that were there."
    ),
    wrong="layers: [{name: stem, out: [{shape: [b, 8]}]}, ..]   # and the layer gives [2, 16]",
    right="layers: [{name: stem, out: [{shape: [b, 16]}]}, ..]",
    kind=ExampleKind.OUTCOME,
)
OWN_CODES = (CANNOT_BUILD, NOT_AS_DECLARED)


def cannot_build(message: str, help: str) -> BadPlanAtError:
    """The error for a file that gives no model."""
    return BadPlanAtError(Finding(CANNOT_BUILD.code, Severity.ERROR, message, help=help), ("model", "build"))


def not_as_declared(message: str, path: KeyPath, help: str) -> BadPlanAtError:
    """The error for layers that differ from their declaration at ``path``."""
    return BadPlanAtError(Finding(NOT_AS_DECLARED.code, Severity.ERROR, message, help=help), path)
