"""All rules, in the order of their codes."""

from __future__ import annotations

from pipeproof.verify import (
    attribute_rule,
    boundary_transport,
    collectives,
    completeness,
    fifo_matching,
    memory_budget,
    message_contents,
    p2p_data_flow,
    placement,
    roles,
)
from pipeproof.verify.contents import content_rules
from pipeproof.verify.deadlock import deadlock_rules
from pipeproof.verify.gradients import gathered_weights, gradient_rules
from pipeproof.verify.layouts import index_maps, issued_collectives, typed_programs
from pipeproof.verify.lifetime import race_rules, slot_rule
from pipeproof.verify.subject import Rule

_MODULES = (
    attribute_rule,
    boundary_transport,
    collectives,
    completeness,
    content_rules,
    deadlock_rules,
    fifo_matching,
    gathered_weights,
    gradient_rules,
    index_maps,
    issued_collectives,
    memory_budget,
    message_contents,
    p2p_data_flow,
    placement,
    race_rules,
    roles,
    slot_rule,
    typed_programs,
)

RULES: tuple[Rule, ...] = tuple(
    sorted((rule for module in _MODULES for rule in module.RULES), key=lambda rule: rule.doc.code)
)
