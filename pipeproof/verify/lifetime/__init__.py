"""5xx: buffers are used by one operation at a time, in the intended order.

``buffer_uses`` lists the buffers of each operation, ``happens_before`` and
``races`` find races in columns, ``slot_rule`` sizes pools. The definition of
the order and of a race is in ``tests/verify/lifetime_definition.py``.
"""

from __future__ import annotations

from pipeproof.verify.lifetime import race_rules
from pipeproof.verify.lifetime import slot_rule as slots
from pipeproof.verify.subject import Rule

RULES: tuple[Rule, ...] = tuple(sorted((*race_rules.RULES, *slots.RULES), key=lambda rule: rule.doc.code))
