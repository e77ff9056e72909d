"""The MLP of a block: SwiGLU (arXiv:2002.05202), also in experts, or GELU."""

from __future__ import annotations

from pipeproof.specs.model import ModelSpec, MoeSpec
from pipeproof.stages.describe.gradient_facts import router_losses
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
    # Clamped: also three comparisons, and in the formula of gpt-oss the 1.702 and the 1.
    costs = ((5, 3), (10, 5))
    if model.swiglu_limit is not None:
        costs = ((8, 3), (15, 5)) if model.swiglu_formula == "silu" else ((10, 3), (17, 5))
    return (
        ops.Product(f"{name}.gate_up", gate_up, rows, experts is None, reads, dtype=dtype),
        ops.Elementwise(f"{name}.swiglu", *costs, sharded=size, rows=rows, stored=2),
        ops.Product(f"{name}.down", (ops.Weight(f"{name}.down.weight", narrow, dim, ep_dim),), rows),
    )


# Experts in place of an MLP.
#
# A block with experts enters and leaves its MLP as a dense block does. In between, every TP rank routes all tokens. EP
# ranks exchange the number of tokens for each expert. Then each token goes to the ranks of its experts and back, by one
# all-to-all in each direction (arXiv:2006.16668). With ``dispatcher: all_gather`` every EP rank gets the router's
# outputs and the tokens of all, computes for its experts, and the results are added by a reduce-scatter. All experts
# are assumed to get the same number of tokens, so each EP rank computes ``top_k`` times its own tokens. Moving tokens
# into the order of experts, and back, reads and writes each visit.


_INPUT = "mlp_norm"
"""The tensor that the router and the shared experts read."""


def experts(model: ModelSpec, moe: MoeSpec, *, by_token: bool) -> ops.Operations:
    """The operations between the norm and the residual. ``by_token``: a table chooses the experts of each token id.

    The router of such a block has another name: it has neither losses nor a bias.
    """
    hidden, shared = model.hidden_size, moe.num_shared_experts * moe.ffn_size
    add = ops.Elementwise("mlp.shared.add", (1, 3), (1, 3), whole=hidden)
    router = "mlp.hash_router" if by_token else "mlp.router"
    weight = ops.Weight(f"{router}.weight", (hidden, moe.num_experts))
    balance = () if by_token else _balance(moe)
    exchanges = _gathers if moe.dispatcher == "all_gather" else _exchanges
    there, back = exchanges(hidden, moe, balance)
    return (
        ops.Enter("mlp.in", hidden),
        ops.Product(router, (weight,), entered=True, reads=_INPUT, narrow=False),
        *there,
        ops.Elementwise("mlp.permute", (0, 2), (1, 2), whole=hidden, rows=ops.VISITS),
        *swiglu_mlp(model, "mlp.experts", moe.ffn_size, experts=moe),
        *back,
        *((*swiglu_mlp(model, "mlp.shared", shared, reads=_INPUT), add) if shared else ()),
        ops.Leave("mlp.out", hidden),
    )


def _exchanges(hidden: int, moe: MoeSpec, balance: ops.Operations) -> tuple[ops.Operations, ops.Operations]:
    """Each token to the ranks of its experts, and back."""
    there = (
        _scores(moe, ops.INSIDE),
        *balance,
        ops.Exchange("mlp.counts", counts=moe.num_experts),
        ops.Exchange("mlp.dispatch", dtype=moe.dispatch_dtype),
    )
    return there, (ops.Exchange("mlp.combine", grad_dtype=moe.dispatch_dtype), _unpermute(hidden))


def _gathers(hidden: int, moe: MoeSpec, balance: ops.Operations) -> tuple[ops.Operations, ops.Operations]:
    """All tokens to every rank, and sums of the ranks' results back. Each rank scores all tokens."""
    there = (
        *balance,
        ops.GatherTokens("mlp.route", moe.num_experts),
        ops.GatherTokens("mlp.tokens", hidden),
        _scores(moe, ops.GATHERED),
    )
    # A rank adds to each token the results of its experts, in the places of the token's choices: zero for other ranks.
    places = ops.Elementwise("mlp.places", (0, 2), (0, 2), whole=moe.top_k * hidden, rows=ops.GATHERED)
    return there, (_unpermute(hidden), places, ops.SumResults("mlp.sum", hidden))


def _scores(moe: MoeSpec, rows: ops.Rows) -> ops.Elementwise:
    return ops.Elementwise(
        "mlp.scores", ops.SOFTMAX, ops.SOFTMAX_BACK, whole=moe.num_experts, rows=rows, stored=1, is_float32=True
    )


def _unpermute(hidden: int) -> ops.Elementwise:
    """Weighted sums of visits. The gradient of the routing weights needs the output of each visit."""
    return ops.Elementwise("mlp.unpermute", (2, 2), (2, 3), whole=hidden, rows=ops.VISITS, stored=1)


def _balance(moe: MoeSpec) -> ops.Operations:
    """Router losses, with their gradient in forward; backward only adds it."""
    num = len(router_losses(moe))
    forward = num * (ops.SOFTMAX[0] + ops.SOFTMAX_BACK[0]), num * (ops.SOFTMAX[1] + ops.SOFTMAX_BACK[1])
    balance = ops.Elementwise("mlp.balance", forward, (1, 3), whole=moe.num_experts, stored=1, is_float32=True)
    return (balance,) if num else ()
