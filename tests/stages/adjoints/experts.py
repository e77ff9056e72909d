"""Table rows: exchange of tokens with experts, and the experts themselves."""

from __future__ import annotations

import numpy as np
import paddle

from pipeproof.specs.model import MoeSpec
from pipeproof.stages.common.backend_ops import gated
from pipeproof.stages.paddle.experts import PaddleBalance, PaddleExperts, choose, reorder, visits, weighted
from pipeproof.stages.paddle.functional import fork, swiglu
from tests.stages.adjoints.rows import plain
from tests.stages.adjoints.world import Case, Held, Rank
from tests.stages.staged_run import make_plan

MOE = MoeSpec(num_experts=4, top_k=3, ffn_size=5, num_shared_experts=1)


def experts() -> list[Case]:
    """Tokens on their way to experts and back, and the experts themselves."""
    order = np.array([3, 0, 5, 1, 7, 2, 6, 4])
    sent = ((1, 3), (2, 2))
    scores = [
        MOE.model_copy(update={"score": s, "normalize": n, "routed_scale": 1.5 if n else 1.0})
        for s in ("softmax", "sigmoid", "sqrtsoftplus")
        for n in (True, False)
    ]
    return [
        plain("fork", "fork", lambda x: fork(x, 3), (4, 3)),
        plain("reorder", "reorder", lambda x: reorder(x, order), (8, 3)),
        plain("visits", "visits", lambda x: visits(x, order, 2), (4, 3)),
        plain("weighted", "weighted", weighted, (4, 3, 5), (4, 3)),
        *(plain(f"gains, {m.score}, {m.normalize}", "choose", lambda x, m=m: choose(x, m)[1], (5, 4)) for m in scores),
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
        *(_experts(MOE, num_ranks, limit) for num_ranks in (1, 2) for limit in (None, 0.6)),
        _experts(MOE.model_copy(update={"dispatcher": "all_gather"}), 2, 0.6),
    ]


def _experts(moe: MoeSpec, num_ranks: int, limit: float | None) -> Case:
    """Of expert-parallel ranks: each with tokens, a router and shared experts of its own, as its gradients are."""
    own = moe.num_experts // num_ranks
    shapes = {
        "router": (7, 4), "experts.gate": (own, 7, 5), "experts.up": (own, 7, 5), "experts.down": (own, 5, 7),
        "shared.gate": (7, 5), "shared.up": (7, 5), "shared.down": (5, 7),
    }  # fmt: skip

    def function(rank: Rank, x: paddle.Tensor, *tensors: paddle.Tensor) -> paddle.Tensor:
        weights = {f"mlp.{name}.weight": tensor for name, tensor in zip(shapes, tensors, strict=True)}
        router = PaddleBalance(make_plan(), (), adds_losses=False).of("mlp", 0, 0)
        activation = gated(swiglu, make_plan(model={"swiglu_limit": limit}).gpt, paddle.clip)
        experts = PaddleExperts(
            moe, "mlp", rank.weights, weights.__getitem__, rank.experts, activation, recomputes_shared=False
        )
        return experts.forward(x, router)

    inputs = (Held((3, 2, 7)), *map(Held, shapes.values()))
    return Case(
        f"experts of {num_ranks} ranks, {moe.dispatcher}, limit {limit}",
        ("Experts.forward",),
        function,
        inputs,
        num_ranks,
        axis="ep",
    )
