"""Experts that get the tokens of all ranks: rows for as many visits as there are, and for as many as there can be."""

import pytest
import torch

from pipeproof.specs.model import MoeSpec
from pipeproof.stages.common.experts import ExpertRegion
from pipeproof.stages.torch import functional
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.experts import FixedTorchExperts, TorchExperts
from pipeproof.stages.torch.functional import is_one_kernel
from pipeproof.stages.torch.weights import SplitWeights, Weight
from tests.stages.torch.test_grouped import drawn

pytestmark = pytest.mark.needs_torch

RANKS, TOKENS, HIDDEN = 2, 12, 32
MOE = MoeSpec(num_experts=6, top_k=2, ffn_size=16, dispatcher="all_gather")
CHOSEN = {
    "both ranks": torch.stack([torch.arange(TOKENS) % 6, (torch.arange(TOKENS) * 5 + 1) % 6], 1),
    "all here": torch.tensor([[0, 2]]).expand(TOKENS, -1),
    "one visit": torch.tensor([[5, 4]] * (TOKENS - 1) + [[1, 3]]),
}
"""By the visits to rank 0, which has experts 0 to 2: of [TOKENS, 2] choices."""


class _Unused:
    """Collectives of a rank whose experts are run by themselves."""


def results(kind, chosen):
    """The sum of rank 0's results, and the gradients of tokens, routing weights and each weight."""
    shapes = {"gate": (3, HIDDEN, 16), "up": (3, HIDDEN, 16), "down": (3, 16, HIDDEN)}
    weights = {f"mlp.experts.{name}.weight": Weight(drawn(*shape), torch.bfloat16) for name, shape in shapes.items()}
    products = SplitWeights(torch.device("cpu"))
    gated = torch.nn.functional.silu
    own = kind(
        MOE, "mlp", products, weights.__getitem__, ExpertRegion(OPS, 0, RANKS, _Unused()), lambda g, u: gated(g) * u,
        recomputes_shared=False,
    )  # fmt: skip
    tokens, gains = drawn(TOKENS, HIDDEN).requires_grad_(), drawn(TOKENS, 2).requires_grad_()
    made = own._visit_own(tokens, chosen, gains)
    products.backward(made, drawn(TOKENS, HIDDEN + 1)[:, 1:]).accumulate()
    return [made, tokens.grad, gains.grad, *(weight.gradient for weight in weights.values())]


@pytest.fixture
def unset_memory_is_nan():
    """New memory that nothing has been written to yet is NaN: a row that is read by mistake then shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.usefixtures("unset_memory_is_nan")
def test_rows_for_all_possible_visits_have_the_bits_of_rows_for_those_that_are(name, monkeypatch):
    assert is_one_kernel(drawn(1, HIDDEN), drawn(3, HIDDEN, 16))
    exact = results(TorchExperts, CHOSEN[name])
    asked = []
    sizes = functional.Groups.sizes.func
    monkeypatch.setattr(functional.Groups, "sizes", property(lambda self: asked.append(1) or sizes(self)))
    fixed = results(FixedTorchExperts, CHOSEN[name])
    assert not asked
    assert all(torch.equal(one, other) for one, other in zip(exact, fixed, strict=True))
    assert all(one.isfinite().all() and one.abs().sum() for one in exact)


@pytest.mark.parametrize("kind", [TorchExperts, FixedTorchExperts])
def test_the_ranks_of_experts_add_up_to_all_experts(kind):
    """Each token's sum over its experts on this rank, by a plain loop."""
    chosen = CHOSEN["both ranks"]
    made, *_ = results(kind, chosen)
    tokens, gains = drawn(TOKENS, HIDDEN), drawn(TOKENS, 2)
    gate, up, down = drawn(3, HIDDEN, 16), drawn(3, HIDDEN, 16), drawn(3, 16, HIDDEN)
    for token in range(TOKENS):
        expected = torch.zeros(HIDDEN, dtype=torch.float32)
        for place, expert in enumerate(chosen[token].tolist()):
            if expert < 3:
                inner = torch.nn.functional.silu(tokens[token] @ gate[expert]) * (tokens[token] @ up[expert])
                expected += (inner @ down[expert]).float() * gains[token, place].float()
        assert torch.allclose(made[token].float(), expected, rtol=0.05, atol=0.3)
