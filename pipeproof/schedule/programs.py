"""Per-rank programs: what one pipeline rank computes in one step, in order.

Generators make them. Lowering adds what they need: transfers with their
waits, collectives, gradient reductions and the optimizer step.
"""

from __future__ import annotations

from pipeproof.schedule.ops import Op

Program = tuple[Op, ...]
Programs = tuple[Program, ...]
"""One program per pipeline rank."""


def stages_of(programs: Programs) -> tuple[tuple[int, ...], ...]:
    """The stages that each program computes, in order of their numbers."""
    return tuple(tuple(sorted({op.stage for op in program})) for program in programs)
