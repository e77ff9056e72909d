"""The micro-batches of a step from the arguments of Fleet's ``train_batch``.

``data`` is ``(inputs, labels)``, of whole batches or of lists with one entry for each micro-batch, or an iterator of
micro-batches ``(inputs, labels)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import paddle
from paddle.distributed.fleet.meta_parallel.pipeline_parallel import PipelineDatasetPreprocessor

from pipeproof.exec.store.train_errors import PipelineError

Tensor: TypeAlias = paddle.Tensor


@dataclass(slots=True)
class StepData:
    """Values that the script passes to one step, by micro-batch, and results that the step collects for it."""

    inputs: list[Any] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)
    scaler: Any = None
    loss_index: int | None = 0
    """The loss function of the backward; None if no loss is computed."""
    losses: dict[int, list[Tensor]] = field(default_factory=dict)
    """Detached losses of micro-batches, for each loss function, divided as Fleet divides them."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """Outputs of the last stage, if no loss is computed."""

    @property
    def count(self) -> int:
        """Number of micro-batches."""
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class MicroBatchSizes:
    """Number of micro-batches of a step, and the rows of one; None: the rows of the batch divided by the number."""

    count: int
    num_rows: int | None


def step_data(data: Any, sizes: MicroBatchSizes, *, is_first: bool, is_last: bool) -> StepData:
    """The micro-batches that a rank needs: inputs for the first stage, labels for the last.

    Raises:
        PipelineError: they are missing, or do not have the sizes.
    """
    if not is_first and not is_last:
        return StepData([None] * sizes.count, [None] * sizes.count)
    if data is None:
        raise PipelineError("this rank has the first or the last stage: pass the data of the step")
    if isinstance(data, PipelineDatasetPreprocessor):
        data = data()
    if not isinstance(data, tuple | list):
        return _drawn(data, sizes.count)
    if len(data) != 2:
        raise PipelineError(f"the data of a step are (inputs, labels), and {len(data)} things are given")
    missing = [None] * sizes.count
    inputs = [_part(data[0], index, sizes, "inputs") for index in range(sizes.count)] if is_first else missing
    labels = [_part(data[1], index, sizes, "labels") for index in range(sizes.count)] if is_last else missing
    return StepData(inputs, labels)


def _drawn(data: Any, count: int) -> StepData:
    """The next micro-batches of an iterator."""
    drawn = StepData()
    for index in range(count):
        try:
            inputs, labels = next(data)
        except StopIteration:
            raise PipelineError(f"the data end after {index} micro-batches, and a step has {count}") from None
        except (TypeError, ValueError) as error:
            raise PipelineError(f"the data are not an iterator of (inputs, labels): {error}") from None
        drawn.inputs.append(inputs)
        drawn.labels.append(labels)
    return drawn


def _part(value: Any, index: int, sizes: MicroBatchSizes, what: str) -> Any:
    """One micro-batch of inputs or labels, as Fleet takes it: a list has an entry for each micro-batch."""
    if isinstance(value, tuple):
        return tuple(_part_of_item(item, index, sizes, f"{what}[{n}]") for n, item in enumerate(value))
    if isinstance(value, Mapping):
        return {key: _part_of_item(item, index, sizes, f"{what}[{key!r}]") for key, item in value.items()}
    return _part_of_item(value, index, sizes, what)


def _part_of_item(value: Any, index: int, sizes: MicroBatchSizes, what: str) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        if len(value) != sizes.count:
            raise PipelineError(f"{what} has {len(value)} entries, and the step has {sizes.count} micro-batches")
        part = value[index]
        if isinstance(part, list):
            return [each if each is None else each.detach() for each in part]
        return part.detach() if isinstance(part, paddle.Tensor) else part
    if not isinstance(value, paddle.Tensor) or not value.ndim:
        raise PipelineError(f"{what} is {type(value).__name__}: pass tensors with rows, or lists of micro-batches")
    num_rows = sizes.num_rows or value.shape[0] // sizes.count
    if value.shape[0] != num_rows * sizes.count:
        raise PipelineError(
            f"{what} has {value.shape[0]} rows, and the step has {sizes.count} micro-batches of {num_rows}"
        )
    return value[index * num_rows : (index + 1) * num_rows].detach()


def rows_of(value: Any) -> int:
    """The rows of a micro-batch: the size of the first dim of its first tensor.

    Raises:
        PipelineError: it has no tensor with a dim.
    """
    leaves = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else [value]
    for leaf in leaves:
        if isinstance(leaf, paddle.Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    raise PipelineError("the inputs of a micro-batch need a tensor whose first dim is its rows")
