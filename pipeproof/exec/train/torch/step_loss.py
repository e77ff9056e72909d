"""The loss of a step: terms of micro-batches, their normalization over micro-batches and data ranks, and metrics.

The count of ``normalize="tokens"`` is known after the last forward, when backwards have already run. So the backwards
start from the sums, and the gradients are divided by the count at the end of the step. ``num_items_in_batch`` is known
before the step: the loss function divides by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.channel_groups import OrderedSums, ScriptGroup
from pipeproof.exec.train.torch.data_parallel import local_part

Normalize = Literal["micro_batches", "tokens"]
LossOn = Literal["last", "all"]

NUM_ITEMS = "num_items_in_batch"
"""The argument of a loss function that divides a sum by the number of labels of the whole step, as in transformers."""


class LossTerms(NamedTuple):
    """The result of a loss function for one micro-batch: the loss, or a sum and its count, and metrics."""

    loss: torch.Tensor
    num_tokens: torch.Tensor | None
    metrics: dict[str, torch.Tensor]


@dataclass(slots=True)
class StepTerms:
    """Detached terms of a step by micro-batch, each as the loss function returned it."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, torch.Tensor] = field(default_factory=dict)
    metrics: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def add(self, index: int, terms: LossTerms, source: str) -> None:
        """Keep the terms of one micro-batch.

        Raises:
            PipelineError: another micro-batch has other metrics.
        """
        other = next(iter(self.metrics.values()), terms.metrics)
        if other.keys() != terms.metrics.keys():
            raise PipelineError(
                f"{source} returns the metrics {[*terms.metrics]}, and {[*other]} for another micro-batch: return "
                "the same names for each"
            )
        self.losses[index], self.metrics[index] = terms.loss.detach(), terms.metrics
        if terms.num_tokens is not None:
            self.counts[index] = terms.num_tokens

    def collect(self, losses: list[torch.Tensor] | None, metrics: dict[str, list[torch.Tensor]] | None) -> None:
        """Append the losses to a list, and put the metrics into a dict, if the script has passed these."""
        if losses is not None:
            losses.extend(self.in_order())
        if metrics is not None:
            metrics.update(self.metrics_in_order())

    def in_order(self) -> list[torch.Tensor]:
        """The losses by micro-batch."""
        return [self.losses[index] for index in sorted(self.losses)]

    def metrics_in_order(self) -> dict[str, list[torch.Tensor]]:
        """The values of each metric by micro-batch."""
        by_index = [self.metrics[index] for index in sorted(self.metrics)]
        return {name: [values[name] for values in by_index] for name in (by_index[0] if by_index else ())}

    def copied(self) -> StepTerms:
        """The terms in memory of their own."""
        metrics = tree_map_only(torch.Tensor, torch.clone, self.metrics)
        return StepTerms(_copied(self.losses), _copied(self.counts), metrics)


def _copied(terms: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return dict(zip(terms, torch.stack([*terms.values()]).unbind(), strict=True)) if terms else {}


def with_tensor_number(loss_kwargs: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Arguments of a loss function with ``num_items_in_batch`` as a tensor: graphs accept it with any value."""
    number = loss_kwargs.get(NUM_ITEMS)
    if isinstance(number, torch.Tensor):
        return {**loss_kwargs, NUM_ITEMS: number.to(device)}
    return loss_kwargs if number is None else {**loss_kwargs, NUM_ITEMS: torch.full((), number, device=device)}


def detached_metrics(returned: Any) -> Any:
    """The result of a loss function, with a graph for the loss alone."""
    if not isinstance(returned, tuple):
        return returned
    return (returned[0], *tree_map_only(torch.Tensor, torch.Tensor.detach, returned[1:]))


def loss_terms(returned: Any, normalize: Normalize, source: str) -> LossTerms:
    """The terms of one micro-batch; ``source`` names their origin in the error.

    Raises:
        PipelineError: they do not have the form that ``normalize`` needs.
    """
    if isinstance(returned, torch.Tensor) and not returned.dim() and normalize == "micro_batches":
        return LossTerms(returned, None, {})
    parts = returned if isinstance(returned, tuple) else (returned,)
    *scalars, metrics = parts if isinstance(parts[-1], Mapping) else (*parts, {})
    by_tokens = normalize == "tokens"
    if len(scalars) != 1 + by_tokens:
        wanted = "a sum and its count, (sum, count)" if by_tokens else "a scalar tensor, or (loss, metrics)"
        fix = "" if by_tokens or len(scalars) != 2 else "; a sum and its count need normalize='tokens'"
        raise PipelineError(f"{source} {_kind(returned)}, and must return {wanted}{fix}")
    loss = scalars[0]
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise PipelineError(f"{source} {_kind(loss)} as the loss, which must be a scalar tensor")
    for name, value in metrics.items():
        if not isinstance(value, torch.Tensor):
            raise PipelineError(f"{source} {_kind(value)} as metric {name!r}, which must be a tensor")
    return LossTerms(loss, _count(scalars[1], loss, source) if by_tokens else None, dict(metrics))


def _count(count: Any, loss: torch.Tensor, source: str) -> torch.Tensor:
    if isinstance(count, torch.Tensor) and not count.dim():
        return count.to(device=loss.device, dtype=torch.float64)
    if isinstance(count, int | float):
        return loss.new_full((), count, dtype=torch.float64)
    raise PipelineError(f"{source} {_kind(count)} as the count, which must be a number or a scalar tensor")


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"returns a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"returns a tuple of {len(value)}"
    return f"returns {type(value).__name__}"


class StepTotal(NamedTuple):
    """The loss of a step, None where it is not known, and the count that gradients are divided by."""

    loss: torch.Tensor | None
    num_tokens: torch.Tensor | None


class StepLoss:
    """Losses of whole steps on one rank.

    ``settings`` are: whether the sum is divided by tokens, whether all ranks get the loss, and whether it is the mean
    over micro-batches. ``copies`` sums over the ranks that share the micro-batches of the last stage, if this is one of
    several. ``data_groups`` returns the groups of data ranks. ``source`` is the global rank in ``group``, the
    pipeline's ranks, that broadcasts the loss; it has type ``dtype`` then. ``calling`` is as ``StallWatch.calling``.
    """

    def __init__(
        self, settings: tuple[bool, bool, bool], copies: OrderedSums | None,
        data_groups: Callable[[], Sequence[dist.ProcessGroup]],
        group: ScriptGroup, source: int, device: torch.device, dtype: torch.dtype,
        calling: Callable[[str], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        self._by_tokens, self._on_all, self._averages = settings
        self._copies, self._data_groups, self._calling = copies, data_groups, calling
        self._group, self._source, self._device, self._dtype = group, source, device, dtype

    def of_all_copies(self, terms: StepTerms, num: int) -> StepTerms:
        """The terms of all ``num`` micro-batches."""
        if self._copies is None:
            return terms
        metrics: dict[int, dict[str, torch.Tensor]] = {index: {} for index in range(num)}
        for name in sorted(terms.metrics_in_order()):
            own = {index: values[name] for index, values in terms.metrics.items()}
            for index, value in self._of_all(own, num, own[min(own)].dtype).items():
                metrics[index][name] = value
        counts = self._of_all(terms.counts, num, torch.float64) if terms.counts else {}
        return StepTerms(self._of_all(terms.losses, num, torch.float64), counts, metrics)

    def _of_all(self, own: Mapping[int, torch.Tensor], num: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """A value of each micro-batch; ``dtype`` is the type of the sum."""
        assert self._copies is not None
        like = own[min(own)]
        parts = torch.zeros((num, *like.shape), dtype=dtype, device=self._device)
        for index, value in own.items():
            if value.shape != like.shape:
                raise PipelineError(
                    f"a metric has shape {list(value.shape)} for micro-batch {index}, and {list(like.shape)} for "
                    "another: copies of the last stage exchange metrics of one shape"
                )
            parts[index] = value
        return dict(enumerate(self._copies.reduce(parts, "sum").to(like.dtype)))

    def total(self, terms: StepTerms, *, has_share: bool, is_training: bool) -> StepTotal:
        """The loss of the step; terms of all data ranks are added if they are counted or shares of one sum.

        With ``has_share`` the loss function divided by the labels of the whole step. Every rank of the pipeline calls
        this. Ranks exchange it with ``loss_on="all"``, and where gradients need its count.
        """
        losses, loss = terms.in_order(), None
        if losses:
            loss = torch.stack(losses).sum()
            loss = loss / len(losses) if self._averages and not has_share else loss
        over_data = self._data_groups() if self._by_tokens or has_share else ()
        to_all = self._on_all or (self._by_tokens and is_training)
        if not to_all and (loss is None or not (self._by_tokens or over_data)):
            return StepTotal(loss, None)
        with self._calling("the sum of the loss"):
            sums = self._sums(loss, terms, over_data)
            if to_all:
                dist.broadcast(sums, self._source, group=self._group())
        count = sums[1] if self._by_tokens else None
        if loss is None and not (self._on_all and (is_training or bool(sums[2] > 0))):
            return StepTotal(None, count)
        dtype = self._dtype if self._on_all or loss is None else loss.dtype
        return StepTotal((sums[0] / sums[1]).to(dtype), count)

    def _sums(
        self, loss: torch.Tensor | None, terms: StepTerms, over_data: Sequence[dist.ProcessGroup]
    ) -> torch.Tensor:
        """The loss or sum, its divisor, and whether there is one, summed over data ranks."""
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        if loss is not None:
            count = torch.stack([*terms.counts.values()]).sum() if self._by_tokens else loss.new_ones(())
            sums.copy_(torch.stack([loss.double(), count.double(), loss.new_ones(()).double()]))
            for group in over_data:
                dist.all_reduce(sums, group=group)
            if not self._by_tokens:
                sums[1] = 1.0
        return sums


@contextmanager
def earlier_aside(weights: Sequence[nn.Parameter], *, copies: bool) -> Iterator[None]:
    """Put gradients of earlier steps aside, and add them to this step's gradients, or put them back if it fails.

    With ``copies`` a step may write to the memory of the gradients that were there.
    """
    earlier = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    if copies:
        earlier = [(weight, gradient.clone()) for weight, gradient in earlier]
    for weight, _ in earlier:
        weight.grad = None
    try:
        yield
    except BaseException:
        for weight in weights:
            weight.grad = None
        for weight, gradient in earlier:
            weight.grad = gradient
        raise
    with torch.no_grad():
        for weight, gradient in earlier:
            weight.grad = gradient if weight.grad is None else gradient.add_(weight.grad)


def divide_gradients(weights: Sequence[nn.Parameter], count: torch.Tensor) -> None:
    """Divide the gradients by a count, without waiting for the device."""
    with torch.no_grad():
        for part in [local_part(weight.grad) for weight in weights if weight.grad is not None]:
            part.copy_(divided(part, count))


def divided(value: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """A value divided by a count, which may be too large for the type of the value."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) / count.to(wide)).to(value.dtype)
