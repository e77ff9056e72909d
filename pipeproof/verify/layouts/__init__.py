"""Layout rules other than those on transports: types of the model's operations, collectives, element maps."""

from __future__ import annotations

from pipeproof.verify.layouts import declared_layouts, expert_routing, index_maps, issued_collectives, typed_programs
from pipeproof.verify.subject import Rule

RULES: tuple[Rule, ...] = (
    *typed_programs.RULES,
    *issued_collectives.RULES,
    *declared_layouts.RULES,
    *index_maps.RULES,
    *expert_routing.RULES,
)
