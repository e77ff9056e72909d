"""Assertions that a plan is sound by ``pipeproof check``, and that gradients are equal, in bits or within a bound."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeproof.diagnostics.finding import BadPlanError, Finding, Severity
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.diagnostics.text_output import render_text
from pipeproof.specs.load_plan import LoadedPlan, load_plan, plan_from_dict
from pipeproof.verify.check_plan import CHECK_CODES, Report, check
from pipeproof.verify.check_text import BRIEF, render_report

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.diagnostics.source import SourceMap


Plan = str | os.PathLike[str] | Mapping[str, object] | LoadedPlan
"""A plan file, its content, or a loaded plan."""


def assert_plan_sound(plan: Plan, *, allow: Collection[str] = (), strict: bool = False) -> Report:
    """Fail, with the text that ``pipeproof check`` prints, unless a plan is proved.

    Args:
        plan: a path, a mapping with what a plan file holds, or a loaded plan.
        allow: codes of allowed findings.
        strict: warnings fail, too, as with ``check --strict``; notes never do.

    Returns:
        The report, with the digest, the certificate and every finding.

    Raises:
        AssertionError: a finding that is not allowed, or the plan cannot be loaded.
        ValueError: ``allow`` names a code that ``check`` never gives.
    """
    unknown = set(allow) - set(CHECK_CODES)
    if unknown:
        raise ValueError(f"`check` has no code {', '.join(sorted(unknown))}; docs/codes.md lists all")
    try:
        report = check(loaded(plan))
    except BadPlanError as error:
        source = error.source if isinstance(error, PlanFileError) else None
        raise AssertionError(findings_text(error.findings, source)) from error
    if unfit(report, allow, strict=strict):
        raise AssertionError(report_text(report))
    return report


def loaded(plan: Plan) -> LoadedPlan:
    """Load the plan of a path or a mapping.

    Raises:
        PlanFileError: it cannot be loaded.
    """
    if isinstance(plan, LoadedPlan):
        return plan
    return plan_from_dict(plan) if isinstance(plan, Mapping) else load_plan(plan)


def unfit(report: Report, allow: Collection[str] = (), *, strict: bool = False) -> list[Finding]:
    """The findings that make a check fail."""
    failing = {Severity.ERROR, Severity.WARNING} if strict else {Severity.ERROR}
    return [f for f in report.findings if f.severity in failing and f.code not in allow]


def report_text(report: Report) -> str:
    """Return the text of ``pipeproof check`` for a report, without colours."""
    console, text = _console()
    render_report(report, console, BRIEF)
    return text.getvalue().rstrip()


def findings_text(findings: Iterable[Finding], source: SourceMap | None) -> str:
    """Return the text of ``pipeproof check`` for a plan that cannot be loaded, without colours."""
    console, text = _console()
    render_text(findings, source, console=console)
    return text.getvalue().rstrip()


def _console() -> tuple[Console, io.StringIO]:
    from rich.console import Console

    text = io.StringIO()
    return Console(file=text, width=120, no_color=True, highlight=False), text


def dtype_name(value: Any) -> str:
    """Return the element type without its framework's prefix: ``bfloat16``, ``float32``."""
    dtype = getattr(value, "dtype", None)
    return str(np.asarray(value).dtype if dtype is None else dtype).rpartition(".")[2]


def as_array(value: Any) -> NDArray[Any]:
    """Return a number, a list, an array, or a tensor of PyTorch or Paddle as a numpy array; not always a copy.

    bfloat16, which numpy lacks, becomes float32, which represents it exactly.

    Raises:
        ValueError: the value is no array of numbers.
    """
    if hasattr(value, "detach"):
        value = value.detach()
    if dtype_name(value) == "bfloat16":
        value = value.astype("float32") if hasattr(value, "astype") else value.float()
    if hasattr(value, "cpu"):
        value = value.cpu()
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype == object:
        raise ValueError(f"{type(value).__name__} is no array of numbers")
    return array


def digest(array: NDArray[Any]) -> str:
    """Return the first 16 hexadecimal digits of SHA-256 over shape, type and bytes in C order."""
    head = f"{array.shape} {array.dtype.newbyteorder('<').str} ".encode()
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return hashlib.sha256(head + little.tobytes()).hexdigest()[:16]


Bound = float | Mapping[str, float] | None

_NAMED = 5
"""Maximum number of named parameters, if more differ or are missing."""


def assert_same_gradients(a: Mapping[str, Any], b: Mapping[str, Any], *, bound: Bound = None) -> None:
    """Fail unless both have the same parameters with the same values.

    Args:
        a: by name of the parameter: arrays of numpy, tensors of PyTorch or
            Paddle (neither is imported), lists.
        b: the same, of the other run.
        bound: None demands the same bits, so that +0.0 is not -0.0 and a NaN
            equals only one with the same payload; else ``|a - b| <= bound``
            for each element, one bound or one by name. A NaN is within no
            bound.

    Raises:
        AssertionError: names that one side lacks, or the first parameter in
            the order of ``a`` that differs: where, both values, both digests,
            how many elements and parameters differ.
        ValueError: a bound is negative or missing, or there is nothing to compare.
    """
    if not a and not b:
        raise ValueError("there are no gradients to compare: both are empty")
    complaints = [*_missing("a", a, b), *_missing("b", b, a)]
    differing = [(name, text) for name in a if name in b and (text := _difference(name, a[name], b[name], bound))]
    if differing:
        complaints.append(differing[0][1])
    if len(differing) > 1:
        complaints.append(f"{len(differing)} of {len(a)} parameters differ: {_listed([name for name, _ in differing])}")
    if complaints:
        raise AssertionError("\n".join(complaints))


def _missing(side: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    names = [name for name in there if name not in here]
    if names:
        yield f"{side} lacks {len(names)} of {len(there)} parameters: {_listed(names)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _difference(name: str, one: Any, other: Any, bound: Bound) -> str | None:
    """Describe the difference in one parameter; None if there is none."""
    x, y = as_array(one), as_array(other)
    if x.shape != y.shape:
        return f"{name}: shape {list(x.shape)} and {list(y.shape)}"
    types = dtype_name(one), dtype_name(other)
    if bound is None and types[0] != types[1]:
        return f"{name}: {types[0]} and {types[1]}; compare unlike types with a bound"
    wrong = _bytes_differ(x, y) if bound is None else ~_within(x, y, _bound_of(name, bound))
    if not wrong.any():
        return None
    index = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
    far = "" if bound is None else f", {_distance(x[index], y[index]):g} apart where {_bound_of(name, bound):g} may be"
    return (
        f"{name}: {int(wrong.sum())} of {wrong.size} elements differ, first {list(index)}: "
        f"{_shown(x[index])} and {_shown(y[index])}{far} (digests {digest(x)} and {digest(y)})"
    )


def _bytes_differ(x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each element True if any of its bytes differs; both arrays have one shape and type."""
    one, other = (np.ascontiguousarray(side).reshape(-1, 1).view(np.uint8) for side in (x, y))
    differ: NDArray[np.bool_] = (one != other).any(axis=1).reshape(x.shape)
    return differ


def _within(x: NDArray[Any], y: NDArray[Any], bound: float) -> NDArray[np.bool_]:
    x, y = (side.astype(np.result_type(side, np.float64)) for side in (x, y))
    with np.errstate(invalid="ignore"):
        near: NDArray[np.bool_] = (x == y) | (np.abs(x - y) <= bound)  # equal infinities are no distance apart
    return near


def _bound_of(name: str, bound: float | Mapping[str, float]) -> float:
    value = bound.get(name) if isinstance(bound, Mapping) else bound
    if value is None:
        raise ValueError(f"no bound for {name}")
    if not value >= 0:
        raise ValueError(f"a bound is at least 0; {name} has {value}")
    return value


def _distance(x: Any, y: Any) -> float:
    return float(abs(np.subtract(x, y, dtype=np.result_type(x, y, np.float64))))


def _shown(value: Any) -> str:
    """Return a float with all its digits, and in hexadecimal, which shows single bits."""
    return f"{float(value)!r} ({float(value).hex()})" if isinstance(value, np.floating) else str(value)
