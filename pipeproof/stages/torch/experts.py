"""Mixture of experts in place of an MLP: each token goes to the experts with its highest scores, none is dropped.

Shape letters: S sequence, B rows, H hidden, N = S B tokens, E experts, k of them for a token, V visits, M inner size;
R expert-parallel ranks, each with E / R experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.stages.torch.balance import RouterBalance
from pipeproof.stages.torch.functional import Groups, fork, swiglu
from pipeproof.stages.torch.recompute import source_of
from pipeproof.stages.torch.weights import SplitWeights, Weight

Tensor: TypeAlias = torch.Tensor
Gated: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Activation function of an MLP, of its gate and its other factor."""


class Experts:
    """The experts of one block. ``weight_of`` returns this rank's weights by name, ``gated`` is the activation."""

    def __init__(
        self,
        moe: MoeSpec,
        name: str,
        weights: SplitWeights,
        weight_of: Callable[[str], Weight],
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
        logits = router.enter(self._weights.product(to_router, self._weight("router")).flatten(0, -2))
        chosen, gains = choose(logits, self._moe, router.bias)
        visited = self._visit(to_experts.flatten(0, -2), chosen, router)
        routed = (visited * gains.unsqueeze(-1)).sum(dim=1).reshape(entered.shape)
        return routed + self._shared(to_shared[0]) if shared else routed

    def _visit(self, tokens: Tensor, chosen: Tensor, router: RouterBalance) -> Tensor:
        """The outputs of each token's experts: tokens [N, H] and experts [N, k] to [N, k, H].

        The order of rows stays on the device. With several expert-parallel ranks the host reads the numbers of rows to
        and from each rank. With one rank it reads nothing, except for types without a grouped product.
        """
        flat = chosen.flatten()
        order = flat.argsort(stable=True)  # by expert, then by token
        back = inverse(order)
        counts = torch.zeros(self._moe.num_experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))  # bincount would make the host wait
        router.count(counts)
        rows = visits(tokens, order, back)
        is_local = self._region.num_ranks == 1
        outputs = self._swiglu(rows, Groups(counts)) if is_local else self._exchanged(rows, counts)
        return reorder(outputs, back, order).reshape(*chosen.shape, tokens.shape[-1])

    def _exchanged(self, rows: Tensor, sent: Tensor) -> Tensor:
        """Run rows through the experts of all ranks. Rows are ordered by expert; ``sent`` [E] counts them."""
        region = self._region
        received = region.counts(sent, f"{self._name}.counts")  # [R, E / R]
        send, receive = torch.stack([sent.reshape(region.num_ranks, -1).sum(1), received.sum(1)]).tolist()
        arrived = region.exchange(rows, send, receive, f"{self._name}.dispatch")
        experts = torch.arange(received.shape[1], device=sent.device).repeat(len(received))
        by_expert = experts.repeat_interleave(received.flatten(), output_size=sum(receive)).argsort(stable=True)
        by_rank = inverse(by_expert)  # rows arrive by rank; by expert, they are ordered by rank, then by token
        outputs = self._swiglu(reorder(arrived, by_expert, by_rank), Groups(received.sum(0)))
        return region.exchange(reorder(outputs, by_rank, by_expert), receive, send, f"{self._name}.combine")

    def _swiglu(self, rows: Tensor, groups: Groups) -> Tensor:
        gate = self._weights.grouped(rows, self._weight("experts.gate"), groups)
        up = self._weights.grouped(rows, self._weight("experts.up"), groups)
        return self._weights.grouped(self._gated(gate, up), self._weight("experts.down"), groups)

    def _shared(self, activation: Tensor) -> Tensor:
        gate = self._weights.product(activation, self._weight("shared.gate"))
        up = self._weights.product(activation, self._weight("shared.up"))
        return self._weights.product(self._gated(gate, up), self._weight("shared.down"))

    def _weight(self, part: str) -> Weight:
        return self._weight_of(f"{self._name}.{part}.weight")


def choose(logits: Tensor, moe: MoeSpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, best first, and their weights: two of [N, k] from [N, E].

    Ties go to the lower expert. A ``bias`` [E] is added to the scores for the choice only. No gradient flows through
    the choice.
    """
    scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
    ranked = scores.detach() if bias is None else scores.detach() + bias
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : moe.top_k]
    gains = scores.gather(-1, chosen)
    if moe.normalize:
        gains = gains / gains.sum(-1, keepdim=True)
    return chosen, gains


class ExpertCollectives(Protocol):
    """Collectives over the expert-parallel ranks of one stage, outside autograd."""

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

    def counts(self, sent: Tensor, label: str) -> Tensor:
        """Exchange visit counts: from this rank's visits [E] to all ranks' visits to its own experts [R, E / R]."""
        each = len(sent) // self.num_ranks
        if self.num_ranks == 1:
            return sent.reshape(1, each)
        sizes = [each] * self.num_ranks
        return self.collectives.all_to_all(sent, sizes, sizes, label=label).reshape(self.num_ranks, each)

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], label: str) -> Tensor:
        """Exchange rows: ``send[m]`` of them go to rank m. Their gradients come back under ``label.grad``."""
        return rows if self.num_ranks == 1 else _Exchange.apply(rows, self, tuple(send), tuple(receive), label)

    @property
    def collectives(self) -> ExpertCollectives:
        """The collectives; they are present if there is more than one rank."""
        assert self._collectives is not None
        return self._collectives


class _Exchange(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, region: ExpertRegion, send: Sequence[int], receive: Sequence[int], label: str
    ) -> Tensor:
        ctx.region, ctx.send, ctx.receive, ctx.label = region, send, receive, label
        return region.collectives.all_to_all(rows.contiguous(), send, receive, label=label)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        back = ctx.region.collectives.all_to_all(
            gradient.contiguous(), ctx.receive, ctx.send, label=f"{ctx.label}.grad"
        )
        return back, None, None, None, None


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation of rows."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def visits(tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Copy each token for each of its experts: [N, H] to [V, H]. Row i belongs to visit ``order[i]``.

    Visit v is one of token ``v // k``; ``back`` is the inverse of ``order``. A token's gradient is the sum over its
    experts.
    """
    return _Visits.apply(tokens, order, back)


class _Visits(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_tokens = len(tokens)
        return tokens.index_select(0, order // (len(order) // len(tokens)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (back,) = ctx.saved_tensors
        by_token = gradient.index_select(0, back).unflatten(0, (ctx.num_tokens, -1))
        return by_token.sum(1), None, None


def reorder(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Permute rows: row i of the result is row ``order[i]``; ``back`` is the inverse of ``order``."""
    return _Reorder.apply(rows, order, back)


class _Reorder(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """A move without addition: backward is also a move, not a sum over indices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None
