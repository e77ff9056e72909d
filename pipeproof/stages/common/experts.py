"""Mixture of experts in place of an MLP, and its routers: a token goes to the experts with its highest scores.

The experts of ``stages.paddle`` and ``stages.torch`` choose, and order rows, on the host and on the device. In both the
rows of an expert's products are its tokens, by the expert-parallel rank that they come from, then by their position in
that rank's micro-batch. Gradients move back as their tokens moved. With ``dispatcher: all_gather`` an expert has the
same rows in the same order, and the sum over a token's experts is a sum over ranks of sums.

Shape letters: S sequence, B rows, H hidden, N = S B tokens, E experts, k of them for a token, V visits, M inner size;
R expert-parallel ranks, each with E / R experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pipeproof.specs.model import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.backend_ops import BackendOps, Tensor, Weight
from pipeproof.stages.common.weights import SplitWeights, mark, source_of
from pipeproof.stages.describe.gradient_facts import bias_key, hash_routers, loss_key, loss_weights, routers
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.describe.synthetic import hash_tables

Gated: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Activation function of an MLP, of its gate and its other factor."""
Used = TypeVar("Used")
"""Result of a caller's function of the counts that it received."""
Indices: TypeAlias = Any
"""Integers where the framework's experts count and order: an array on the host, or a tensor on the device."""


class ExpertCollectives(Protocol):
    """Collectives over the expert-parallel ranks of one stage, outside autograd. With Paddle they block."""

    def all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], *, label: str) -> Tensor:
        """Send ``send[m]`` rows, in order, to each member m; return ``receive[m]`` rows from each, joined in order."""

    def announce(
        self, counts: Tensor, sizes: Sequence[int], use: Callable[[Tensor], Used], *, label: str
    ) -> Callable[[], Used]:
        """Exchange counts, ``sizes[m]`` with each member m; return a function that returns ``use`` of the result.

        In an overlapped pair that function runs the other computation first; otherwise ``use`` has been called before
        the return. Everything that the next collective sends must have been launched when the function is called.
        """

    def all_gather_each(self, tensors: Sequence[Tensor], *, labels: Sequence[str], axis: str) -> Sequence[Tensor]:
        """Return all members' parts of each tensor, joined along dim 0. All are issued before the first is needed."""

    def reduce_scatter_each(self, tensors: Sequence[Tensor], *, labels: Sequence[str], axis: str) -> Sequence[Tensor]:
        """Return this member's part along dim 0 of the sum of each tensor over all members; all are issued first."""


class ExpertRegion:
    """One rank's view of the ranks that experts are distributed over. With one rank nothing is exchanged.

    Nor is it if ``shares_tokens``: all ranks have the same tokens, and the caller adds their results.
    """

    def __init__(
        self,
        ops: BackendOps,
        rank: int,
        num_ranks: int,
        collectives: ExpertCollectives | None,
        *,
        shares_tokens: bool = False,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"expert-parallel rank {rank} of {num_ranks}: must be 0 to {num_ranks - 1}")
        if num_ranks > 1 and collectives is None and not shares_tokens:
            raise ValueError(f"{num_ranks} expert-parallel ranks need collectives, got None")
        self.shares_tokens = shares_tokens
        self.ops, self.rank, self.num_ranks = ops, rank, num_ranks
        self._collectives = collectives

    def counts(self, sent: Tensor, label: str) -> Tensor:
        """Exchange visit counts: from this rank's visits [E] to all ranks' visits to its own experts [R, E / R]."""
        sizes = self._sizes(sent)
        received = sent if self.num_ranks == 1 else self._all_to_all(sent, sizes, sizes, label)
        return received.reshape([self.num_ranks, -1])

    def announce(self, sent: Tensor, label: str, use: Callable[[Tensor], Used]) -> Callable[[], Used]:
        """Exchange counts as ``counts`` does between several ranks, see ``ExpertCollectives.announce``."""
        assert self._collectives is not None
        return self._collectives.announce(
            sent, self._sizes(sent), lambda received: use(received.reshape([self.num_ranks, -1])), label=label
        )

    def _sizes(self, sent: Tensor) -> list[int]:
        return [sent.shape[0] // self.num_ranks] * self.num_ranks

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int], label: str) -> Tensor:
        """Exchange rows: ``send[m]`` of them go to rank m. Their gradients come back under ``label.grad``."""
        if self.num_ranks == 1:
            return rows
        (arrived,) = self.ops.autograd_node(
            lambda own: (self._all_to_all(own.contiguous(), send, receive, label),),
            lambda gradient: (self._all_to_all(gradient.contiguous(), receive, send, f"{label}.grad"),),
            rows,
        )
        return arrived

    def gather(self, logits: Tensor, tokens: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Return the router outputs [R N, E] and the tokens [R N, H] of all ranks; their gradients are summed back."""

        def forward(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            route, of_all = self._gathered([logits, tokens], [f"{name}.route", f"{name}.tokens"])
            return route, of_all

        def backward(of_logits: Tensor, of_tokens: Tensor) -> tuple[Tensor, Tensor]:
            labels = [f"{name}.tokens.grad", f"{name}.route.grad"]  # in this order, as in the graph
            of_own_tokens, of_own_logits = self._summed([of_tokens, of_logits], labels)
            return of_own_logits, of_own_tokens

        logits, tokens = self.ops.autograd_node(forward, backward, logits, tokens)
        return logits, tokens

    def sum_results(self, addends: Tensor, name: str) -> Tensor:
        """Return this rank's rows [N, H] of the sum of all ranks' addends [R N, H]."""
        (results,) = self.ops.autograd_node(
            lambda own: self._summed([own], [f"{name}.sum"]),
            lambda gradient: self._gathered([gradient], [f"{name}.sum.grad"]),
            addends,
        )
        return results

    def _gathered(self, tensors: Sequence[Tensor], labels: Sequence[str]) -> Sequence[Tensor]:
        assert self._collectives is not None
        return self._collectives.all_gather_each([each.contiguous() for each in tensors], labels=labels, axis="ep")

    def _summed(self, tensors: Sequence[Tensor], labels: Sequence[str]) -> Sequence[Tensor]:
        assert self._collectives is not None
        return self._collectives.reduce_scatter_each([each.contiguous() for each in tensors], labels=labels, axis="ep")

    def _all_to_all(self, tensor: Tensor, send: Sequence[int], receive: Sequence[int], label: str) -> Tensor:
        assert self._collectives is not None
        return self._collectives.all_to_all(tensor, send, receive, label=label)


def expert_region(
    ops: BackendOps, plan: PlanSpec, tp_rank: int, ep_rank: int, collectives: ExpertCollectives | None
) -> ExpertRegion:
    """The ranks that the plan distributes experts over: EP ranks, or TP ranks, which have the same tokens."""
    topology = plan.topology
    if topology.experts_over_tp:
        return ExpertRegion(ops, tp_rank, topology.tp, None, shares_tokens=True)
    return ExpertRegion(ops, ep_rank, topology.ep, collectives)


class Experts(ABC):
    """The experts of one block.

    ``weight_of`` returns this rank's weights by name, ``gated`` is the activation. With ``recomputes_shared`` backward
    computes shared experts again.
    """

    def __init__(
        self,
        moe: MoeSpec,
        name: str,
        weights: SplitWeights,
        weight_of: Callable[[str], Weight],
        region: ExpertRegion,
        gated: Gated,
        *,
        recomputes_shared: bool,
    ) -> None:
        self._moe, self._name, self._region = moe, name, region
        self._weights, self._weight_of, self._gated = weights, weight_of, gated
        self._recomputes_shared = recomputes_shared

    def forward(self, entered: Tensor, router: RouterBalance) -> Tensor:
        """This tensor-parallel rank's addend of the output of all experts, shared ones included, from [S, B, H].

        ``router`` counts the visits and may have a bias for the choice.
        """
        shared = self._moe.num_shared_experts > 0
        to_router, to_experts, *to_shared = self._region.ops.fork(entered, 3 if shared else 2)
        source = source_of(entered)
        if source is not None:
            mark(source, to_router, *to_shared)
        weight = self._weight("router" if router.fixed is None else "hash_router")
        logits = self._weights.product(to_router, weight, dtype=self._moe.router_dtype)
        logits = router.enter(logits.reshape([-1, self._moe.num_experts]))
        tokens = to_experts.reshape([-1, entered.shape[-1]])
        routes = self._visited
        if self._region.num_ranks > 1:
            gathered = self._gathered if self._moe.dispatcher == "all_gather" else self._visited
            routes = self._kept if self._region.shares_tokens else gathered
        routed = routes(logits, tokens, router).reshape(entered.shape)
        if not shared:
            return routed
        again = self._region.ops.recompute_in_backward
        return routed + (again(self._shared, *to_shared) if self._recomputes_shared else self._shared(*to_shared))

    def _visited(self, logits: Tensor, tokens: Tensor, router: RouterBalance) -> Tensor:
        """Send tokens [N, H] to their experts and back."""
        chosen, gains = self._choose(logits, self._moe, router.bias, router.fixed)
        counts = self._counts(chosen)
        router.count(counts)
        return self._weighted(self._visit(tokens, chosen, counts), gains)

    def _gathered(self, logits: Tensor, tokens: Tensor, router: RouterBalance) -> Tensor:
        """Run the tokens of all ranks through this rank's experts, and add the ranks' results for its own [N, H]."""
        rank, (num_tokens, _) = self._region.rank, tokens.shape
        logits, tokens = self._region.gather(logits, tokens, self._name)
        chosen, gains = self._choose(logits, self._moe, router.bias)
        router.count(self._counts(chosen[rank * num_tokens : (rank + 1) * num_tokens]))
        return self._region.sum_results(self._visit_own(tokens, chosen, gains), self._name)

    def _kept(self, logits: Tensor, tokens: Tensor, router: RouterBalance) -> Tensor:
        """Run the tokens [N, H], which all ranks have, through this rank's experts."""
        chosen, gains = self._choose(logits, self._moe, router.bias, router.fixed)
        router.count(self._counts(chosen))
        return self._visit_own(tokens, chosen, gains)

    @property
    def _own_experts(self) -> range:
        num_own = self._moe.num_experts // self._region.num_ranks
        return range(self._region.rank * num_own, (self._region.rank + 1) * num_own)

    def _swiglu(self, rows: Tensor, groups: Any) -> Tensor:
        """Run rows through this rank's experts; ``groups`` has the number of rows of each."""
        gate = self._weights.grouped(rows, self._weight("experts.gate"), groups)
        up = self._weights.grouped(rows, self._weight("experts.up"), groups)
        return self._weights.grouped(self._activation(gate, up, groups), self._weight("experts.down"), groups)

    def _shared(self, activation: Tensor) -> Tensor:
        gate = self._weights.product(activation, self._weight("shared.gate"))
        up = self._weights.product(activation, self._weight("shared.up"))
        return self._weights.product(self._gated(gate, up), self._weight("shared.down"))

    def _weight(self, part: str) -> Weight:
        return self._weight_of(f"{self._name}.{part}.weight")

    # Each framework implements these.

    @staticmethod
    @abstractmethod
    def _choose(
        logits: Tensor, moe: MoeSpec, bias: Indices | None = None, fixed: Indices | None = None
    ) -> tuple[Indices, Tensor]:
        """Choose the experts of each token, in the order of ``combine``, and their weights: two of [N, k] from [N, E].

        Ties go to the lower expert. A ``bias`` [E] is added to the scores for the choice only. No gradient flows
        through the choice. ``fixed`` experts [N, k] are not chosen; scores give only their weights.
        """

    @abstractmethod
    def _counts(self, chosen: Indices) -> Indices:
        """Number of visits to each expert [E]."""

    @abstractmethod
    def _visit(self, tokens: Tensor, chosen: Indices, counts: Indices) -> Tensor:
        """The outputs of each token's experts: tokens [N, H] and experts [N, k] to [N, k, H]."""

    @abstractmethod
    def _visit_own(self, tokens: Tensor, chosen: Indices, gains: Tensor) -> Tensor:
        """The weighted sum of the outputs of ``_own_experts`` for tokens [N, H], experts and weights [N, k]: [N, H]."""

    @abstractmethod
    def _weighted(self, results: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the visits of each token: [N, k, H] and [N, k] to [N, H]."""

    @abstractmethod
    def _activation(self, gate: Tensor, up: Tensor, groups: Any) -> Tensor:
        """The activation function of grouped rows."""


def reorder(ops: BackendOps, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Permute rows: row i of the result is row ``order[i]``; ``back`` is the inverse of ``order``.

    A move without addition: backward is also a move, not a sum over indices.
    """
    (moved,) = ops.autograd_node(
        lambda own: (ops.take_rows(own, order),), lambda gradient: (ops.take_rows(gradient, back),), rows
    )
    return moved


Held: TypeAlias = Any
"""Losses, biases and visits as a framework keeps them: arrays on the host, or tensors on the device."""


class Balance(ABC):
    """The routers of one stage on one rank: their losses, and biases of the choice of experts.

    ``stages.describe.gradient_facts`` defines them. A router's losses depend on its outputs alone. Forward computes
    them and their gradient at once; the backward of the router adds this gradient to the one from the experts. So no
    other stage has to know about them, and a layer with a recomputed forward adds them once.

    ``adds_losses`` is true on the first TP rank only, because all TP ranks route the same tokens.
    """

    def __init__(self, ops: BackendOps, plan: PlanSpec, layers: Sequence[Layer], *, adds_losses: bool) -> None:
        self._ops, self._moe = ops, plan.model.moe
        self._weights = loss_weights(plan) if adds_losses else {}
        self._rate = None if self._moe is None else self._moe.expert_bias_rate
        names = () if self._rate is None else routers(layers)
        self.biases: dict[str, Held] = {name: self._zero_bias() for name in names}
        """Bias of each router, [E]; empty if the plan has no biases."""
        tables = hash_tables(plan, hash_routers(layers))
        self._tables = {name: self._table(table) for name, table in tables.items()}
        self._losses: dict[str, Held] = {}
        self._visits: dict[str, dict[tuple[int, int], Held]] = {}
        self._loads: dict[str, Held] = {}

    def begin(self) -> None:
        """Reset everything except the biases."""
        self._losses.clear()
        self._visits.clear()
        self._loads.clear()

    def of(self, experts: str, micro_batch: int, split: int, token_ids: Tensor | None = None) -> RouterBalance:
        """The view of one router and work item, whose tokens have these ids; only tables need them."""
        fixed = self._rows(self._tables[experts], token_ids) if experts in self._tables else None
        return RouterBalance(self, experts, micro_batch, split, fixed)

    def biased(self) -> Sequence[str]:
        """The experts whose routers have a bias that moves."""
        return list(self.biases)

    def load(self, experts: str) -> Held:
        """Visits to each expert of a router in this step, int64 [E]: this rank's, unless ``set_load`` was called."""
        if experts not in self._loads:
            self._loads[experts] = self._total(self._visits[experts].values())
        return self._loads[experts]

    def set_load(self, experts: str, load: Held) -> None:
        """Set the visits, summed over ranks."""
        self._loads[experts] = load

    def move_biases(self) -> None:
        """End the step: move each bias by the rate towards the mean load."""
        for experts, bias in self.biases.items():
            load = self.load(experts)
            self._move(bias, load.sum() - load * len(load))

    def values(self) -> dict[str, npt.NDArray[Any]]:
        """The results of the step, by name: each loss that this rank added, and each bias."""
        biases = {bias_key(experts): bias for experts, bias in self.biases.items()}
        return {key: self._array(value) for key, value in (self._losses | biases).items()}

    def enter(self, logits: Tensor, key_of: Callable[[str], str]) -> Tensor:
        """Return a router's outputs [N, E] with a backward that adds the gradient of the router's losses."""
        if not self._weights:
            return logits
        losses, of_losses = self._losses_of(logits)
        self._losses |= {key_of(name): loss for name, loss in losses.items()}
        if of_losses is None:
            return logits
        (entered,) = self._ops.autograd_node(
            lambda x: (self._ops.alias(x),), lambda gradient: (gradient + of_losses,), logits
        )
        return entered

    def count(self, experts: str, work_item: tuple[int, int], visits: Held) -> None:
        """Store the visits [E] of a work item. A recomputation does not count twice."""
        if experts in self.biases:
            self._visits.setdefault(experts, {})[work_item] = visits

    # Each framework implements these.

    @abstractmethod
    def _table(self, table: npt.NDArray[np.int64]) -> Held:
        """A table of experts by token id, [V, k]."""

    @abstractmethod
    def _rows(self, table: Held, token_ids: Tensor) -> Indices:
        """The experts of tokens, [N, k]."""

    @abstractmethod
    def _zero_bias(self) -> Held:
        """A bias of zeros, [E]."""

    @abstractmethod
    def _total(self, visits: Iterable[Held]) -> Held:
        """The sum of the visits of all work items, int64 [E]."""

    @abstractmethod
    def _move(self, bias: Held, distance: Held) -> None:
        """Add the rate with the sign of each ``distance`` to a bias, in place."""

    @abstractmethod
    def _array(self, value: Held) -> npt.NDArray[Any]:
        """A copy of a loss or a bias on the host."""

    @abstractmethod
    def _losses_of(self, logits: Tensor) -> tuple[Mapping[str, Held], Tensor | None]:
        """The weighted losses of a router by name, and their gradient.

        The gradient is None if autograd is off: this forward will be recomputed.
        """


class RouterBalance:
    """Balance of one router for one work item. ``fixed`` are the experts of its tokens, [N, k], if a table has them."""

    def __init__(self, balance: Balance, experts: str, micro_batch: int, split: int, fixed: Indices | None) -> None:
        self._balance, self._experts, self._work_item = balance, experts, (micro_batch, split)
        self.fixed = fixed

    @property
    def bias(self) -> Held | None:
        """The bias [E], None without biases."""
        return self._balance.biases.get(self._experts)

    def enter(self, logits: Tensor) -> Tensor:
        """Return the outputs [N, E] with a backward that adds the gradient of the losses."""
        if self.fixed is not None:
            return logits
        return self._balance.enter(logits, lambda loss: loss_key(loss, self._experts, *self._work_item))

    def count(self, visits: Held) -> None:
        """Store the visits to each expert [E]."""
        self._balance.count(self._experts, self._work_item, visits)
