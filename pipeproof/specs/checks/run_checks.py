"""Checks of ``run``: devices and types of each framework, the main gradients, graphs, and CUDA graph replay."""

from __future__ import annotations

from pipeproof.diagnostics.problems import Problem
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.plan_sections import PlanSections

_SIXTEEN_BITS = ("bfloat16", "float16")
_MAX_WAITING_STREAMS = 7
"""One less than a GPU's hardware queues (CUDA_DEVICE_MAX_CONNECTIONS): if all wait, nothing else runs."""
_ALIGNED = 8
"""Rows of the kernel for all experts begin at multiples of 16 bytes: 8 elements of 16 bits."""


def check_run(plan: PlanSections) -> list[Problem]:
    """PP106: Paddle has no 16-bit types, copy engines or graphs, custom layers are Paddle's, replay is of fixed steps.

    16-bit main weights are too narrow for AdamW's epsilon (float16), and for the squares of all gradients.
    """
    run, problems = plan.run, []
    if run.backend == "paddle":
        of_script = plan.is_custom and plan.custom.build is None
        if run.dtype in _SIXTEEN_BITS and not of_script:
            message = f"run.dtype {run.dtype} is for `run.backend: torch`, and the backend is paddle"
            fix = "use float32 or float64, or `backend: torch`"
            problems.append(Problem("PP106", ("run", "dtype"), message, help=fix))
    elif plan.is_custom and plan.custom.build is not None:
        message = "`model.build` returns `paddle.nn` layers, and run.backend is torch"
        fix = "use `backend: paddle`, or train the modules in a script with pipeproof.torch.Pipeline"
        problems.append(Problem("PP106", ("run", "backend"), message, help=fix))
    if run.compiler is not None:
        problems += _check_compiler(plan)
    for key in ("send_recv", "experts"):
        if getattr(plan.transport, key) == "copy_engine" and (run.backend, run.device) != ("torch", "gpu"):
            message = f"`{key}: copy_engine` is for PyTorch on GPUs, and the plan has {run.backend} on {run.device}"
            fix = f"use `{key}: backend`, or `run: {{backend: torch, device: gpu}}`"
            problems.append(Problem("PP106", ("transport", key), message, help=fix))
    if plan.transport.experts == "copy_engine":
        problems += _check_copies_of_experts(plan)
    if run.replay:
        problems += _check_replay(plan)
    if not run.deterministic and (run.backend, run.device) != ("torch", "gpu"):
        message = (
            f"`deterministic: false` is for PyTorch on GPUs, and {run.backend} on {run.device} has one order of sums"
        )
        fix = "remove it, or use `backend: torch` and `device: gpu`"
        problems.append(Problem("PP106", ("run", "deterministic"), message, help=fix))
    if run.weight_dtype == "float16" and run.optimizer == "adamw":
        message = "AdamW's epsilon, 1e-8, is zero in float16: weights whose gradients are small become NaN"
        fix = "set run.main_grad_dtype to float32"
        problems.append(Problem("PP106", ("run", "dtype"), message, help=fix))
    if run.clip_norm is not None and run.weight_dtype in _SIXTEEN_BITS:
        message = f"run.clip_norm needs the squares of all gradients, which {run.weight_dtype} cannot add up"
        fix = "set run.main_grad_dtype to float32, or remove clip_norm"
        problems.append(Problem("PP106", ("run", "clip_norm"), message, help=fix))
    return problems


def _check_copies_of_experts(plan: PlanSections) -> list[Problem]:
    """Experts are on several ranks, but not on so many that all hardware queues of a GPU may wait."""
    ep, path = plan.topology.ep, ("transport", "experts")
    if ep == 1:
        message = "`experts: copy_engine` is given, and with one expert-parallel rank no token moves"
        return [Problem("PP106", path, message, help="remove it, or give `topology.ep`")]
    of_messages = 4 if plan.transport.send_recv == "copy_engine" and plan.topology.pp > 1 else 0
    num_streams = 2 * (ep - 1) + of_messages
    if num_streams <= _MAX_WAITING_STREAMS:
        return []
    copied = f"{ep} expert-parallel ranks{' and of messages' if of_messages else ''}"
    limit = f"{_MAX_WAITING_STREAMS + 1} would block its computations"
    message = f"copies of {copied} wait on {num_streams} streams of a GPU, and {limit}"
    return [Problem("PP106", path, message, help="use `experts: backend`")]


def _check_compiler(plan: PlanSections) -> list[Problem]:
    """A graph is of the GPT on PyTorch, and has no state between work items."""
    path, run = ("run", "compiler"), plan.run
    if run.backend != "torch" or plan.is_custom:
        fact = "the model has custom layers" if plan.is_custom else "run.backend is paddle"
        message = f"run.compiler makes graphs of a GPT with PyTorch, and {fact}"
        fix = "remove it; `split='graph'` of pipeproof.torch.Pipeline is for modules" if plan.is_custom else "remove it"
        return [Problem("PP106", path, message, help=fix)]
    refused = []
    if plan.schedule.num_sequence_splits > 1:
        refused.append(("schedule.num_sequence_splits", "the splits of a sequence share keys and values"))
    chooses = "the compiler chooses what is kept and what is computed again"
    if plan.memory.recompute == "full":
        refused.append(("memory.recompute: full", chooses))
    others = [module for module in plan.memory.recompute_modules if module != "core_attn"]
    if plan.memory.recompute == "selective" and others:
        refused.append((f"memory.recompute_modules: [{others[0]}]", chooses))
    return [
        Problem("PP106", path, f"run.compiler with {key}: {reason}", help="remove run.compiler")
        for key, reason in refused
    ]


def _check_replay(plan: PlanSections) -> list[Problem]:
    """A CUDA graph has fixed shapes, and nothing in it waits for the host."""
    model, path = plan.gpt, ("run", "replay")
    if plan.run.device != "gpu" or plan.run.backend != "torch":
        fact = "run.device is cpu" if plan.run.device != "gpu" else "run.backend is paddle"
        message = f"run.replay captures a CUDA graph with PyTorch, and {fact}"
        return [Problem("PP106", path, message, help="remove it, or use `backend: torch` and `device: gpu`")]
    dynamic = []
    if model.moe is not None and not _has_fused_experts(plan):
        reason = "the host reads the number of tokens of each expert, except with ep 1 or `dispatcher: all_gather`, "
        dynamic.append(("model.moe", reason + f"bfloat16 throughout and sizes that divide by {_ALIGNED}"))
    if plan.buffers.free_output != "after_backward":
        dynamic.append(("buffers.free_output", "memory that is freed early moves"))
    return [
        Problem("PP106", path, f"run.replay with {key}: {reason}, and a CUDA graph is fixed", help="remove run.replay")
        for key, reason in dynamic
    ]


def _has_fused_experts(plan: PlanSections) -> bool:
    """True if all experts of a rank are one kernel that reads the numbers of tokens on the device.

    The condition is that of ``pipeproof.stages.torch.functional``. For an all-to-all, the host must know how many
    tokens come from other ranks.
    """
    moe, run, topology = plan.model.moe, plan.run, plan.topology
    assert moe is not None
    is_aligned = not any(size % _ALIGNED for size in (plan.gpt.hidden_size, moe.ffn_size // topology.tp))
    is_fixed = topology.ep == 1 or moe.dispatcher == "all_gather"
    return is_aligned and is_fixed and run.dtype == run.weight_dtype == "bfloat16"


def check_main_grad(plan: PlanSections) -> list[Problem]:
    """PP106: ``run.main_grad_dtype`` is not narrower than ``run.dtype``, and agrees with ``memory.gradient_dtype``."""
    run, memory = plan.run, plan.memory
    main = run.main_grad_dtype
    if main is None:
        return []
    path = ("run", "main_grad_dtype")
    if dtype_bytes(main) < dtype_bytes(run.dtype):
        message = f"run.main_grad_dtype {main} is narrower than run.dtype {run.dtype}, in which gradients are computed"
        return [Problem("PP106", path, message, help=f"set it to {run.dtype}, or remove it")]
    if memory.gradient_dtype not in (None, main):
        message = f"run.main_grad_dtype is {main}, and memory.gradient_dtype is {memory.gradient_dtype}"
        return [Problem("PP106", path, message, help="remove memory.gradient_dtype: run.main_grad_dtype determines it")]
    return []
