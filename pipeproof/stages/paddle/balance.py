"""Load balance of the experts of one stage, on one rank: router losses, and biases of the expert choice.

``pipeproof.stages.describe.balance`` defines them. A router's losses depend on its outputs alone. Forward computes
them and their gradient at once; the backward of the router adds this gradient to the one from the experts. So no other
stage has to know about them, and a layer with a recomputed forward adds them once.

Shape letters: N tokens, E experts, k of them for a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from pipeproof.specs.model_parts import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.balance import bias_key, loss_key, loss_weights, routers
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.paddle.functional import Indices

Tensor: TypeAlias = paddle.Tensor
Array: TypeAlias = npt.NDArray[Any]


class Balance:
    """The routers of one stage on one rank.

    ``adds_losses`` is true on the first TP rank only, because all TP ranks route the same tokens.
    """

    def __init__(self, plan: PlanSpec, layers: Sequence[Layer], *, adds_losses: bool) -> None:
        moe = plan.model.moe
        self._moe, self._dtype = moe, plan.run.dtype
        self._weights = loss_weights(plan) if adds_losses else {}
        self._rate = None if moe is None else moe.expert_bias_rate
        self.biases: dict[str, Array] = {}
        """Bias of each router, [E]; empty if the plan has no biases."""
        if moe is not None and self._rate is not None:
            self.biases = {name: np.zeros(moe.num_experts, dtype=self._dtype) for name in routers(layers)}
        self._losses: dict[str, np.floating[Any]] = {}
        self._visits: dict[str, dict[tuple[int, int], Indices]] = {}
        self._loads: dict[str, Indices] = {}

    def begin(self) -> None:
        """Reset everything but the biases."""
        self._losses.clear()
        self._visits.clear()
        self._loads.clear()

    def of(self, experts: str, micro_batch: int, split: int) -> RouterBalance:
        """The view of one router and work item."""
        return RouterBalance(self, experts, micro_batch, split)

    def load(self, experts: str) -> Indices:
        """Visits to each expert of a router in this step: by this rank's tokens, unless ``set_load`` was called."""
        if experts not in self._loads:
            self._loads[experts] = np.sum(list(self._visits[experts].values()), axis=0, dtype=np.int64)
        return self._loads[experts]

    def set_load(self, experts: str, load: Indices) -> None:
        """Set the visits, summed over ranks."""
        self._loads[experts] = load

    def move_biases(self) -> None:
        """End the step: move each bias by the rate towards the mean load."""
        for experts, bias in self.biases.items():
            load = self.load(experts)
            bias += np.sign(load.sum() - load * len(load)).astype(self._dtype) * np.asarray(self._rate, self._dtype)

    def values(self) -> dict[str, Array]:
        """The results of the step, by name: each loss that this rank added, and each bias."""
        losses = {key: np.asarray(loss) for key, loss in self._losses.items()}
        return losses | {bias_key(experts): bias.copy() for experts, bias in self.biases.items()}

    def enter(self, logits: Tensor, key_of: Callable[[str], str]) -> Tensor:
        """Return a router's outputs [N, E] with a backward that adds the gradient of the router's losses."""
        if not self._weights:
            return logits
        assert self._moe is not None
        leaf = logits.detach()
        leaf.stop_gradient = False
        with paddle.enable_grad():
            losses = {name: _LOSSES[name](leaf, self._moe) * weight for name, weight in self._weights.items()}
        self._losses |= {key_of(name): loss.numpy()[()] for name, loss in losses.items()}
        if logits.stop_gradient:  # autograd is off: this forward will be recomputed
            return logits
        paddle.autograd.backward(list(losses.values()))
        return _Enter.apply(logits, leaf.grad.detach())

    def count(self, experts: str, work_item: tuple[int, int], chosen: Indices) -> None:
        """Store the visits of a work item. A recomputation does not count twice."""
        if experts in self.biases:
            visits = np.bincount(chosen.reshape(-1), minlength=len(self.biases[experts]))
            self._visits.setdefault(experts, {})[work_item] = visits


class RouterBalance:
    """Balance of one router for one work item."""

    def __init__(self, balance: Balance, experts: str, micro_batch: int, split: int) -> None:
        self._balance, self._experts, self._work_item = balance, experts, (micro_batch, split)

    @property
    def bias(self) -> Array | None:
        """The bias [E], None without biases."""
        return self._balance.biases.get(self._experts)

    def enter(self, logits: Tensor) -> Tensor:
        """Return the outputs [N, E] with a backward that adds the gradient of the losses."""
        return self._balance.enter(logits, lambda loss: loss_key(loss, self._experts, *self._work_item))

    def count(self, chosen: Indices) -> None:
        """Count the chosen experts [N, k]."""
        self._balance.count(self._experts, self._work_item, chosen)


def _even_loads(logits: Tensor, moe: MoeSpec) -> Tensor:
    if moe.score == "softmax":
        scores = parts = F.softmax(logits, axis=-1)
    else:
        scores = F.sigmoid(logits)
        parts = scores / paddle.sum(scores, axis=-1, keepdim=True)
    largest = np.argsort(-scores.numpy(), axis=-1, kind="stable")[:, : moe.top_k]
    loads = np.bincount(largest.reshape(-1), minlength=moe.num_experts) * moe.num_experts / largest.size
    return paddle.sum(paddle.mean(parts, axis=0) * paddle.to_tensor(loads, dtype=logits.dtype))


def _small_outputs(logits: Tensor, moe: MoeSpec) -> Tensor:
    return paddle.mean(paddle.square(paddle.logsumexp(logits, axis=-1)))


_LOSSES: Mapping[str, Callable[[Tensor, MoeSpec], Tensor]] = {"aux": _even_loads, "z": _small_outputs}


class _Enter(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    @staticmethod
    def forward(ctx: Any, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + ctx.gradient
