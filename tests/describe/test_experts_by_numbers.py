"""The types of gradients of routers and experts, tested with numbers: one rank's copy of a weight is moved a little.

Every rank (tp, ep) has a copy of the router and its part of its experts, which
are not linear. The change of the loss of all ranks when one copy moves is the gradient that this rank has before any
reduction.
"""

import numpy as np
import pytest

from pipeproof.stages.describe.typed_gpt import typed_gpt
from tests.plans import plan_spec

TP, EP, TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 2, 2, 5, 3, 4, 4, 2
OWN = EXPERTS // EP


class Experts:
    """Weights by rank (t, e): the router whole, of the rank's experts the columns of its tp rank."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.tokens = random.normal(size=(EP, TOKENS, HIDDEN))
        self.wanted = random.normal(size=(EP, TOKENS, HIDDEN))
        router = random.normal(size=(HIDDEN, EXPERTS))
        up, down = random.normal(size=(EXPERTS, HIDDEN, FFN)), random.normal(size=(EXPERTS, FFN, HIDDEN))
        self.chosen = np.argsort(-(self.tokens @ router), axis=-1)[..., :TOP_K]
        self.whole = {"router": router, "up": up, "down": down}
        ranks = [(t, e) for t in range(TP) for e in range(EP)]
        self.copies = {
            "router": {rank: router.copy() for rank in ranks},
            "up": {(t, e): np.split(up, EP)[e][..., self.columns(t)].copy() for t, e in ranks},
            "down": {(t, e): np.split(down, EP)[e][:, self.columns(t)].copy() for t, e in ranks},
        }

    @staticmethod
    def columns(t):
        return slice(t * FFN // TP, (t + 1) * FFN // TP)

    def loss(self):
        total = 0.0
        for t in range(TP):
            for e in range(EP):
                scores = np.exp(self.tokens[e] @ self.copies["router"][t, e])
                scores /= scores.sum(axis=-1, keepdims=True)
                for token in range(TOKENS):
                    for expert in self.chosen[e, token]:
                        there = t, expert // OWN  # where the exchange brings it
                        up, down = (self.copies[name][there][expert % OWN] for name in ("up", "down"))
                        addend = np.tanh(self.tokens[e, token] @ up) @ down
                        total += scores[token, expert] * addend @ self.wanted[e, token]
        return total

    def gradient(self, name, rank, step=1e-5):
        weight = self.copies[name][rank]
        result = np.zeros_like(weight)
        for place in np.ndindex(weight.shape):
            kept = weight[place]
            weight[place] = kept + step
            above = self.loss()
            weight[place] = kept - step
            result[place] = (above - self.loss()) / (2 * step)
            weight[place] = kept
        return result

    def gradient_of_one_weight(self, name, step=1e-5):
        """All copies moved together: the gradient on one rank that has everything."""
        result = np.zeros_like(self.whole[name])
        for place in np.ndindex(result.shape):
            sides = []
            for moved in (step, -step):
                whole = self.whole[name].copy()
                whole[place] += moved
                other = Experts.__new__(Experts)
                other.__dict__ = {**self.__dict__, "copies": {**self.copies, name: self._spread(name, whole)}}
                sides.append(other.loss())
            result[place] = (sides[0] - sides[1]) / (2 * step)
        return result

    def _spread(self, name, whole):
        return {rank: self.part(name, whole, rank) for rank in self.copies[name]}

    def part(self, name, whole, rank):
        if name == "router":
            return whole
        t, e = rank
        own = np.split(whole, EP)[e]
        return own[..., self.columns(t)] if name == "up" else own[:, self.columns(t)]


@pytest.mark.parametrize("name", ["router", "up", "down"])
def test_gradients_are_sums_over_just_the_axes_that_the_types_name(name):
    model = {"moe": {"num_experts": EXPERTS, "top_k": TOP_K, "ffn_size": FFN}}
    block = typed_gpt(plan_spec(model=model, topology={"tp": TP, "ep": EP}))["moe_block"]
    full_name = "mlp.router.weight" if name == "router" else f"mlp.experts.{name}.weight"
    partial = block.partial_over[full_name]
    experts = Experts(seed=3)
    right = experts.gradient_of_one_weight(name)
    own = {rank: experts.gradient(name, rank) for rank in experts.copies[name]}
    for t, e in own:
        mates = [own[rank] for rank in own if (rank[0] == t or "tp" in partial) and (rank[1] == e or "ep" in partial)]
        assert np.allclose(sum(mates), experts.part(name, right, (t, e)), atol=1e-7)
        assert len(mates) == 1 or not np.allclose(own[t, e], right, atol=1e-3)
