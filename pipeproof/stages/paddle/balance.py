"""What keeps the experts of one stage evenly loaded, on one rank: losses of routers, and biases of the choice.

What they are is said in ``pipeproof.stages.describe.balance``. A router's
losses are computed where it is, from its outputs alone, and their gradient is
at once; the backward of the router adds it to what experts make of the
outputs. So no other stage knows of them, and a layer whose forward comes again
puts them in once.

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
from pipeproof.stages.describe.layers import Layer
from pipeproof.stages.paddle.expert_exchange import Places

Tensor: TypeAlias = paddle.Tensor
Array: TypeAlias = npt.NDArray[Any]


class Balance:
    """The routers of one stage on one rank.

    ``puts_in_losses`` is for the first of the TP ranks, which all route the same tokens.
    """

    def __init__(self, plan: PlanSpec, layers: Sequence[Layer], *, puts_in_losses: bool) -> None:
        moe = plan.model.moe
        self._moe, self._dtype = moe, plan.run.dtype
        self._weights = loss_weights(plan) if puts_in_losses else {}
        self._rate = None if moe is None else moe.expert_bias_rate
        self.biases: dict[str, Array] = {}
        """Of each router [E]; none where they do not move."""
        if moe is not None and self._rate is not None:
            self.biases = {name: np.zeros(moe.num_experts, dtype=self._dtype) for name in routers(layers)}
        self._losses: dict[str, np.floating[Any]] = {}
        self._visits: dict[str, dict[tuple[int, int], Places]] = {}
        self._loads: dict[str, Places] = {}

    def begin(self) -> None:
        """Forget the step before, but for the biases."""
        self._losses.clear()
        self._visits.clear()
        self._loads.clear()

    def of(self, experts: str, micro_batch: int, piece: int) -> RouterBalance:
        """One router's unit of work."""
        return RouterBalance(self, experts, micro_batch, piece)

    def load(self, experts: str) -> Places:
        """How many visits each expert of a router has had in the step: of this rank's tokens, unless they are set."""
        if experts not in self._loads:
            self._loads[experts] = np.sum(list(self._visits[experts].values()), axis=0, dtype=np.int64)
        return self._loads[experts]

    def set_load(self, experts: str, load: Places) -> None:
        """Put in place what was summed over ranks."""
        self._loads[experts] = load

    def move_biases(self) -> None:
        """The end of a step: each bias by the rate towards the mean load."""
        for experts, bias in self.biases.items():
            load = self.load(experts)
            bias += np.sign(load.sum() - load * len(load)).astype(self._dtype) * np.asarray(self._rate, self._dtype)

    def shown(self) -> dict[str, Array]:
        """What there is to compare of the step, by name: each loss that this rank put in, and each bias."""
        losses = {key: np.asarray(loss) for key, loss in self._losses.items()}
        return losses | {bias_key(experts): bias.copy() for experts, bias in self.biases.items()}

    def enter(self, logits: Tensor, key_of: Callable[[str], str]) -> Tensor:
        """[N, E] outputs of a router, with a backward that adds the gradient of the router's losses."""
        if not self._weights:
            return logits
        assert self._moe is not None
        own = logits.detach()
        own.stop_gradient = False
        with paddle.enable_grad():
            losses = {name: _LOSSES[name](own, self._moe) * weight for name, weight in self._weights.items()}
        self._losses |= {key_of(name): loss.numpy()[()] for name, loss in losses.items()}
        if logits.stop_gradient:  # no backward leads here: this forward will come again
            return logits
        paddle.autograd.backward(list(losses.values()))
        return _Enter.apply(logits, own.grad.detach())

    def count(self, experts: str, unit: tuple[int, int], chosen: Places) -> None:
        """Count the visits of a unit of work, once however often it is computed."""
        if experts in self.biases:
            visits = np.bincount(chosen.reshape(-1), minlength=len(self.biases[experts]))
            self._visits.setdefault(experts, {})[unit] = visits


class RouterBalance:
    """One router's unit of work: what its choice adds to scores, and what becomes of its outputs and choices."""

    def __init__(self, balance: Balance, experts: str, micro_batch: int, piece: int) -> None:
        self._balance, self._experts, self._unit = balance, experts, (micro_batch, piece)

    @property
    def bias(self) -> Array | None:
        """[E], or None where there is none."""
        return self._balance.biases.get(self._experts)

    def enter(self, logits: Tensor) -> Tensor:
        """The outputs [N, E], with a backward that adds the gradient of the losses."""
        return self._balance.enter(logits, lambda loss: loss_key(loss, self._experts, *self._unit))

    def count(self, chosen: Places) -> None:
        """Take note of the choices [N, k]."""
        self._balance.count(self._experts, self._unit, chosen)


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
