"""All rules, in the order of their codes."""

from __future__ import annotations

from pipeproof.verify import (
    attribute_rule,
    boundary_transport,
    collectives,
    completeness,
    deadlock,
    fifo_matching,
    layouts,
    lifetime,
    memory_budget,
    message_contents,
    p2p_data_flow,
    placement,
    roles,
)
from pipeproof.verify.contents import content_rules
from pipeproof.verify.gradients import gathered_weights, gradient_rules
from pipeproof.verify.subject import Rule

_MODULES = (
    attribute_rule,
    boundary_transport,
    collectives,
    completeness,
    content_rules,
    deadlock,
    fifo_matching,
    gathered_weights,
    gradient_rules,
    layouts,
    lifetime,
    memory_budget,
    message_contents,
    p2p_data_flow,
    placement,
    roles,
)

RULES: tuple[Rule, ...] = tuple(
    sorted((rule for module in _MODULES for rule in module.RULES), key=lambda rule: rule.doc.code)
)
