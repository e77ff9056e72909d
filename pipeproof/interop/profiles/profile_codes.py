"""The codes of ``pipeproof import profile``."""

from __future__ import annotations

from pipeproof.diagnostics.finding import BadPlanError, ExampleKind, RuleDoc

UNREADABLE_TRACE = RuleDoc(
    code="PP163",
    title="a trace cannot be read",
    explanation=(
        "`pipeproof import profile` reads traces of PyTorch's profiler (JSON, also compressed by gzip). Refused are "
        "other files, and files that are cut off or larger than the limits."
    ),
    wrong="pipeproof import profile report.nsys-rep --plan plan.yaml",
    right="pipeproof import profile rank0.json rank1.json --plan plan.yaml",
    kind=ExampleKind.COMMAND,
)
NOT_ASSIGNED = RuleDoc(
    code="PP164",
    title="measured events cannot be assigned to the operations of the plan",
    explanation=(
        "Only the name of a range assigns a time to an operation. Here the events and the plan do not agree: no "
        "names, another order, another number of operations, a rank that the plan does not have, or a stage without "
        "a time. If several assignments are possible, none is chosen."
    ),
    wrong="pipeproof import profile traces/ --plan gpipe.yaml   # the run was 1F1B",
    right="pipeproof import profile traces/ --plan 1f1b.yaml",
    kind=ExampleKind.COMMAND,
)

TRACE_PROFILE_CODES: tuple[RuleDoc, ...] = (UNREADABLE_TRACE, NOT_ASSIGNED)


def unreadable(file: str, message: str, remedy: str) -> BadPlanError:
    """Return the error of a file that cannot be read (PP163)."""
    return BadPlanError(UNREADABLE_TRACE.finding(f"`{file}`: {message}", help=remedy))


def not_assigned(file: str, message: str, remedy: str) -> BadPlanError:
    """Return the error of events that cannot be assigned (PP164)."""
    return BadPlanError(NOT_ASSIGNED.finding(f"`{file}`: {message}", help=remedy))
