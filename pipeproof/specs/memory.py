"""The section ``memory`` of a plan: activations and optimizer state that a rank keeps, their types, and the budget."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeproof.specs.section import FROM_LIST, Section

MemoryDtype = Literal["bfloat16", "float16", "float32", "float64"]
"""A type of weights and activations."""

Recompute = Literal["none", "selective", "full"]
"""Activations that the backward computes again instead of keeping them (arXiv:2205.05198, section 5)."""

RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
"""A module that `selective` computes again, with its name in Megatron-LM's `--recompute-modules`."""


CrossEntropy = Literal["separate", "in_place", "compiled", "fused"]
"""Implementation of the loss, by its buffers for logits and their gradient."""


class MemorySpec(Section):
    """Memory that the simulator counts, in bytes on each rank.

    A run follows `recompute`, `sequence_parallel_activations`, `shard_optimizer`, `shard_gradients` and
    `shard_weights`.
    """

    budget_gib: float | None = Field(
        default=None, gt=0, le=2**20, description="Memory of a rank in GiB; a plan that needs more fails its check."
    )
    dtype: MemoryDtype | None = Field(
        default=None,
        description="Type of weights and activations for these figures; without it, as in `cost.analytic`, or "
        "`run.dtype`.",
    )
    attention: Literal["flash", "unfused"] | None = Field(
        default=None,
        description="Implementation of attention, which decides the activations it keeps: flash, or unfused, which "
        "keeps the probabilities; without it, as in `cost.analytic`, or flash.",
    )
    gradient_dtype: MemoryDtype | None = Field(
        default=None,
        description="Type in which gradients of weights are accumulated; without it, `run.main_grad_dtype`, or "
        "float32.",
    )
    optimizer_bytes: float | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="Bytes of optimizer state per parameter, a float32 copy of 16-bit weights included. Without it, as "
        "`run.optimizer`: adamw keeps two moments in float32 (float64 for float64 weights) and the copy, sgd the copy "
        "alone.",
    )
    shard_optimizer: Literal["none", "dp"] = Field(
        default="none",
        description="Whether each of the dp ranks keeps only a shard of the optimizer state (arXiv:1910.02054, stage "
        "1): gradients are reduce-scattered, each rank updates its shard of each weight, and weights are gathered.",
    )
    shard_gradients: Literal["none", "dp"] = Field(
        default="none",
        description="Whether each of the dp ranks also keeps only a shard of the gradients (stage 2): the gradients of "
        "a stage are reduce-scattered after each micro-batch's B or W and added to the rank's shards. It needs "
        "`shard_optimizer: dp`.",
    )
    shard_weights: Literal["none", "dp"] = Field(
        default="none",
        description="Whether each of the dp ranks also keeps only a shard of the weights (stage 3): the weights of a "
        "stage are gathered before each F, B, I and W, and released after it. It needs `shard_gradients: dp`.",
    )
    optimizer_ranks: Literal["dp", "replicas"] = Field(
        default="dp",
        description="With `shard_optimizer: dp`, the ranks that share the state of a weight: dp, the dp ranks, as in a "
        "run; replicas, all ranks that hold the weight, also along cp, and along ep outside of experts, as in "
        "Megatron-LM's distributed optimizer. Memory and times follow it, a run does not.",
    )
    recompute: Recompute = Field(
        default="none",
        description="Activations that the backward computes again: selective, in `recompute_modules`; full, "
        "each transformer block from its input, with the collectives of its forward. `cost.analytic` counts the time; "
        "given times are used unchanged.",
    )
    recompute_modules: Annotated[tuple[RecomputeModule, ...], FROM_LIST] = Field(
        default=("core_attn",),
        min_length=1,
        description="Modules of a block that `recompute: selective` computes again, with the collectives of their "
        "forward: core_attn, the core of attention; mlp, an MLP without experts; moe, a router with its experts; "
        "shared_experts. The others drop only their output: layernorm, the norms before attention and before "
        "the MLP; mla_up_proj, the products from compressed vectors and rotary positions; moe_act, the activation of "
        "experts. A run follows the first four.",
        json_schema_extra={"default": ["core_attn"]},
    )
    offload_blocks: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="Number of first blocks of each stage whose activations are copied to host memory during F, and "
        "back before their backward. `cost.analytic` counts the time at the bandwidth of the host, next to "
        "computations; given times are used unchanged. A run does not follow it.",
    )
    product_inputs: Literal["dtype", "matmul_dtype", "float8", "float8_block", "float4"] = Field(
        default="dtype",
        description="Type in which products of blocks, except in routers, keep their inputs until W: dtype, the type "
        "of activations; matmul_dtype, the type in `cost.analytic`, or a narrow type by name; with its scales, as "
        "Transformer Engine does. Flash attention then also keeps its output in `dtype` until I. A run does "
        "not follow it.",
    )
    sequence_parallel_activations: Literal["keep", "regather"] = Field(
        default="keep",
        description="With sequence parallelism, the input of a weight gradient: keep, the tokens gathered for the "
        "forward; regather, each rank keeps its own tokens and gathers again in W (arXiv:2205.05198, section 4.2.2). "
        "`cost.analytic` counts the time, as part of W.",
    )
    cross_entropy: CrossEntropy = Field(
        default="separate",
        description="Buffers of the loss: separate, float32 logits and their float32 gradient; in_place, float32 "
        "logits that their gradient overwrites, and one copy in `dtype` (Megatron-LM's default); compiled, float32 "
        "logits, their gradient and a copy in `dtype` (Megatron-LM's `--cross-entropy-loss-fusion`); fused, logits in "
        "`dtype` that their gradient overwrites (Transformer Engine's kernel). Runs have separate ones.",
    )
    overhead_gib: float = Field(
        default=0,
        ge=0,
        le=2**20,
        description="Further memory of the framework and the communication library (contexts, buffers, "
        "fragmentation), in GiB: your measurement.",
    )
    fragmentation: float = Field(
        default=0,
        ge=0,
        le=10,
        description="Memory that the allocator reserves at the peak and no tensor uses, as a share of the tensors: "
        "`memory_reserved` / `memory_allocated` - 1 of a run. It is held for the whole step, as part of the overhead.",
    )
