"""Findings 91x about custom layers, when their file is loaded."""

from __future__ import annotations

from pipeproof.diagnostics.finding import BadPlanAtError, ExampleKind, Finding, RuleDoc, Severity
from pipeproof.diagnostics.problems import KeyPath

CANNOT_BUILD = RuleDoc(
    code="PP911",
    title="the file of custom layers cannot be used",
    explanation=(
        "`model.build` names a Python file next to the plan and a function in it. The function returns three things: "
        "the layers, the loss function and the data function. This finding means that the file does not exist, has no "
        "such function, raises, or returns something else. If it raises, the message has the line of the file. Two "
        "builds with one seed must have the same weights and buffers, because each rank and the reference builds the "
        "model."
    ),
    wrong="def build(): return [paddle.nn.Linear(4, 4)]",
    right="def build(): return [paddle.nn.Linear(4, 4)], loss, data",
    kind=ExampleKind.OUTCOME,
)
NOT_AS_DECLARED = RuleDoc(
    code="PP912",
    title="custom layers differ from their declaration in the plan",
    explanation=(
        "`check` and `simulate` read the declaration in `model.layers` and never the file itself. Before a run the "
        "layers are built and process one micro-batch. Their number, their weights and their outputs are compared with "
        "the declaration, which decides memory and gradient reductions: a difference would hang the run or mix up "
        "values. Classes and buffers are compared if they are declared. If a run saves or restores state, every buffer "
        "that training changes must be declared, because the state has only declared buffers. New layers with these "
        "buffers must continue with the same bits."
    ),
    wrong="layers: [{name: stem, out: [{shape: [b, 8]}]}, ..]   # and the layer gives [2, 16]",
    right="layers: [{name: stem, out: [{shape: [b, 16]}]}, ..]",
    kind=ExampleKind.OUTCOME,
)
WRONG_BACKWARD = RuleDoc(
    code="PP186",
    title="a custom layer's backward differs from finite differences",
    explanation=(
        "`run --check-layers` runs each layer in float64 on the first micro-batch and compares its gradients with "
        "central differences. A gradient that is farther away than truncation and rounding explain belongs to another "
        "function than the forward computes: a factor, a sign or a term is missing in a custom backward, or the "
        "forward detaches something. The run would agree with its reference, which has the same layer."
    ),
    wrong="def backward(ctx, dy): return dy * y        # of tanh",
    right="def backward(ctx, dy): return dy * (1 - y * y)",
    kind=ExampleKind.OUTCOME,
)
CUSTOM_CODES = (CANNOT_BUILD, NOT_AS_DECLARED, WRONG_BACKWARD)


def cannot_build(message: str, help: str) -> BadPlanAtError:
    """The error for a file without a usable model."""
    return BadPlanAtError(Finding(CANNOT_BUILD.code, Severity.ERROR, message, help=help), ("model", "build"))


def wrong_backward(message: str, path: KeyPath) -> BadPlanAtError:
    """The error for a layer, or a loss function, whose backward is not that of its forward."""
    fix = "correct the backward; if it differs on purpose, run without --check-layers"
    return BadPlanAtError(Finding(WRONG_BACKWARD.code, Severity.ERROR, message, help=fix), path)


def not_as_declared(message: str, path: KeyPath, help: str) -> BadPlanAtError:
    """The error for layers that differ from their declaration at ``path``."""
    return BadPlanAtError(Finding(NOT_AS_DECLARED.code, Severity.ERROR, message, help=help), path)
