"""The layout rules beside the transports, in the order of their codes."""

from __future__ import annotations

from pipeproof.verify.layouts import declared, issued, maps, programs
from pipeproof.verify.subject import Rule

RULES: tuple[Rule, ...] = (*programs.RULES, *issued.RULES, *declared.RULES, *maps.RULES)
