"""The section ``memory`` of a plan: what is kept of a step, in which types, and how much room there is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

MemoryDtype = Literal["bfloat16", "float16", "float32", "float64"]
"""A type of weights and activations."""

Recompute = Literal["none", "selective", "full"]
"""What a backward computes once more instead of keeping it (arXiv:2205.05198, section 5)."""


class MemorySpec(BaseModel):
    """What the simulator counts as held, in bytes on each rank.

    A run keeps to `recompute`, `gathered` and `shard_optimizer`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    budget_gib: float | None = Field(
        default=None, gt=0, le=2**20, description="Memory of a rank in GiB; a plan that needs more fails its check."
    )
    dtype: MemoryDtype | None = Field(
        default=None,
        description="Type of weights and activations for these figures; without it, that of `cost.analytic`, or "
        "`run.dtype`.",
    )
    attention: Literal["flash", "unfused"] | None = Field(
        default=None,
        description="Whether attention keeps what flash attention does, or its probabilities; without it, as "
        "`cost.analytic` has it, or flash.",
    )
    gradient_dtype: MemoryDtype | None = Field(
        default=None,
        description="Type in which gradients of weights add up; without it, `run.main_grad_dtype`, or float32.",
    )
    optimizer_bytes: float | None = Field(
        default=None,
        ge=0,
        le=1024,
        description="What the optimizer keeps for each parameter, a float32 copy of 16-bit weights included; without "
        "it, as `run.optimizer` does: adamw two moments in float32 (float64 for float64 weights) and the copy, sgd "
        "the copy alone.",
    )
    shard_optimizer: Literal["none", "dp"] = Field(
        default="none",
        description="Whether each of the dp ranks keeps only its share of what the optimizer keeps (arXiv:1910.02054, "
        "stage 1): it gets its share of each sum, updates its share of each weight, and the shares are gathered.",
    )
    recompute: Recompute = Field(
        default="none",
        description="What the backward computes once more: selective, the core of attention; full, each "
        "transformer block from its input, with the collectives of its forward. `cost.analytic` counts the time; given "
        "times are taken as they are.",
    )
    gathered: Literal["kept", "again"] = Field(
        default="kept",
        description="With sequence parallelism, whether what is gathered for a product is kept for the weight's "
        "gradient, or each rank keeps its own tokens and they are gathered again (arXiv:2205.05198, section 4.2.2); "
        "`cost.analytic` counts the time, as part of W.",
    )
    overhead_gib: float = Field(
        default=0,
        ge=0,
        le=2**20,
        description="What the framework and the communication library take besides (contexts, buffers, "
        "fragmentation), in GiB: your measurement.",
    )
