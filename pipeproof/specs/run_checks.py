"""Checks of ``run``: what each framework computes on, and in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.specs.problems import Problem

if TYPE_CHECKING:
    from pipeproof.specs.plan import PlanSpec

_SIXTEEN_BITS = ("bfloat16", "float16")


def check_run(plan: PlanSpec) -> list[Problem]:
    """PP106: Paddle runs on the CPU, and not in 16 bits there; own layers are Paddle's; what 16 bits cannot do.

    They have no room for AdamW's epsilon (float16), nor for the squares of all gradients.
    """
    run, problems = plan.run, []
    if run.backend == "paddle":
        if run.device == "gpu":
            message = "run.device gpu is for `run.backend: torch`, and the backend is paddle"
            problems.append(Problem("PP106", ("run", "device"), message, help="use cpu, or `backend: torch`"))
        if run.dtype in _SIXTEEN_BITS:
            message = f"run.dtype {run.dtype} is for `run.backend: torch`: Paddle has no products of 16 bits on a CPU"
            mend = "use float32 or float64, or `backend: torch`"
            problems.append(Problem("PP106", ("run", "dtype"), message, help=mend))
    elif plan.own_layers is not None:
        message = "own layers are those of `paddle.nn`, and run.backend is torch"
        problems.append(Problem("PP106", ("run", "backend"), message, help="use `backend: paddle`"))
    if run.weight_dtype == "float16" and run.optimizer == "adamw":
        message = "AdamW's epsilon, 1e-8, is zero in float16: weights whose gradients are small become NaN"
        mend = "set run.main_grad_dtype to float32"
        problems.append(Problem("PP106", ("run", "dtype"), message, help=mend))
    if run.clip_norm is not None and run.weight_dtype in _SIXTEEN_BITS:
        message = f"run.clip_norm needs the squares of all gradients, which {run.weight_dtype} cannot add up"
        mend = "set run.main_grad_dtype to float32, or remove clip_norm"
        problems.append(Problem("PP106", ("run", "clip_norm"), message, help=mend))
    return problems
