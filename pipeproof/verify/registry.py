"""All rules, in the order of their codes."""

from __future__ import annotations

from pipeproof.verify import completeness, deadlock, matching, placement, transport
from pipeproof.verify.subject import Rule

RULES: tuple[Rule, ...] = (
    *placement.RULES,
    *completeness.RULES,
    *transport.RULES,
    *matching.RULES,
    *deadlock.RULES,
)
