"""Micro-batches whose sequences differ in length: the plan's ``schedule.seq_lengths`` and the letter ``s`` in shapes.

A script lists values by micro-batch in ``MicroBatches``, in the example as in the steps. Each stage runs once for each
distinct length; a dim of its output either is the same in all runs or is the sequence length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from pipeproof.exec.train.stage_boundaries import LeafSpec, kind_text
from pipeproof.exec.train.torch.stage_values import MicroBatches
from pipeproof.exec.train.train_errors import PipelineError


@dataclass(frozen=True, slots=True)
class Examples:
    """The distinct examples of a step. ``by_micro_batch`` is empty if all micro-batches are alike.

    ``lengths`` are the sequence lengths of the distinct examples, empty for one.
    """

    distinct: tuple[tuple[tuple[Any, ...], Mapping[str, Any]], ...]
    by_micro_batch: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def seq_lengths(self) -> list[int] | None:
        """The plan's ``schedule.seq_lengths``."""
        return [self.lengths[index] for index in self.by_micro_batch] or None


def examples_of(example: Sequence[Any], kwargs: Mapping[str, Any], num_micro_batches: int) -> Examples:
    """The examples of an ``example`` and ``example_kwargs`` that may have values by micro-batch.

    Raises:
        PipelineError: the example is no list of arguments, they are not for this number of micro-batches, or no dim is
            the sequence length.
    """
    if not isinstance(example, tuple | list):
        raise PipelineError(f"`example` is {kind_text(example)}: give a tuple of positional arguments, such as (x,)")
    listed = [value for value in (*example, *kwargs.values()) if isinstance(value, MicroBatches)]
    if not listed:
        return Examples(((tuple(example), dict(kwargs)),))
    for values in listed:
        values.require_num(num_micro_batches, "a MicroBatches of the example")
    number: dict[str, int] = {}
    distinct: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    order: list[int] = []
    for index in range(num_micro_batches):
        args = tuple(_of(value, index) for value in example)
        named = {name: _of(value, index) for name, value in kwargs.items()}
        key = str([_shape(leaf) for leaf in tree_leaves((args, named))])
        if key not in number:
            number[key] = len(distinct)
            distinct.append((args, named))
        order.append(number[key])
    if len(distinct) == 1:
        return Examples(tuple(distinct))
    return Examples(tuple(distinct), tuple(order), _lengths(distinct))


def declared_examples(seq_lengths: Sequence[int] | None) -> Examples:
    """The lengths that a plan declares, without examples."""
    lengths = tuple(dict.fromkeys(seq_lengths or ()))
    return Examples((), tuple(lengths.index(length) for length in seq_lengths or ()), lengths)


def rows_of(examples: Examples) -> int:
    """The rows of every micro-batch: the first dim of the first tensor.

    Raises:
        PipelineError: there is none, or the micro-batches differ.
    """
    found: list[int] = []
    for args, _ in examples.distinct:
        rows = next((x.shape[0] for x in tree_leaves(args) if isinstance(x, torch.Tensor) and x.dim()), None)
        if rows is None:
            raise PipelineError("the example needs a tensor whose first dim is the rows of a micro-batch")
        found.append(rows)
    if len(set(found)) > 1:
        raise PipelineError(f"the micro-batches of the example have {found} rows: all need the same number")
    return found[0]


def plan_entries(
    outputs: Sequence[Sequence[LeafSpec]], num_rows: int, lengths: Sequence[int], number: int
) -> list[dict[str, Any]]:
    """The plan's ``out`` of stage ``number``, by its outputs for each of the ``lengths``.

    Raises:
        PipelineError: a dim differs and is not the sequence length, or something else than a size does.
    """
    entries = []
    for position, specs in enumerate(zip(*outputs, strict=True)):
        entry = specs[0].plan_entry(num_rows)
        if len({(len(spec.shape), spec.dtype, spec.has_gradient) for spec in specs}) > 1:
            raise PipelineError(
                f"output {position} of stage {number} is {', '.join(map(str, specs))} in micro-batches of sequence "
                f"lengths {list(lengths)}: only sizes may differ"
            )
        for dim, sizes in enumerate(zip(*(spec.shape for spec in specs), strict=True)):
            if len(set(sizes)) > 1:
                if list(sizes) != list(lengths):
                    raise PipelineError(
                        f"output {position} of stage {number} has the sizes {list(sizes)} in dim {dim}, and the "
                        f"sequence lengths are {list(lengths)}: only a dim of that size may differ"
                    )
                entry["shape"][dim] = "s"
        entries.append(entry)
    return entries


def _of(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, MicroBatches) else value


def _shape(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _lengths(distinct: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of the first dim that differs between the examples."""
    tensors = [[leaf for leaf in tree_leaves(one) if isinstance(leaf, torch.Tensor)] for one in distinct]
    for leaves in zip(*tensors, strict=True):
        for sizes in zip(*(leaf.shape for leaf in leaves), strict=False):
            if len(set(sizes)) == len(distinct):
                return tuple(sizes)
    raise PipelineError(
        "the micro-batches of the example differ, but no dim of a tensor has another size in each of them"
    )
