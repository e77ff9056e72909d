"""Table rows: exchange of tokens with experts, and the experts themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeproof.specs.model import MoeSpec
from pipeproof.stages.common.backend_ops import gated
from tests.stages.adjoints.rows import plain
from tests.stages.adjoints.world import STEP, Backend, Case, Held, Rank, make_plan

MOE = MoeSpec(num_experts=4, top_k=3, ffn_size=5, num_shared_experts=1)


def experts(fw: Backend) -> list[Case]:
    """Tokens on their way to experts and back, and the experts themselves."""
    sent = ((1, 3), (2, 2))
    scores = [
        MOE.model_copy(update={"score": s, "normalize": n, "routed_scale": 1.5 if n else 1.0})
        for s in ("softmax", "sigmoid", "sqrtsoftplus")
        for n in (True, False)
    ]
    return [
        plain("fork", "fork", lambda x: fw.ops.fork(x, 3), (4, 3)),
        plain("weighted", "weighted", fw.experts.weighted, (4, 3, 5), (4, 3)),
        *(
            plain(f"gains, {m.score}, {m.normalize}", "choose", lambda x, m=m: fw.experts.choose(x, m)[1], (5, 4))
            for m in scores
        ),
        Case(
            "exchange",
            ("ExpertRegion.exchange",),
            lambda r, x: r.experts.exchange(x, sent[r.number], [of_rank[r.number] for of_rank in sent], "x"),
            (Held((4, 3)),),
            num_ranks=2,
            axis="ep",
        ),
        Case(
            "gather",
            ("ExpertRegion.gather",),
            lambda r, logits, tokens: r.experts.gather(logits, tokens, "x"),
            (Held((4, 2)), Held((4, 3))),
            num_ranks=2,
            axis="ep",
        ),
        Case(
            "sum of results",
            ("ExpertRegion.sum_results",),
            lambda r, addends: r.experts.sum_results(addends, "x"),
            (Held((8, 3)),),
            num_ranks=2,
            axis="ep",
        ),
        *(_experts(fw, MOE, num_ranks, limit) for num_ranks in (1, 2) for limit in (None, 0.6)),
        _experts(fw, MOE.model_copy(update={"dispatcher": "all_gather"}), 2, 0.6),
    ]


def _experts(fw: Backend, moe: MoeSpec, num_ranks: int, limit: float | None) -> Case:
    """Expert-parallel ranks: each has its own tokens, router and shared experts, and their gradients."""
    own = moe.num_experts // num_ranks
    shapes = {
        "router": (7, 4), "experts.gate": (own, 7, 5), "experts.up": (own, 7, 5), "experts.down": (own, 5, 7),
        "shared.gate": (7, 5), "shared.up": (7, 5), "shared.down": (5, 7),
    }  # fmt: skip

    def function(rank: Rank, x: Any, *tensors: Any) -> Any:
        weights = {f"mlp.{name}.weight": tensor for name, tensor in zip(shapes, tensors, strict=True)}
        router = fw.make_balance(make_plan(), adds_losses=False).of("mlp", 0, 0)
        activation = gated(fw.functional.swiglu, make_plan(model={"swiglu_limit": limit}).gpt, fw.clip)
        experts = fw.make_experts(
            moe, "mlp", rank.weights, weights.__getitem__, rank.experts, activation, recomputes_shared=False
        )
        return experts.forward(x, router)

    inputs = (Held((3, 2, 7)), *(Held(shape, is_weight=True) for shape in shapes.values()))
    return Case(
        f"experts of {num_ranks} ranks, {moe.dispatcher}, limit {limit}",
        ("Experts.forward",),
        function,
        inputs,
        num_ranks,
        axis="ep",
    )


def require_gradient_of_router(fw: Backend, score: str) -> None:
    """The gradient of a router sums the gradients of its outputs and of its losses."""
    moe = {"num_experts": 6, "top_k": 2, "ffn_size": 8, "score": score, "aux_loss": 0.7, "z_loss": 0.3}
    plan = make_plan(model={"moe": moe}, run={"dtype": "float64"})
    logits, along, y = np.random.default_rng(4).standard_normal((3, 9, 6))

    def entered(values: np.ndarray) -> tuple[Any, Any, float]:
        balance = fw.make_balance(plan, adds_losses=True)
        leaf = fw.leaf(values)
        made = balance.of("mlp", 0, 0).enter(leaf)
        losses = balance.values()
        assert set(losses) == {"aux/mlp/0/0", "z/mlp/0/0"}
        return leaf, made, sum(losses.values())

    leaf, made, _ = entered(logits)
    fw.library.autograd.backward([made], [fw.tensor(y)])
    (_, _, ahead), (_, _, behind) = entered(logits + STEP * along), entered(logits - STEP * along)
    slope = (ahead - behind) / (2 * STEP)
    assert abs(slope) > 1e-3
    assert (fw.gradient(leaf) * along).sum() == pytest.approx((along * y).sum() + slope, rel=1e-7)
