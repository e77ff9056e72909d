"""5xx: buffers are used by one operation at a time, in the intended order.

``buffer_uses`` lists the buffers of each operation, ``happens_before`` and
``races`` find races in columns, ``slot_rule`` sizes pools. The definition of
the order and of a race is in ``tests/verify/lifetime_definition.py``.
"""
