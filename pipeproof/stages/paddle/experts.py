"""Mixture of experts in place of an MLP: each token goes to the experts with its highest scores, none is dropped.

The rows of an expert's products are its tokens, by the expert-parallel rank that they come from, then by their position
in that rank's micro-batch. The number of rows changes the bits of a product, and of functions with vector
instructions, so an expert computes all its tokens at once, and no others. Gradients move back as their tokens moved.
The visits of a token are added in the order of its choice of experts.

Shape letters: S sequence, B rows, H hidden, N = S B tokens, E experts, k of them for a token, V visits, M inner size;
R expert-parallel ranks, each with E / R experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.stages.paddle.balance import RouterBalance
from pipeproof.stages.paddle.functional import Indices, fork, swiglu
from pipeproof.stages.paddle.recompute import source_of
from pipeproof.stages.paddle.weights import SplitWeights

Tensor: TypeAlias = paddle.Tensor
Gated: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Activation function of an MLP, of its gate and its other factor."""


class Experts:
    """The experts of one block. ``weight_of`` returns this rank's weights by name, ``gated`` is the activation."""

    def __init__(
        self,
        moe: MoeSpec,
        name: str,
        weights: SplitWeights,
        weight_of: Callable[[str], Tensor],
        region: ExpertRegion,
        gated: Gated = swiglu,
    ) -> None:
        self._moe, self._name, self._region = moe, name, region
        self._weights, self._weight_of, self._gated = weights, weight_of, gated

    def forward(self, entered: Tensor, router: RouterBalance) -> Tensor:
        """This tensor-parallel rank's addend of the output of all experts, shared ones included, from [S, B, H].

        ``router`` counts the visits and may have a bias for the choice.
        """
        shared = self._moe.num_shared_experts > 0
        to_router, to_experts, *to_shared = fork(entered, 3 if shared else 2)
        source = source_of(entered)
        if source is not None:
            source.mark(to_router, *to_shared)
        logits = self._weights.product(to_router, self._weight("router"))
        logits = router.enter(logits.reshape([-1, self._moe.num_experts]))
        chosen, gains = choose(logits, self._moe, router.bias)
        router.count(chosen)
        tokens = to_experts.reshape([-1, entered.shape[-1]])
        routed = weighted(self._visit(tokens, chosen), gains).reshape(entered.shape)
        return routed + self._shared(to_shared[0]) if shared else routed

    def _visit(self, tokens: Tensor, chosen: Indices) -> Tensor:
        """The outputs of each token's experts: tokens [N, H] and experts [N, k] to [N, k, H]."""
        region, (_, top_k) = self._region, chosen.shape
        order = np.argsort(chosen.reshape(-1), kind="stable")  # by expert, then by token
        sent = np.bincount(chosen.reshape(-1), minlength=self._moe.num_experts)
        received = region.counts(sent, f"{self._name}.counts")  # [R, E / R]
        send = sent.reshape([region.num_ranks, -1]).sum(axis=1).tolist()
        receive = received.sum(axis=1).tolist()
        arrived = region.exchange(visits(tokens, order, top_k), send, receive, f"{self._name}.dispatch")
        expert_of = np.repeat(np.tile(np.arange(received.shape[1]), len(received)), received.reshape(-1))
        by_expert = np.argsort(expert_of, kind="stable")  # then by rank, and by token
        outputs = reorder(
            self._swiglu(reorder(arrived, by_expert), received.sum(axis=0).tolist()), np.argsort(by_expert)
        )
        back = region.exchange(outputs, receive, send, f"{self._name}.combine")
        return reorder(back, np.argsort(order)).reshape([*chosen.shape, tokens.shape[-1]])

    def _swiglu(self, rows: Tensor, sizes: list[int]) -> Tensor:
        gate = self._weights.grouped(rows, self._weight("experts.gate"), sizes)
        up = self._weights.grouped(rows, self._weight("experts.up"), sizes)
        return self._weights.grouped(_apply_by_group(self._gated, gate, up, sizes), self._weight("experts.down"), sizes)

    def _shared(self, activation: Tensor) -> Tensor:
        gate = self._weights.product(activation, self._weight("shared.gate"))
        up = self._weights.product(activation, self._weight("shared.up"))
        return self._weights.product(self._gated(gate, up), self._weight("shared.down"))

    def _weight(self, part: str) -> Tensor:
        return self._weight_of(f"{self._name}.{part}.weight")


def _apply_by_group(function: Gated, a: Tensor, b: Tensor, sizes: Sequence[int]) -> Tensor:
    """Apply ``function`` to each group of rows separately."""
    rows = [size for size in sizes if size]
    if len(rows) < 2:
        return function(a, b)
    return paddle.concat([function(*parts) for parts in zip(paddle.split(a, rows), paddle.split(b, rows), strict=True)])


def choose(logits: Tensor, moe: MoeSpec, bias: npt.NDArray[Any] | None = None) -> tuple[Indices, Tensor]:
    """Choose the experts of each token, best first, and their weights: two of [N, k] from [N, E].

    Ties go to the lower expert. A ``bias`` [E] is added to the scores for the choice only. No gradient flows through
    the choice.
    """
    scores = F.softmax(logits, axis=-1) if moe.score == "softmax" else F.sigmoid(logits)
    ranked = scores.numpy() if bias is None else scores.numpy() + bias
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, : moe.top_k]
    gains = paddle.take_along_axis(scores, paddle.to_tensor(chosen), axis=-1)
    if moe.normalize:
        gains = gains / paddle.sum(gains, axis=-1, keepdim=True)
    return chosen, gains


class ExpertCollectives(Protocol):
    """Blocking collectives over the expert-parallel ranks of one stage, outside autograd."""

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str) -> Tensor:
        """Send ``send[m]`` rows, in order, to each member m; return ``receive[m]`` rows from each, joined in order."""
        ...


class ExpertRegion:
    """One rank's view of its expert-parallel group. With one rank nothing is exchanged."""

    def __init__(self, rank: int, num_ranks: int, collectives: ExpertCollectives | None) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"expert-parallel rank {rank} of {num_ranks}: must be 0 to {num_ranks - 1}")
        if num_ranks > 1 and collectives is None:
            raise ValueError(f"{num_ranks} expert-parallel ranks need collectives, got None")
        self.rank, self.num_ranks = rank, num_ranks
        self._collectives = collectives

    def counts(self, sent: Indices, label: str) -> Indices:
        """Exchange visit counts: from this rank's visits [E] to all ranks' visits to its own experts [R, E / R]."""
        each = len(sent) // self.num_ranks
        if self.num_ranks == 1:
            return sent.reshape([1, each])
        sizes = [each] * self.num_ranks
        received = self.collectives.all_to_all(paddle.to_tensor(sent), sizes, sizes, label=label)
        return np.asarray(received.numpy()).reshape([self.num_ranks, each])

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], label: str) -> Tensor:
        """Exchange rows: ``send[m]`` of them go to rank m. Their gradients come back under ``label.grad``."""
        return rows if self.num_ranks == 1 else _Exchange.apply(rows, self, tuple(send), tuple(receive), label)

    @property
    def collectives(self) -> ExpertCollectives:
        """The collectives; they are present if there is more than one rank."""
        assert self._collectives is not None
        return self._collectives


class _Exchange(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, region: ExpertRegion, send: Sequence[int], receive: Sequence[int], label: str
    ) -> Tensor:
        ctx.region, ctx.send, ctx.receive, ctx.label = region, send, receive, label
        return region.collectives.all_to_all(rows.contiguous(), send, receive, label=label)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.region.collectives.all_to_all(
            gradient.contiguous(), ctx.receive, ctx.send, label=f"{ctx.label}.grad"
        )


def reorder(rows: Tensor, order: Indices) -> Tensor:
    """Permute rows: row i of the result is row ``order[i]``."""
    return _Reorder.apply(rows, order) if len(order) else rows


def visits(tokens: Tensor, order: Indices, num_visits: int) -> Tensor:
    """Copy each token for each of its k = ``num_visits`` experts: [N, H] to [V, H], in ``order`` of [N, k] flattened.

    The gradient of a token adds those of its visits in the order of its choice.
    """
    copies = paddle.stack(fork(tokens, num_visits), axis=1)
    return reorder(copies.reshape([-1, tokens.shape[-1]]), order)


def weighted(results: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of the visits of each token: [N, k, H] and [N, k] to [N, H], in the order of its choice."""
    addends = [
        result * weight.unsqueeze(-1)
        for result, weight in zip(paddle.unbind(results, axis=1), paddle.unbind(weights, axis=1), strict=True)
    ]
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total


class _Reorder(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Indices) -> Tensor:
        ctx.order = order
        return paddle.index_select(rows, paddle.to_tensor(order), axis=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return paddle.index_select(gradient, paddle.to_tensor(np.argsort(ctx.order)), axis=0)
