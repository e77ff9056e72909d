"""Mixture of experts and routers for the references: a loop over experts, for the tokens of one or more ranks.

The bits depend on the rows of each product and on the order in which a token's gradients are added, so both are
explicit: an expert's rows are its tokens, rank by rank. A token adds the outputs of its experts, and the gradients that
come back, in the order of its choice. A router's losses are additional roots of plain autograd.
``pipeproof.stages.describe.gradient_facts`` defines them.

Shape letters: N tokens, E experts, k of them for a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.specs.model import ModelSpec, MoeSpec
from pipeproof.stages.reference.layer_math import gated
from pipeproof.stages.reference.sharded_tensors import Copies, add
from pipeproof.stages.reference.shared_math import Array, RouterSteps

Tensor: TypeAlias = paddle.Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of each token, as they are added [N, k], and their weights, k tensors of [N, 1]."""

    experts: npt.NDArray[np.int64]
    gains: Sequence[Tensor]


def route(
    logits: Tensor, moe: MoeSpec, bias: npt.NDArray[Any] | None = None, fixed: npt.NDArray[np.int64] | None = None
) -> Routing:
    """Choose experts by the router's outputs [.., E]: the largest scores. Ties go to the lower expert.

    A ``bias`` [E] is added to the scores for the choice only. ``fixed`` experts [N, k] are not chosen.
    """
    flat = logits.reshape([-1, moe.num_experts])
    scores = _scores(flat, moe)
    values = scores.numpy() if bias is None else scores.numpy() + bias
    best = [sorted(range(moe.num_experts), key=lambda e: (-row[e], e))[: moe.top_k] for row in values]
    experts = np.array(best, dtype=np.int64) if fixed is None else fixed
    gains = paddle.take_along_axis(scores, paddle.to_tensor(experts), axis=-1)
    if moe.normalize:
        gains = gains / gains.sum(axis=-1, keepdim=True)
    if moe.routed_scale != 1.0:
        gains = gains * moe.routed_scale
    if moe.combine == "expert":
        places = np.array([sorted(range(moe.top_k), key=row.__getitem__) for row in experts])
        experts = np.take_along_axis(experts, places, 1)
        gains = paddle.take_along_axis(gains, paddle.to_tensor(places), axis=1)
    return Routing(experts, gains.split(moe.top_k, axis=-1))


def in_router_type(tensor: Tensor, moe: MoeSpec) -> Tensor:
    """A factor of a router's product, which Paddle has in float32 or float64, in the type of the product."""
    return tensor.astype("float64") if moe.router_dtype == "float64" else tensor


def _scores(logits: Tensor, moe: MoeSpec) -> Tensor:
    if moe.score == "softmax":
        return F.softmax(logits, axis=-1)
    return F.sigmoid(logits) if moe.score == "sigmoid" else F.softplus(logits).sqrt()


def gathered_mixture(
    inputs: Sequence[Tensor], routings: Sequence[Sequence[Routing]], weights: Sequence[Tensor], model: ModelSpec
) -> list[Tensor]:
    """``mixture`` where each of R ranks adds the results of its experts, and the ranks' addends are added in order.

    ``routings`` has R of each rank's tokens, one for each rank that computes with them.
    """
    num_ranks, num_own = len(inputs), weights[0].shape[0] // len(inputs)
    copies = [Copies.apply(x, num_ranks) for x in inputs]
    addends = [
        mixture(
            [readers[rank] for readers in copies],
            [readers[rank] for readers in routings],
            [weight[rank * num_own : (rank + 1) * num_own] for weight in weights],
            model,
            range(rank * num_own, (rank + 1) * num_own),
        )
        for rank in range(num_ranks)
    ]
    return [add(list(of_rank)) for of_rank in zip(*addends, strict=True)]


def mixture(
    inputs: Sequence[Tensor],
    routings: Sequence[Routing],
    weights: Sequence[Tensor],
    model: ModelSpec,
    own: range | None = None,
) -> list[Tensor]:
    """Outputs of the experts for each rank's tokens: tensors of the shapes of ``inputs`` [.., H].

    ``weights`` are gate, up and down of the experts: [E, H, M] twice and [E, M, H]. With ``own`` they are only these
    experts' weights, and others add zero.
    """
    hidden = inputs[0].shape[-1]
    top_k = routings[0].experts.shape[1]
    # Each visit of a token to an expert has a row: rank by rank, token by token, in the order of its choice.
    rank_rows = [
        paddle.stack(list(Copies.apply(x.reshape([-1, hidden]), top_k)), axis=1).reshape([-1, hidden]) for x in inputs
    ]
    experts = np.concatenate([routing.experts.reshape(-1) for routing in routings])
    rows = rank_rows[0] if len(rank_rows) == 1 else paddle.concat(rank_rows)
    order = np.argsort(experts, kind="stable")
    visited, sizes = np.unique(experts, return_counts=True)
    gates, ups, downs = (weight.unbind() for weight in weights)
    outputs = []
    for expert, group in zip(visited, paddle.split(PermuteRows.apply(rows, order), sizes.tolist()), strict=True):
        if own is not None and int(expert) not in own:
            outputs.append(group * 0.0)
            continue
        held = int(expert) - (own.start if own is not None else 0)
        inner = gated(paddle.matmul(group, gates[held]), paddle.matmul(group, ups[held]), model)
        outputs.append(paddle.matmul(inner, downs[held]))
    back = PermuteRows.apply(paddle.concat(outputs), np.argsort(order)).split([x.shape[0] for x in rank_rows])
    results = []
    for rank_output, routing, x in zip(back, routings, inputs, strict=True):
        choices = rank_output.reshape([-1, top_k, hidden]).unbind(1)
        addends = [y.astype(gain.dtype) * gain for y, gain in zip(choices, routing.gains, strict=True)]
        results.append(add(addends).astype(x.dtype).reshape(x.shape))
    return results


class PermuteRows(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """A permutation of rows. Gradients only move back; autograd's own backward would add them to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: npt.NDArray[np.int64]) -> Tensor:
        """Row ``order[i]`` as row i."""
        ctx.order = order
        return paddle.gather(rows, paddle.to_tensor(order))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Row i as row ``order[i]``."""
        back = np.empty_like(ctx.order)
        back[ctx.order] = np.arange(len(back))
        return paddle.gather(gradient, paddle.to_tensor(back))


class Routers(RouterSteps[Array]):
    """The routers on Paddle; their biases, losses and visits are arrays."""

    def _placed(self, numbers: Array) -> Array:
        return numbers

    def _read(self, values: Array) -> Array:
        return values.copy()

    def routes(
        self,
        logits: Tensor,
        name: str,
        num_readers: int,
        *,
        counts: bool = True,
        sequence_dim: int | None = None,
        token_ids: npt.NDArray[np.int64] | None = None,
    ) -> list[Routing]:
        """Choose experts by a router's outputs [.., E], and compute the weights of each reader separately.

        ``counts`` is False for the outputs of another tensor-parallel shard for the same tokens, whose losses and
        visits already count. With ``sequence_dim`` the outputs are for whole sequences, and each sequence split of the
        plan has its own losses. ``token_ids`` of any shape are given if a table chooses; then there are no losses.
        """
        moe, num_splits = self._plan.model.moe, self._plan.schedule.num_sequence_splits
        assert moe is not None
        if counts and self._weights and token_ids is None:
            logits, for_losses = Copies.apply(logits, 2)
            is_split = sequence_dim is not None and num_splits > 1
            parts = for_losses.split(num_splits, axis=sequence_dim) if is_split else [for_losses]
            for offset, part in enumerate(parts):
                self._add_losses(part, name, offset)
        copies = Copies.apply(logits, num_readers) if num_readers > 1 else [logits]
        fixed = None if token_ids is None else self._tables[name][token_ids.reshape(-1)]
        routings = [route(copy, moe, self.biases.get(name), fixed) for copy in copies]
        if counts and name in self.visits:
            np.add.at(self.visits[name], routings[0].experts.reshape(-1), 1)
        return routings

    def _add_losses(self, logits: Tensor, name: str, offset: int) -> None:
        moe = self._plan.model.moe
        assert moe is not None
        flat = logits.reshape([-1, moe.num_experts])
        copies = Copies.apply(flat, len(self._weights)) if len(self._weights) > 1 else [flat]
        for (loss, weight), copy in zip(self._weights.items(), copies, strict=True):
            value = (balance_loss(copy, moe) if loss == "aux" else z_loss(copy)) * weight
            self._add_root(loss, name, offset, value, value.numpy())


def balance_loss(logits: Tensor, moe: MoeSpec) -> Tensor:
    """The sum over experts of (visits / mean visits) times (mean share of the scores), from outputs [N, E]."""
    scores = _scores(logits, moe)
    chosen = route(logits.detach(), moe).experts
    over_mean = np.array([np.sum(chosen == e) * moe.num_experts / chosen.size for e in range(moe.num_experts)])
    shares = scores if moe.score == "softmax" else scores / scores.sum(axis=-1, keepdim=True)
    return (shares.mean(axis=0) * paddle.to_tensor(over_mean, dtype=logits.dtype)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of the logarithm of the softmax's denominator, from outputs [N, E]."""
    return paddle.logsumexp(logits, axis=-1).square().mean()
