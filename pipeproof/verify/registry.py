"""All rules, in the order of their codes."""

from __future__ import annotations

from pipeproof.verify import (
    attribute_rule,
    boundary_transport,
    collectives,
    completeness,
    deadlock,
    fifo_matching,
    group_calls,
    layouts,
    lifetime,
    memory_budget,
    memory_order,
    message_contents,
    optimizer_steps,
    p2p_data_flow,
    part_order,
    placement,
    process_groups,
    rng,
    roles,
    shape_exchange,
)
from pipeproof.verify.contents import content_rules
from pipeproof.verify.gradients import gathered_elements, gathered_weights, gradient_rules, norm_rule
from pipeproof.verify.subject import Rule

RULES: tuple[Rule, ...] = (
    *placement.RULES,
    *roles.RULES,
    *rng.RULES,
    *completeness.RULES,
    *p2p_data_flow.RULES,
    *optimizer_steps.RULES,
    *attribute_rule.RULES,
    *part_order.RULES,
    *boundary_transport.RULES,
    *layouts.RULES,
    *fifo_matching.RULES,
    *message_contents.RULES,
    *collectives.RULES,
    *process_groups.RULES,
    *memory_order.RULES,
    *shape_exchange.RULES,
    *group_calls.RULES,
    *deadlock.RULES,
    *lifetime.RULES,
    *content_rules.RULES,
    *gradient_rules.RULES,
    *norm_rule.RULES,
    *gathered_weights.RULES,
    *gradient_rules.RULES_OF_COLLECTIVES,
    *gathered_elements.RULES,
    *memory_budget.RULES,
)
