"""Checks of ``run.main_grad_dtype``: that it is wide enough, and that ``memory`` says nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.problems import Problem

if TYPE_CHECKING:
    from pipeproof.specs.plan import PlanSpec


def check_main_grad(plan: PlanSpec) -> list[Problem]:
    """PP106: the type is not narrower than what computes, and ``memory.gradient_dtype`` is no other."""
    run, memory = plan.run, plan.memory
    main = run.main_grad_dtype
    if main is None:
        return []
    path = ("run", "main_grad_dtype")
    if dtype_bytes(main) < dtype_bytes(run.dtype):
        message = f"run.main_grad_dtype {main} is narrower than run.dtype {run.dtype}, in which gradients are computed"
        return [Problem("PP106", path, message, help=f"set it to {run.dtype}, or remove it")]
    if memory.gradient_dtype not in (None, main):
        message = f"run.main_grad_dtype is {main}, and memory.gradient_dtype says {memory.gradient_dtype}"
        return [
            Problem("PP106", path, message, help="remove memory.gradient_dtype: run.main_grad_dtype is what counts")
        ]
    return []
