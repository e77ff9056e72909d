"""Modules of a block that ``memory.recompute: selective`` computes again, by the names of their operations.

They are Megatron-LM's (``recompute_modules`` of its ``TransformerConfig``, commit d98e8a6). ``core_attn``, ``mlp``,
``moe`` and ``shared_experts`` store their inputs and nothing inside. ``moe_act``, ``layernorm`` and ``mla_up_proj``
store their inputs and not their outputs, which are computed again before the operations that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pipeproof.specs.memory import RecomputeModule
from pipeproof.specs.plan import PlanSpec

WHOLE_MLP: tuple[RecomputeModule, ...] = ("mlp", "moe")
"""Modules in place of which a block has the other one: an MLP, or a router with its experts."""

_MLP, _BEHIND_MLP = "mlp.", ("mlp.add", "mlp.dropout")
_SHARED = ("mlp.shared.gate_up", "mlp.shared.swiglu", "mlp.shared.down")

_OPERATIONS: Mapping[RecomputeModule, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("attn.core",),
        "moe_act": ("mlp.experts.swiglu",),
        "layernorm": ("attn_norm", "mlp_norm"),
        "mla_up_proj": ("attn.in", "attn.q", "attn.q.in", "attn.q_up", "attn.kv.in", "attn.kv_up", "attn.rotary"),
        "shared_experts": _SHARED,
    }
)
"""Operations of a module, with the collectives into them."""

_NOT_STORED: Mapping[RecomputeModule, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("attn.core", "attn.core_out"),
        "moe_act": ("mlp.experts.down",),
        "layernorm": (
            "attn_norm.factor", "attn.qkv", "attn.q", "attn.q_down", "attn.kv_down",
            "mlp_norm.factor", "mlp.gate_up", "mlp.up", "mlp.router", "mlp.shared.gate_up",
        ),
        "mla_up_proj": ("attn.qkv_out",),
        "shared_experts": _SHARED,
    }
)  # fmt: skip
"""Activations by the operation that stores them: of an output, the product that reads it."""


def modules_of_block(plan: PlanSpec, name: str) -> tuple[RecomputeModule, ...]:
    """The modules of ``memory.recompute_modules`` that the block or MTP module ``name`` has."""
    model = plan.gpt
    number = int(name.removeprefix("layer.")) if name.startswith("layer.") else model.num_layers - 1
    other = "mlp" if model.moe is not None and model.has_experts(number) else "moe"
    return tuple(module for module in plan.memory.recompute_modules if module != other)


def is_in_modules(modules: Iterable[RecomputeModule], operation: str) -> bool:
    """True if an operation, or the collective of that name, is part of one of these modules."""
    return any(
        operation.startswith(_MLP) and operation not in _BEHIND_MLP
        if module in WHOLE_MLP
        else operation in _OPERATIONS[module]
        for module in modules
    )


def is_not_stored(modules: Iterable[RecomputeModule], activation: str) -> bool:
    """True if these modules leave an activation of the forward to the backward."""
    return any(
        is_in_modules((module,), activation) if module in WHOLE_MLP else activation in _NOT_STORED[module]
        for module in modules
    )
