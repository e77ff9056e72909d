"""The MLP of blocks without experts: SwiGLU (arXiv:2002.05202), which is also that of experts, or GELU."""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.model_parts import MoeSpec
from pipeproof.stages.describe.layers import operations as ops

_GELU: dict[str, tuple[ops.Cost, ops.Cost]] = {"gelu": ((5, 2), (10, 3)), "gelu_tanh": ((9, 2), (16, 3))}
"""Costs forward and backward of x (1 + erf(x / sqrt 2)) / 2, and of its approximation by tanh of a cubic of x."""


def mlp(model: ModelSpec) -> ops.Operations:
    """The operations between the norm and the residual."""
    hidden, size = model.hidden_size, model.ffn_size
    inner = swiglu_mlp(model, "mlp", size) if model.mlp == "swiglu" else _gelu_mlp(model, _GELU[model.mlp])
    return ops.Enter("mlp.in", hidden), *inner, ops.Leave("mlp.out", hidden)


def _gelu_mlp(model: ModelSpec, costs: tuple[ops.Cost, ops.Cost]) -> ops.Operations:
    hidden, size = model.hidden_size, model.ffn_size
    up, down = ops.Weight("mlp.up.weight", (hidden, size), 1), ops.Weight("mlp.down.weight", (size, hidden), 0)
    return (
        ops.Product("mlp.up", (up,), entered=True),
        ops.Elementwise("mlp.gelu", *costs, sharded=size, stored=1),
        ops.Product("mlp.down", (down,)),
    )


def swiglu_mlp(
    model: ModelSpec, name: str, size: int, *, reads: str = "", experts: MoeSpec | None = None
) -> ops.Operations:
    """An MLP that reads an entered tensor; or all ``experts``, which are the first dim of their weights."""
    outer, ep_dim = ((), None) if experts is None else ((experts.num_experts,), 0)
    rows, dtype = (ops.INSIDE, None) if experts is None else (ops.VISITS, experts.dispatch_dtype)
    widen, narrow, dim = (*outer, model.hidden_size, size), (*outer, size, model.hidden_size), len(outer)
    gate_up = tuple(ops.Weight(f"{name}.{part}.weight", widen, dim + 1, ep_dim) for part in ("gate", "up"))
    # Clamped: also three comparisons, the 1.702 and the 1.
    costs = ((5, 3), (10, 5)) if model.swiglu_limit is None else ((10, 3), (17, 5))
    return (
        ops.Product(f"{name}.gate_up", gate_up, rows, experts is None, reads, dtype=dtype),
        ops.Elementwise(f"{name}.swiglu", *costs, sharded=size, rows=rows, stored=2),
        ops.Product(f"{name}.down", (ops.Weight(f"{name}.down.weight", narrow, dim, ep_dim),), rows),
    )
