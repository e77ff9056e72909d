"""Layout rules other than those on transports: types of the model's operations, collectives, element maps."""

from __future__ import annotations

from pipeproof.verify.layouts import index_maps, typed_programs
from pipeproof.verify.subject import Rule

RULES: tuple[Rule, ...] = (*typed_programs.RULES, *index_maps.RULES)
