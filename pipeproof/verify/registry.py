"""All rules, in the order of their codes."""

from __future__ import annotations

from pipeproof.specs.codes import PLAN_FILE_CODES, RuleDoc
from pipeproof.verify import completeness, deadlock, matching, placement, transport
from pipeproof.verify.subject import Rule

RULES: tuple[Rule, ...] = (
    *placement.RULES,
    *completeness.RULES,
    *transport.RULES,
    *matching.RULES,
    *deadlock.RULES,
)


def all_docs() -> tuple[RuleDoc, ...]:
    """Every documented code that ``check`` can report, plan-file errors included."""
    docs = [*PLAN_FILE_CODES, *(rule.doc for rule in RULES)]
    return tuple(sorted(docs, key=lambda doc: doc.code))
