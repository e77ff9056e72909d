"""The loss of a step: terms of micro-batches, their sum over micro-batches and data ranks, and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.channel_groups import OrderedSums, ScriptGroup

LossOn = Literal["last", "all"]

NUM_ITEMS = "num_items_in_batch"
"""The argument of a loss function that divides a sum by the number of labels of the whole step, as in transformers."""


class LossTerms(NamedTuple):
    """The result of a loss function for one micro-batch: the loss and metrics."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


@dataclass(slots=True)
class StepTerms:
    """Detached terms of a step by micro-batch, each as the loss function returned it."""

    losses: dict[int, torch.Tensor] = field(default_factory=dict)
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

    def collect(self, losses: list[torch.Tensor] | None, metrics: dict[str, list[torch.Tensor]] | None) -> None:
        """Append the losses to a list, and put the metrics into a dict, of those that the script has passed."""
        if losses is not None:
            losses.extend(self.in_order())
        if metrics is not None:
            metrics.update(self.metrics_in_order())

    def in_order(self) -> list[torch.Tensor]:
        """The losses by micro-batch."""
        return [self.losses[index] for index in sorted(self.losses)]

    def metrics_in_order(self) -> dict[str, list[torch.Tensor]]:
        """Of each metric the values by micro-batch."""
        by_index = [self.metrics[index] for index in sorted(self.metrics)]
        return {name: [values[name] for values in by_index] for name in (by_index[0] if by_index else ())}

    def copied(self) -> StepTerms:
        """The terms in memory of their own."""
        metrics = tree_map_only(torch.Tensor, torch.clone, self.metrics)
        losses = torch.stack([*self.losses.values()]).unbind() if self.losses else ()
        return StepTerms(dict(zip(self.losses, losses, strict=True)), metrics)


def with_tensor_number(loss_kwargs: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """Arguments of a loss function whose ``num_items_in_batch`` is a tensor, which graphs take of any value."""
    number = loss_kwargs.get(NUM_ITEMS)
    if isinstance(number, torch.Tensor):
        return {**loss_kwargs, NUM_ITEMS: number.to(device)}
    return loss_kwargs if number is None else {**loss_kwargs, NUM_ITEMS: torch.full((), number, device=device)}


def detached_metrics(returned: Any) -> Any:
    """The result of a loss function, with a graph for the loss alone."""
    if not isinstance(returned, tuple):
        return returned
    return (returned[0], *tree_map_only(torch.Tensor, torch.Tensor.detach, returned[1:]))


def loss_terms(returned: Any, source: str) -> LossTerms:
    """The terms of one micro-batch; ``source`` is who returned them, in the error.

    Raises:
        PipelineError: they are something else.
    """
    if isinstance(returned, torch.Tensor) and not returned.dim():
        return LossTerms(returned, {})
    parts = returned if isinstance(returned, tuple) else (returned,)
    *scalars, metrics = parts if isinstance(parts[-1], Mapping) else (*parts, {})
    if len(scalars) != 1:
        fix = f"; it may divide a sum by {NUM_ITEMS} of loss_kwargs" if len(scalars) == 2 else ""
        raise PipelineError(f"{source} {_kind(returned)}, and must return a scalar tensor, or (loss, metrics){fix}")
    loss = scalars[0]
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise PipelineError(f"{source} {_kind(loss)} as the loss, which must be a scalar tensor")
    for name, value in metrics.items():
        if not isinstance(value, torch.Tensor):
            raise PipelineError(f"{source} {_kind(value)} as metric {name!r}, which must be a tensor")
    return LossTerms(loss, dict(metrics))


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"returns a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"returns a tuple of {len(value)}"
    return f"returns {type(value).__name__}"


class StepLoss:
    """Losses of whole steps on one rank.

    ``settings`` are: whether all ranks get the loss, and whether it is the mean over micro-batches. ``copies`` sums
    over the ranks that share the micro-batches of the last stage, if this is one of several. ``data_groups`` returns
    the groups of data ranks. ``source`` is the global rank in ``group``, the pipeline's ranks, that broadcasts the
    loss; it has type ``dtype`` then. ``calling`` is as ``StallWatch.calling``.
    """

    def __init__(
        self, settings: tuple[bool, bool], copies: OrderedSums | None,
        data_groups: Callable[[], Sequence[dist.ProcessGroup]],
        group: ScriptGroup, source: int, device: torch.device, dtype: torch.dtype,
        calling: Callable[[str], AbstractContextManager[object]],
    ) -> None:  # fmt: skip
        self._on_all, self._averages = settings
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
        return StepTerms(self._of_all(terms.losses, num, torch.float64), metrics)

    def _of_all(self, own: Mapping[int, torch.Tensor], num: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """A value of each micro-batch; ``dtype`` is that of the sum."""
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

    def total(self, terms: StepTerms, *, has_share: bool, is_training: bool) -> torch.Tensor | None:
        """The loss of the step, None where it is not known; of several data ranks it is added if it is a share.

        With ``has_share`` the loss function divided by the labels of the whole step. Every rank of the pipeline calls
        this. Ranks exchange it with ``loss_on="all"``.
        """
        losses, loss = terms.in_order(), None
        if losses:
            loss = torch.stack(losses).sum()
            loss = loss / len(losses) if self._averages and not has_share else loss
        over_data = self._data_groups() if has_share else ()
        if not self._on_all and (loss is None or not over_data):
            return loss
        with self._calling("the sum of the loss"):
            sums = torch.zeros(2, dtype=torch.float64, device=self._device)
            # the loss, summed over data ranks, and whether there is one
            if loss is not None:
                sums.copy_(torch.stack([loss.double(), loss.new_ones(()).double()]))
                for group in over_data:
                    dist.all_reduce(sums, group=group)
            if self._on_all:
                dist.broadcast(sums, self._source, group=self._group())
        if loss is None and not is_training and not bool(sums[1] > 0):
            return None
        return sums[0].to(self._dtype if self._on_all or loss is None else loss.dtype)
