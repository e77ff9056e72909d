"""Checks of ``run``: what each framework computes on, and in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.specs.problems import Problem

if TYPE_CHECKING:
    from pipeproof.specs.plan import PlanSpec

_SIXTEEN_BITS = ("bfloat16", "float16")
_ALIGNED = 8
"""Numbers of 16 bits in the 16 bytes on which the kernel for all experts wants rows to begin."""


def check_run(plan: PlanSpec) -> list[Problem]:
    """PP106: Paddle runs in no 16 bits; own layers are Paddle's; what replays cannot do.

    Nor can 16 bits do all: they have no room for AdamW's epsilon (float16), nor for the squares of all gradients.
    """
    run, problems = plan.run, []
    if run.backend == "paddle":
        if run.dtype in _SIXTEEN_BITS:
            message = f"run.dtype {run.dtype} is for `run.backend: torch`, and the backend is paddle"
            mend = "use float32 or float64, or `backend: torch`"
            problems.append(Problem("PP106", ("run", "dtype"), message, help=mend))
    elif plan.own_layers is not None:
        message = "own layers are those of `paddle.nn`, and run.backend is torch"
        problems.append(Problem("PP106", ("run", "backend"), message, help="use `backend: paddle`"))
    if run.replay:
        problems += _check_replay(plan)
    if run.weight_dtype == "float16" and run.optimizer == "adamw":
        message = "AdamW's epsilon, 1e-8, is zero in float16: weights whose gradients are small become NaN"
        mend = "set run.main_grad_dtype to float32"
        problems.append(Problem("PP106", ("run", "dtype"), message, help=mend))
    if run.clip_norm is not None and run.weight_dtype in _SIXTEEN_BITS:
        message = f"run.clip_norm needs the squares of all gradients, which {run.weight_dtype} cannot add up"
        mend = "set run.main_grad_dtype to float32, or remove clip_norm"
        problems.append(Problem("PP106", ("run", "clip_norm"), message, help=mend))
    return problems


def _check_replay(plan: PlanSpec) -> list[Problem]:
    """A CUDA graph has fixed shapes, and nothing in it waits for the host."""
    model, path = plan.model, ("run", "replay")
    if plan.run.device != "gpu" or plan.run.backend != "torch":
        fact = "run.device is cpu" if plan.run.device != "gpu" else "run.backend is paddle"
        message = f"run.replay captures a CUDA graph with PyTorch, and {fact}"
        return [Problem("PP106", path, message, help="remove it, or use `backend: torch` and `device: gpu`")]
    dynamic = []
    if model.moe is not None and not _experts_ask_nothing(plan):
        asked = "how many tokens each expert gets the host asks, but with ep 1, bfloat16 throughout and sizes of eights"
        dynamic.append(("model.moe", asked))
    if model.dropout is not None:
        dynamic.append(("model.dropout", "masks are drawn on the host"))
    if plan.buffers.release_output != "after_backward":
        dynamic.append(("buffers.release_output", "memory that is given back early moves"))
    return [
        Problem("PP106", path, f"run.replay with {key}: {reason}, and a CUDA graph is fixed", help="remove run.replay")
        for key, reason in dynamic
    ]


def _experts_ask_nothing(plan: PlanSpec) -> bool:
    """Whether all experts of a rank are one kernel that reads the numbers of tokens on the device.

    As ``pipeproof.stages.torch.grouped`` has it; tokens of other ranks would be as many as the host must know.
    """
    moe, run, topology = plan.model.moe, plan.run, plan.topology
    assert moe is not None
    is_aligned = not any(size % _ALIGNED for size in (plan.model.hidden_size, moe.ffn_size // topology.tp))
    return is_aligned and topology.ep == 1 and run.dtype == run.weight_dtype == "bfloat16"
