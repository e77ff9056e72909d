"""The gradient rules in the order of their codes: problems with one root are one finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding, OpsWitness
from pipeproof.verify.gradients import docs
from pipeproof.verify.gradients.causes import Cause, Count, Problem
from pipeproof.verify.gradients.diagnose import diagnose
from pipeproof.verify.subject import Rule, Subject, finding

_MOST_NAMED = 3
"""Parameters, ranks and pairs of rows that a finding names; the rest are counted."""


def _check(doc: RuleDoc) -> Callable[[Subject], Iterator[Finding]]:
    cause = Cause(doc.code)

    def check(subject: Subject) -> Iterator[Finding]:
        groups: dict[tuple[str, ...], list[Problem]] = {}
        for problem in subject.once(diagnose):
            if problem.cause is cause:
                groups.setdefault(problem.key, []).append(problem)
        for problems in groups.values():
            yield _finding(subject, doc, problems)

    return check


def _finding(subject: Subject, doc: RuleDoc, problems: Sequence[Problem]) -> Finding:
    first = problems[0]
    forwards = [first.count.op] if first.count is not None and first.count.op is not None else []
    witness = dict.fromkeys(forwards + [op for problem in problems[:_MOST_NAMED] for op in problem.ops])
    return finding(
        doc,
        _count_text(first.count, problems) if first.count is not None else f"{_where(subject, problems)}: {first.fact}",
        location=subject.locate("loss" if first.count is not None else "schedule"),
        help=_mend(first.count) if first.count is not None else first.mend,
        witness=OpsWitness(tuple(subject.witness_op(op) for op in witness)) if witness else None,
    )


def _where(subject: Subject, problems: Sequence[Problem]) -> str:
    """``rank 0 (pp 0), gradient of `a`, `b` and 4 more``, with how many other ranks have the same."""
    first = problems[0]
    parameters = dict.fromkeys(problem.parameter for problem in problems if problem.parameter)
    ranks = {rank for problem in problems for rank in (problem.rank, *problem.alike)}
    text = subject.coords_text(first.rank)
    text += f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return f"{text}, gradient of {_names(list(parameters))}" if parameters else f"{text}, stage {first.stage}"


def _names(parameters: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in parameters[:_MOST_NAMED])
    more = len(parameters) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _count_text(count: Count, problems: Sequence[Problem]) -> str:
    parameters = list(dict.fromkeys(problem.parameter for problem in problems if problem.parameter))
    where = f" in the update of {_names(parameters)}" if parameters else ""
    loss = f"the loss `{count.loss}` of stage {count.stage}"
    if count.declared is None:
        return (
            f"{loss}: each token of {count.tokens} counts {count.found}{where}, but each of {count.like} "
            f"{count.declared_text}; where nothing else is declared, all tokens count alike"
        )
    return f"{loss}: each token of {count.tokens} counts {count.found}{where}, declared {count.declared_text}"


def _mend(count: Count) -> str:
    if count.declared is None:
        return "scale every micro-batch alike, and the sum once"
    if not count.found.terms:
        return f"let the backward pass take the loss `{count.loss}` along"
    if len(count.found.terms) > 1:
        return "scale what is added once, after the last micro-batch"
    factor = count.declared * count.found.inverse
    return f"multiply by {factor}: in the loss, in SCALE_GRAD, or by summing in place of averaging"


RULES: tuple[Rule, ...] = tuple(Rule(doc, _check(doc)) for doc in docs.ALL)
