"""Checks of ``run``: devices and types of each framework, the main gradients, and CUDA graph replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from pipeproof.diagnostics.problems import Problem, listed
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.cost import NO_MATMUL, CostSpec, DeviceName, NetworkSpec
from pipeproof.specs.memory import MemorySpec
from pipeproof.specs.plan_sections import PlanSections

_SIXTEEN_BITS = ("bfloat16", "float16")
_ALIGNED = 8
"""Rows of the kernel for all experts begin at multiples of 16 bytes: 8 elements of 16 bits."""


def check_run(plan: PlanSections) -> Iterator[Problem]:
    """PP106: Paddle has no 16-bit types, and only fixed steps can be replayed.

    16-bit main weights are too narrow for AdamW's epsilon (float16), and for the squares of all gradients.
    """
    run = plan.run
    if run.backend == "paddle" and run.dtype in _SIXTEEN_BITS and not plan.is_custom:
        message = f"run.dtype {run.dtype} is for `run.backend: torch`, and the backend is paddle"
        fix = "use float32 or float64, or `backend: torch`"
        yield Problem("PP106", ("run", "dtype"), message, help=fix)
    if run.replay:
        yield from _check_replay(plan)
    if not run.deterministic and (run.backend, run.device) != ("torch", "gpu"):
        message = (
            f"`deterministic: false` is for PyTorch on GPUs, and {run.backend} on {run.device} has one order of sums"
        )
        fix = "remove it, or use `backend: torch` and `device: gpu`"
        yield Problem("PP106", ("run", "deterministic"), message, help=fix)
    if run.weight_dtype == "float16" and run.optimizer == "adamw":
        message = "AdamW's epsilon, 1e-8, is zero in float16: weights whose gradients are small become NaN"
        fix = "set run.main_grad_dtype to float32"
        yield Problem("PP106", ("run", "dtype"), message, help=fix)
    if run.clip_norm is not None and run.weight_dtype in _SIXTEEN_BITS:
        message = f"run.clip_norm needs the squares of all gradients, which {run.weight_dtype} cannot add up"
        fix = "set run.main_grad_dtype to float32, or remove clip_norm"
        yield Problem("PP106", ("run", "clip_norm"), message, help=fix)


def _check_replay(plan: PlanSections) -> Iterator[Problem]:
    """A CUDA graph has fixed shapes, and nothing in it waits for the host."""
    model, path = plan.gpt, ("run", "replay")
    if plan.run.device != "gpu" or plan.run.backend != "torch":
        fact = "run.device is cpu" if plan.run.device != "gpu" else "run.backend is paddle"
        message = f"run.replay captures a CUDA graph with PyTorch, and {fact}"
        yield Problem("PP106", path, message, help="remove it, or use `backend: torch` and `device: gpu`")
        return
    dynamic = {}
    if model.moe is not None and not _has_fused_experts(plan):
        reason = "the host reads the number of tokens of each expert, except with ep 1 or `dispatcher: all_gather`, "
        dynamic["model.moe"] = reason + f"bfloat16 throughout and sizes that divide by {_ALIGNED}"
    if model.dropout is not None:
        dynamic["model.dropout"] = "the host draws the masks of each step"
    if plan.memory.shard_gradients == "dp":
        dynamic["memory.shard_gradients"] = "whole gradients come and go"
    if plan.buffers.free_output != "after_backward":
        dynamic["buffers.free_output"] = "memory that is freed early moves"
    for key, reason in dynamic.items():
        message = f"run.replay with {key}: {reason}, and a CUDA graph is fixed"
        yield Problem("PP106", path, message, help="remove run.replay")


def _has_fused_experts(plan: PlanSections) -> bool:
    """True if all experts of a rank are one kernel that reads the numbers of tokens on the device.

    The condition is the same as in ``pipeproof.stages.torch.functional``. For an all-to-all, the host must know how
    many tokens come from other ranks.
    """
    moe, run, topology = plan.model.moe, plan.run, plan.topology
    assert moe is not None
    inner = moe.ffn_size // (1 if topology.experts_over_tp else topology.tp)
    is_aligned = not any(size % _ALIGNED for size in (plan.gpt.hidden_size, inner))
    is_fixed = topology.ep == 1 or moe.dispatcher == "all_gather"
    return is_aligned and is_fixed and run.dtype == run.weight_dtype == "bfloat16"


def check_sharding(plan: PlanSections) -> Iterator[Problem]:
    """PP106: shards of gradients belong to a sharded optimizer, and are summed micro-batch by micro-batch.

    Shards of weights belong to shards of gradients, and are gathered for each computation.
    """
    memory, moe, schedule = plan.memory, plan.model.moe, plan.schedule
    of_weights = (
        (memory.shard_gradients == "none", "without `memory.shard_gradients: dp`", "add `shard_gradients: dp`"),
        (
            plan.cost.gather_weights == "first_forward",
            "with `cost.gather_weights: first_forward`, which is of one gather in a step",
            "remove gather_weights",
        ),
    )
    of_gradients = (
        (memory.shard_optimizer == "none", "without `memory.shard_optimizer: dp`", "add `shard_optimizer: dp`"),
        (schedule.num_sequence_splits > 1, "with split sequences", "remove schedule.num_sequence_splits"),
        (
            schedule.reduce_gradients == "when_ready",
            "with `schedule.reduce_gradients: when_ready`, which is of sums over all micro-batches",
            "remove reduce_gradients",
        ),
        (
            moe is not None and moe.expert_bias_rate is not None,
            "with model.moe.expert_bias_rate, whose loads are summed with the gradients",
            "remove one of them",
        ),
    )
    for key, conflicts in (("shard_weights", of_weights), ("shard_gradients", of_gradients)):
        for is_given, why, fix in conflicts if getattr(memory, key) == "dp" else ():
            if is_given:
                yield Problem("PP106", ("memory", key), f"`memory.{key}: dp` is given {why}", help=fix)


def check_main_grad(plan: PlanSections) -> Iterator[Problem]:
    """PP106: ``run.main_grad_dtype`` is not narrower than ``run.dtype``, and agrees with ``memory.gradient_dtype``."""
    run, memory = plan.run, plan.memory
    main = run.main_grad_dtype
    if main is None:
        return
    path = ("run", "main_grad_dtype")
    if dtype_bytes(main) < dtype_bytes(run.dtype):
        message = f"run.main_grad_dtype {main} is narrower than run.dtype {run.dtype}, in which gradients are computed"
        yield Problem("PP106", path, message, help=f"set it to {run.dtype}, or remove it")
    elif memory.gradient_dtype not in (None, main):
        message = f"run.main_grad_dtype is {main}, and memory.gradient_dtype is {memory.gradient_dtype}"
        yield Problem("PP106", path, message, help="remove memory.gradient_dtype: run.main_grad_dtype determines it")


_DATA_SHEET_KEYS = {
    "ranks_per_node": "set cost.analytic.ranks_per_node",
    "node": "set cost.analytic.link_efficiency and cost.analytic.node_step_us",
    "between": "set cost.analytic.link_efficiency and cost.analytic.network_step_us",
    "launch_us": "set cost.analytic.launch_us",
}
"""Keys of ``cost.network`` that ``cost.analytic`` already determines, and how to change them there."""


def check_analytic(plan: PlanSections) -> Iterator[Problem]:
    """PP106: the data sheets have peaks for the types of computed times."""
    analytic = plan.cost.analytic
    if analytic is None:
        return
    if analytic.dtype is None and plan.run.dtype == "float64":
        message = "`cost.analytic` has no times for run.dtype float64"
        fix = "add `dtype: bfloat16` or `dtype: float32` to cost.analytic"
        yield Problem("PP106", ("cost", "analytic"), message, help=fix)
    dtype = analytic.matmul_dtype
    if dtype is not None and analytic.device in NO_MATMUL[dtype]:
        message = f"`cost.analytic.matmul_dtype` is {dtype}, in which {analytic.device} computes no products"
        devices = [name for name in get_args(DeviceName) if name not in NO_MATMUL[dtype]]
        fix = f"remove matmul_dtype, or name a device that has it: {listed(devices, 'or')}"
        yield Problem("PP106", ("cost", "analytic", "matmul_dtype"), message, help=fix)


def check_activations(plan: PlanSections) -> Iterator[Problem]:
    """PP106: inputs of products have a type, and offloaded tensors are not in receive slots."""
    analytic = plan.cost.analytic
    if plan.memory.product_inputs == "matmul_dtype" and (analytic is None or analytic.matmul_dtype is None):
        message = "`memory.product_inputs` is matmul_dtype, without `cost.analytic.matmul_dtype`"
        fix = "add matmul_dtype, such as float8, or remove product_inputs"
        yield Problem("PP106", ("memory", "product_inputs"), message, help=fix)
    yield from _check_recomputed_modules(plan)
    if plan.memory.offload_blocks and plan.buffers.receive_slots is not None:
        message = (
            "`memory.offload_blocks` copies the inputs of stages to host memory, and with `buffers.receive_slots` "
            "they are in slots that are never free"
        )
        yield Problem("PP106", ("memory", "offload_blocks"), message, help="remove one of them")


def _check_recomputed_modules(plan: PlanSections) -> Iterator[Problem]:
    """PP106: modules are recomputed by `selective`, are in the model, and store no gathered outputs."""
    memory, path = plan.memory, ("memory", "recompute_modules")
    modules = memory.recompute_modules
    if memory.recompute != "selective":
        if modules != MemorySpec.model_fields["recompute_modules"].default:
            message = f"`memory.recompute_modules` is given, and `memory.recompute` is {memory.recompute}"
            yield Problem("PP106", path, message, help="add `recompute: selective`, or remove recompute_modules")
        return
    moe = plan.gpt.moe
    has_shared = moe is not None and moe.num_shared_experts > 0
    lacking = {
        "mla_up_proj": ("latent attention", plan.gpt.mla is None),
        "moe": ("experts", moe is None),
        "moe_act": ("experts", moe is None),
        "shared_experts": ("shared experts", not has_shared),
    }
    for module in modules:
        what, is_lacking = lacking.get(module, ("", False))
        if is_lacking:
            message = f"`memory.recompute_modules` has {module}, and the model has no {what}"
            yield Problem("PP106", path, message, help=f"remove {module}")
    gathered = [module for module in ("layernorm", "mla_up_proj") if module in modules]
    is_sharded = plan.topology.tp > 1 and plan.topology.sequence_parallel
    if gathered and is_sharded and memory.sequence_parallel_activations == "keep":
        message = (
            f"`memory.recompute_modules` has {listed(gathered, 'and')}, whose results are gathered over tp, and "
            "`memory.sequence_parallel_activations: keep` keeps what is gathered"
        )
        fix = "add `sequence_parallel_activations: regather`"
        yield Problem("PP106", path, message, help=fix)


def check_buckets(plan: PlanSections) -> Iterator[Problem]:
    """PP106: buckets exclude measured profiles; a gather during a forward needs buckets."""
    cost = plan.cost
    if cost.bucket_size is None and cost.gather_weights == "first_forward":
        message = "`cost.gather_weights: first_forward` is given without `cost.bucket_size`"
        fix = "add `bucket_size: megatron`, or remove gather_weights"
        yield Problem("PP106", ("cost", "gather_weights"), message, help=fix, at_key=True)
    if cost.bucket_size is not None and cost.profile is not None:
        message = "`cost.bucket_size` is given together with `cost.profile`, which measured sums of single weights"
        yield Problem("PP106", ("cost", "bucket_size"), message, help="remove one of them", at_key=True)


def check_network(plan: PlanSections) -> Iterator[Problem]:
    """No time is given twice (PP106), links that the mesh needs are given (PP104), and cards fill nodes (PP106)."""
    cost, network = plan.cost, plan.cost.network
    if network is None:
        return
    if cost.profile is not None:
        message = "`cost.network` is given together with `cost.profile`, which measured messages and collectives"
        yield Problem("PP106", ("cost", "network"), message, help="remove one of them", at_key=True)
        return
    if cost.analytic is not None:
        yield from _check_data_sheet(network)
    else:
        yield from _check_latency(cost)
        yield from _check_links(plan, network)
        yield from _check_cards(network)
    yield from _check_edges(plan, network)


def _check_data_sheet(network: NetworkSpec) -> Iterator[Problem]:
    for key, change in _DATA_SHEET_KEYS.items():
        if getattr(network, key) is not None:
            message = f"`cost.network.{key}` is given together with `cost.analytic`, which has it"
            fix = f"remove it; to change it, {change}"
            yield Problem("PP106", ("cost", "network", key), message, help=fix, at_key=True)


def _check_latency(cost: CostSpec) -> Iterator[Problem]:
    if "p2p_latency_us" in cost.model_fields_set:
        message = "`cost.p2p_latency_us` is given together with `cost.network`, which gives messages their times"
        fix = "remove p2p_latency_us, or remove network to give every message the same time"
        yield Problem("PP106", ("cost", "p2p_latency_us"), message, help=fix, at_key=True)


def _check_links(plan: PlanSections, network: NetworkSpec) -> Iterator[Problem]:
    needed = ["ranks_per_node", "node"]
    num_ranks = plan.topology.num_ranks
    if network.ranks_per_node is not None and num_ranks > network.ranks_per_node:
        needed.append("between")
    missing = [key for key in needed if getattr(network, key) is None]
    if missing:
        names = listed([f"`cost.network.{key}`" for key in missing], "and")
        message = f"the links of {num_ranks} ranks need {names}"
        fix = "add for example `{ranks_per_node: 8, node: {latency_us: 2, bandwidth: 300}, "
        fix += "between: {latency_us: 5, bandwidth: 40}}`; or name a device with cost.analytic"
        yield Problem("PP104", ("cost", "network"), message, help=fix, at_key=True)


def _check_cards(network: NetworkSpec) -> Iterator[Problem]:
    if network.ranks_per_node is None or network.ranks_per_node % network.ranks_per_nic == 0:
        return
    message = (
        f"cost.network.ranks_per_node {network.ranks_per_node} does not divide by ranks_per_nic {network.ranks_per_nic}"
    )
    fix = "a network card belongs to one node: choose a divisor"
    yield Problem("PP106", ("cost", "network", "ranks_per_nic"), message, help=fix)


def _check_edges(plan: PlanSections, network: NetworkSpec) -> Iterator[Problem]:
    """Each edge joins two ranks of the plan and is listed once."""
    pairs = set()
    last = plan.topology.num_ranks - 1
    for index, edge in enumerate(network.edges):
        pair, path = (edge.source, edge.destination), ("cost", "network", "edges", index)
        name = f"cost.network.edges[{index}] {edge.source}->{edge.destination}"
        if max(pair) > last:
            fix = "measure the plan that is simulated, or remove the edge"
            yield Problem("PP106", path, f"{name}: the plan has ranks 0 to {last}", help=fix)
        elif edge.source == edge.destination:
            yield Problem("PP106", path, f"{name} joins a rank to itself", help="an edge joins two different ranks")
        elif pair in pairs:
            yield Problem("PP106", path, f"{name} is given twice", help="remove one of the two")
        pairs.add(pair)
