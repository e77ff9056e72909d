"""5xx: each buffer is used by one at a time, in the order that is meant.

Read ``definition.py`` first: what comes before what, and what a race is.
``uses.py`` says which operation uses which buffer, ``order.py`` and
``races.py`` find races in columns, ``slots.py`` sizes pools.
"""

from __future__ import annotations

from pipeproof.verify.lifetime import race_rules, sequence_rules, slots
from pipeproof.verify.subject import Rule

RULES: tuple[Rule, ...] = tuple(
    sorted((*race_rules.RULES, *sequence_rules.RULES, *slots.RULES), key=lambda rule: rule.doc.code)
)
