"""Load balance of the experts of one stage, on one rank: router losses, and biases of the expert choice.

``stages.describe.gradient_facts`` defines them. A router's losses depend on its outputs alone. Forward computes
them and their gradient at once; the backward of the router adds this gradient to the one from the experts. So no other
stage has to know about them, and a layer with a recomputed forward adds them once.

Shape letters: N tokens, E experts, k of them for a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.backend_ops import BackendOps, Tensor
from pipeproof.stages.describe.gradient_facts import bias_key, loss_key, loss_weights, routers
from pipeproof.stages.describe.layer import Layer

Held: TypeAlias = Any
"""Losses, biases and visits as a framework keeps them: arrays on the host, or tensors on the device."""


class Balance(ABC):
    """The routers of one stage on one rank.

    ``adds_losses`` is true on the first TP rank only, because all TP ranks route the same tokens.
    """

    def __init__(self, ops: BackendOps, plan: PlanSpec, layers: Sequence[Layer], *, adds_losses: bool) -> None:
        self._ops, self._moe = ops, plan.model.moe
        self._weights = loss_weights(plan) if adds_losses else {}
        self._rate = None if self._moe is None else self._moe.expert_bias_rate
        names = () if self._rate is None else routers(layers)
        self.biases: dict[str, Held] = {name: self._zero_bias() for name in names}
        """Bias of each router, [E]; empty if the plan has no biases."""
        self._losses: dict[str, Held] = {}
        self._visits: dict[str, dict[tuple[int, int], Held]] = {}
        self._loads: dict[str, Held] = {}

    @property
    def has_values(self) -> bool:
        """True if a router that the stage may have has losses or a bias."""
        return bool(self._weights) or self._rate is not None

    def begin(self) -> None:
        """Reset everything but the biases."""
        self._losses.clear()
        self._visits.clear()
        self._loads.clear()

    def of(self, experts: str, micro_batch: int, split: int) -> RouterBalance:
        """The view of one router and work item."""
        return RouterBalance(self, experts, micro_batch, split)

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
    """Balance of one router for one work item."""

    def __init__(self, balance: Balance, experts: str, micro_batch: int, split: int) -> None:
        self._balance, self._experts, self._work_item = balance, experts, (micro_batch, split)

    @property
    def bias(self) -> Held | None:
        """The bias [E], None without biases."""
        return self._balance.biases.get(self._experts)

    def enter(self, logits: Tensor) -> Tensor:
        """Return the outputs [N, E] with a backward that adds the gradient of the losses."""
        return self._balance.enter(logits, lambda loss: loss_key(loss, self._experts, *self._work_item))

    def count(self, visits: Held) -> None:
        """Store the visits to each expert [E]."""
        self._balance.count(self._experts, self._work_item, visits)
