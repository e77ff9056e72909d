"""The MLP of blocks without experts: SwiGLU (arXiv:2002.05202), which is also that of experts."""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.model_parts import MoeSpec
from pipeproof.stages.describe.layers import operations as ops


def mlp(model: ModelSpec) -> ops.Operations:
    """The operations between the norm and the residual."""
    hidden = model.hidden_size
    return ops.Enter("mlp.in", hidden), *swiglu_mlp(model, "mlp", model.ffn_size), ops.Leave("mlp.out", hidden)


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
        ops.Product(f"{name}.gate_up", gate_up, rows, entered=experts is None, reads=reads, dtype=dtype),
        ops.Elementwise(f"{name}.swiglu", *costs, sharded=size, rows=rows, stored=2),
        ops.Product(f"{name}.down", (ops.Weight(f"{name}.down.weight", narrow, dim, ep_dim),), rows),
    )
