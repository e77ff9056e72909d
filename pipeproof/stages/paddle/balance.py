"""Losses of routers on Paddle, and biases and visits in numpy; see ``stages.common.balance``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.model import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.balance import Balance
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.functional import Indices

Tensor: TypeAlias = paddle.Tensor
Array: TypeAlias = npt.NDArray[Any]


class PaddleBalance(Balance):
    """A ``Balance`` that computes biases on the host."""

    def __init__(self, plan: PlanSpec, layers: Sequence[Layer], *, adds_losses: bool) -> None:
        self._dtype = plan.run.dtype
        super().__init__(OPS, plan, layers, adds_losses=adds_losses)

    def _zero_bias(self) -> Array:
        assert self._moe is not None
        return np.zeros(self._moe.num_experts, dtype=self._dtype)

    def _total(self, visits: Iterable[Indices]) -> Indices:
        total: Indices = np.sum([*visits], axis=0, dtype=np.int64)
        return total

    def _move(self, bias: Array, distance: Indices) -> None:
        bias += np.sign(distance).astype(self._dtype) * np.asarray(self._rate, self._dtype)

    def _array(self, value: Array) -> Array:
        return value.copy()

    def _losses_of(self, logits: Tensor) -> tuple[Mapping[str, Array], Tensor | None]:
        assert self._moe is not None
        leaf = OPS.leaf(logits)
        with paddle.enable_grad():
            losses = {name: _LOSSES[name](leaf, self._moe) * weight for name, weight in self._weights.items()}
        arrays = {name: loss.numpy() for name, loss in losses.items()}
        if logits.stop_gradient:
            return arrays, None
        paddle.autograd.backward(list(losses.values()))
        return arrays, leaf.grad.detach()


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
