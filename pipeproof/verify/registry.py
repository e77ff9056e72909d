"""All rules, in the order of their codes."""

from __future__ import annotations

from pipeproof.verify import (
    announced,
    collectives,
    completeness,
    deadlock,
    groups,
    handover,
    lifetime,
    matching,
    memory_budget,
    memory_order,
    messages,
    placement,
    rng,
    roles,
    steps,
    transport,
)
from pipeproof.verify.gradients import norm as gradient_norm
from pipeproof.verify.gradients import rules as gradient_rules
from pipeproof.verify.gradients import updated as gradients_updated
from pipeproof.verify.layouts import rules as layout_rules
from pipeproof.verify.subject import Rule

RULES: tuple[Rule, ...] = (
    *placement.RULES,
    *roles.RULES,
    *rng.RULES,
    *completeness.RULES,
    *handover.RULES,
    *steps.RULES,
    *transport.RULES,
    *layout_rules.RULES,
    *matching.RULES,
    *messages.RULES,
    *collectives.RULES,
    *groups.RULES,
    *memory_order.RULES,
    *announced.RULES,
    *deadlock.RULES,
    *lifetime.RULES,
    *gradient_rules.RULES,
    *gradient_norm.RULES,
    *gradients_updated.RULES,
    *memory_budget.RULES,
)
