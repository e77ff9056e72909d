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

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.stage_boundaries import LeafSpec, kind_text
from pipeproof.exec.train.torch.stage_keywords import StepInputs
from pipeproof.exec.train.torch.step_inputs import StepContract
from pipeproof.foreign_text import decode_json


@dataclass(frozen=True, slots=True)
class Examples:
    """The distinct examples of a step: arguments of the first stage, and keyword arguments by stage.

    ``by_micro_batch`` is empty if all micro-batches have one example. ``lengths`` are the sequence lengths of the
    distinct examples, empty for one. ``rows`` are those of a micro-batch; None without arguments of the first stage.
    """

    distinct: tuple[tuple[tuple[Any, ...], Mapping[int, Mapping[str, Any]]], ...]
    rows: int | None = None
    by_micro_batch: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def seq_lengths(self) -> list[int] | None:
        """The plan's ``schedule.seq_lengths``."""
        return [self.lengths[index] for index in self.by_micro_batch] or None


def examples_of(contract: StepContract, inputs: StepInputs, num_micro_batches: int, num_stages: int) -> Examples:
    """The examples of a step that may have values by micro-batch.

    Raises:
        PipelineError: the rules refuse an argument, or no dim is the sequence length.
    """
    if not isinstance(inputs.args, tuple | list):
        raise PipelineError(
            f"`example` is {kind_text(inputs.args)}: give a tuple of positional arguments, such as (x,)"
        )
    data, rows = contract.example_data(inputs, num_micro_batches, num_stages)
    number: dict[str, int] = {}
    distinct: list[tuple[tuple[Any, ...], dict[int, Mapping[str, Any]]]] = []
    order: list[int] = []
    for index, args in enumerate(data.args):
        kwargs = {stage: named[index] for stage, named in data.kwargs.items()}
        key = str([_shape(leaf) for leaf in tree_leaves((args, kwargs))])
        if key not in number:
            number[key] = len(distinct)
            distinct.append((args, kwargs))
        order.append(number[key])
    if len(distinct) == 1:
        return Examples(tuple(distinct), rows)
    return Examples(tuple(distinct), rows, tuple(order), _lengths(distinct))


def varied_sizes(views: Sequence[Mapping[str, Sequence[str]]]) -> tuple[int, ...]:
    """The sequence lengths of views of micro-batches, see ``signatures.View``.

    Raises:
        PipelineError: no dim has another size in each view.
    """
    shapes = [[_sizes_in(leaf) for leaves in view.values() for leaf in leaves] for view in views]
    lengths = _differing(shapes)
    if lengths is None:
        raise PipelineError.reported("the micro-batches of the step differ, but no dim of a tensor has another size in "
                                     "each of them")  # fmt: skip
    return lengths


def _sizes_in(leaf: str) -> list[int]:
    return decode_json(leaf[leaf.index("[") :]) if leaf.endswith("]") else []


def declared_examples(seq_lengths: Sequence[int] | None) -> Examples:
    """The lengths that a plan declares, without examples."""
    lengths = tuple(dict.fromkeys(seq_lengths or ()))
    return Examples((), None, tuple(lengths.index(length) for length in seq_lengths or ()), lengths)


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


def _shape(leaf: Any) -> str:
    """The part of a value that may decide the shapes of an output: numbers may, and texts may not."""
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return "str" if isinstance(leaf, str) else repr(leaf)


def _lengths(distinct: Sequence[Any]) -> tuple[int, ...]:
    """The sizes of the first dim that differs between the examples."""
    lengths = _differing([[x.shape for x in tree_leaves(one) if isinstance(x, torch.Tensor)] for one in distinct])
    if lengths is None:
        raise PipelineError(
            "the micro-batches of the example differ, but no dim of a tensor has another size in each of them"
        )
    return lengths


def _differing(shapes: Sequence[Sequence[Sequence[int]]]) -> tuple[int, ...] | None:
    """The sizes of the first dim that differs between the tensors of all variants."""
    for tensors in zip(*shapes, strict=True):
        for sizes in zip(*tensors, strict=False):
            if len(set(sizes)) == len(shapes):
                return tuple(sizes)
    return None
