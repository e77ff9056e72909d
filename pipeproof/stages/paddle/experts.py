"""Experts and routers on Paddle. Choices, the order of rows, losses, biases and visits are on the host.

The number of rows changes the bits of a product, and of functions with vector instructions, so an expert computes all
its tokens at once, and no others. The visits of a token are added in the order of its choice of experts, or of their
numbers (``combine``).

Shape letters: as in ``stages.common.experts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.model import MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common import experts as common
from pipeproof.stages.common.experts import Balance
from pipeproof.stages.describe.layer import Layer
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.functional import Indices, fork

Tensor: TypeAlias = paddle.Tensor


def choose(
    logits: Tensor, moe: MoeSpec, bias: npt.NDArray[Any] | None = None, fixed: Indices | None = None
) -> tuple[Indices, Tensor]:
    """Implement ``Experts``' choice of experts and their weights."""
    scores = _SCORES[moe.score](logits)
    ranked = scores.numpy() if bias is None else scores.numpy() + bias
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, : moe.top_k] if fixed is None else fixed
    gains = paddle.take_along_axis(scores, paddle.to_tensor(chosen), axis=-1)
    if moe.normalize:
        gains = gains / paddle.sum(gains, axis=-1, keepdim=True)
    if moe.combine == "expert":
        order = np.argsort(chosen, axis=-1, kind="stable")
        chosen = np.take_along_axis(chosen, order, axis=-1)
        gains = paddle.take_along_axis(gains, paddle.to_tensor(order), axis=-1)
    return chosen, gains if moe.routed_scale == 1.0 else gains * moe.routed_scale


_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: F.softmax(logits, axis=-1),
    "sigmoid": F.sigmoid,
    "sqrtsoftplus": lambda logits: paddle.sqrt(F.softplus(logits)),
}


def reorder(rows: Tensor, order: Indices) -> Tensor:
    """Permute rows: row i of the result is row ``order[i]``."""
    indices = (paddle.to_tensor(places) for places in (order, np.argsort(order)))
    return common.reorder(OPS, rows, *indices) if len(order) else rows


def visits(tokens: Tensor, order: Indices, num_visits: int) -> Tensor:
    """Copy each token for each of its k = ``num_visits`` experts: [N, H] to [V, H], in ``order`` of [N, k] flattened.

    The gradient of a token adds the gradients of its visits in the same order.
    """
    copies = paddle.stack(fork(tokens, num_visits), axis=1)
    return reorder(copies.reshape([-1, tokens.shape[-1]]), order)


def _selected(rows: Tensor, order: Indices) -> Tensor:
    """Row ``order[i]`` as row i. Rows that are left out have a gradient of zero."""
    num_rows = len(rows)
    (selected,) = OPS.autograd_node(
        lambda own: (_take(own, order),), lambda gradient: (_spread(gradient, order, num_rows),), rows
    )
    return selected


def _placed(rows: Tensor, order: Indices, num_rows: int) -> Tensor:
    """Row i as row ``order[i]`` of ``num_rows``; the others are zero. The adjoint of ``_selected``."""
    (placed,) = OPS.autograd_node(
        lambda own: (_spread(own, order, num_rows),), lambda gradient: (_take(gradient, order),), rows
    )
    return placed


def _take(rows: Tensor, order: Indices) -> Tensor:
    return OPS.take_rows(rows, paddle.to_tensor(order)) if len(order) else rows[:0]


def _spread(rows: Tensor, order: Indices, num_rows: int) -> Tensor:
    source = np.full(num_rows, len(order))  # the row of zeros behind the others
    source[order] = np.arange(len(order))
    with_zeros = paddle.concat([rows, paddle.zeros([1, rows.shape[-1]], dtype=rows.dtype)])
    return OPS.take_rows(with_zeros, paddle.to_tensor(source))


def weighted(results: Tensor, weights: Tensor) -> Tensor:
    """Implement ``Experts``' weighted sum, in the order of the visits."""
    addends = [
        result.astype(weight.dtype) * weight.unsqueeze(-1)
        for result, weight in zip(paddle.unbind(results, axis=1), paddle.unbind(weights, axis=1), strict=True)
    ]
    total = addends[0]
    for addend in addends[1:]:
        total = total + addend
    return total.astype(results.dtype)


class PaddleExperts(common.Experts):
    """Experts that sort and count visits in numpy."""

    _choose = staticmethod(choose)

    def _weighted(self, results: Tensor, weights: Tensor) -> Tensor:
        return weighted(results, weights)

    def _counts(self, chosen: Indices) -> Indices:
        return np.bincount(chosen.reshape(-1), minlength=self._moe.num_experts)

    def _visit(self, tokens: Tensor, chosen: Indices, counts: Indices) -> Tensor:
        region, (_, top_k) = self._region, chosen.shape
        order = np.argsort(chosen.reshape(-1), kind="stable")  # by expert, then by token
        received = np.asarray(region.counts(paddle.to_tensor(counts), f"{self._name}.counts").numpy())  # [R, E / R]
        send = counts.reshape([region.num_ranks, -1]).sum(axis=1).tolist()
        receive = received.sum(axis=1).tolist()
        arrived = region.exchange(visits(tokens, order, top_k), send, receive, f"{self._name}.dispatch")
        expert_of = np.repeat(np.tile(np.arange(received.shape[1]), len(received)), received.reshape(-1))
        by_expert = np.argsort(expert_of, kind="stable")  # then by rank, and by token
        sizes = received.sum(axis=0).tolist()
        outputs = reorder(self._swiglu(reorder(arrived, by_expert), sizes), np.argsort(by_expert))
        back = region.exchange(outputs, receive, send, f"{self._name}.combine")
        return reorder(back, np.argsort(order)).reshape([*chosen.shape, tokens.shape[-1]])

    def _visit_own(self, tokens: Tensor, chosen: Indices, gains: Tensor) -> Tensor:
        own, (_, top_k) = self._own_experts, chosen.shape
        experts = chosen.reshape(-1) - own.start
        is_own = (experts >= 0) & (experts < len(own))
        order = np.flatnonzero(is_own)
        order = order[np.argsort(experts[order], kind="stable")]  # by expert, then by token
        sizes = np.bincount(experts[order], minlength=len(own)).tolist()
        copies = paddle.stack(fork(tokens, top_k), axis=1).reshape([-1, tokens.shape[-1]])
        outputs = self._swiglu(_selected(copies, order), sizes)
        return weighted(_placed(outputs, order, len(experts)).reshape([*chosen.shape, tokens.shape[-1]]), gains)

    def _activation(self, gate: Tensor, up: Tensor, groups: Sequence[int]) -> Tensor:
        """Apply the activation function to the rows of each expert separately."""
        rows = [size for size in groups if size]
        if len(rows) < 2:
            return self._gated(gate, up)
        parts = zip(paddle.split(gate, rows), paddle.split(up, rows), strict=True)
        return paddle.concat([self._gated(*part) for part in parts])


Array: TypeAlias = npt.NDArray[Any]


class PaddleBalance(Balance):
    """A ``Balance`` that counts and computes biases on the host; a ``Routers``, whose loads and biases are tensors."""

    def __init__(self, plan: PlanSpec, layers: Sequence[Layer], *, adds_losses: bool) -> None:
        self._dtype = plan.run.dtype
        super().__init__(OPS, plan, layers, adds_losses=adds_losses)

    def load(self, experts: str) -> Tensor:
        """Return the load, see ``Balance.load``."""
        return paddle.to_tensor(super().load(experts))

    def set_load(self, experts: str, load: Tensor) -> None:
        """Replace the load, see ``Balance.set_load``."""
        super().set_load(experts, load.numpy())

    def bias(self, experts: str) -> Tensor:
        """Return the bias of one router."""
        return paddle.to_tensor(self.biases[experts])

    def put_bias(self, experts: str, bias: Tensor) -> None:
        """Replace the bias of one router in position."""
        self.biases[experts][...] = bias.numpy()

    def _table(self, table: Indices) -> Indices:
        return table

    def _rows(self, table: Indices, token_ids: Tensor) -> Indices:
        rows: Indices = table[token_ids.numpy().reshape(-1)]
        return rows

    def _zero_bias(self) -> Array:
        assert self._moe is not None
        return np.zeros(self._moe.num_experts, dtype=self._dtype)

    def _total(self, visits: Iterable[Indices]) -> Indices:
        total: Indices = np.sum([*visits], axis=0, dtype=np.int64)
        return total

    def _move(self, bias: Array, distance: Tensor) -> None:
        bias += np.sign(distance.numpy()).astype(self._dtype) * np.asarray(self._rate, self._dtype)

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
    scores = parts = _SCORES[moe.score](logits)
    if moe.score != "softmax":
        parts = scores / paddle.sum(scores, axis=-1, keepdim=True)
    largest = np.argsort(-scores.numpy(), axis=-1, kind="stable")[:, : moe.top_k]
    loads = np.bincount(largest.reshape(-1), minlength=moe.num_experts) * moe.num_experts / largest.size
    return paddle.sum(paddle.mean(parts, axis=0) * paddle.to_tensor(loads, dtype=logits.dtype))


def _small_outputs(logits: Tensor, moe: MoeSpec) -> Tensor:
    return paddle.mean(paddle.square(paddle.logsumexp(logits, axis=-1)))


_LOSSES: Mapping[str, Callable[[Tensor, MoeSpec], Tensor]] = {"aux": _even_loads, "z": _small_outputs}
