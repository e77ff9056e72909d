"""Tensors that cross between stages, and values that are listed by micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch.utils._pytree import register_pytree_node

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.stage_boundaries import Form, dtype_name, leaves_of
from pipeproof.specs.custom_layers import LayerDtype

Leaves = tuple[torch.Tensor, ...]
_DTYPES: tuple[str, ...] = get_args(LayerDtype)


def plain_leaves_of(value: Any, what: str) -> tuple[Form, Leaves]:
    """The form and the tensors of a stage's output; ``what`` names the stage in the error.

    Raises:
        PipelineError: the value is something else, or has a tensor that cannot cross.
    """
    form, leaves = leaves_of(value, what, torch.Tensor)
    for leaf in leaves:
        _require_plain(leaf, what)
    return form, leaves


class MicroBatches(tuple[Any, ...]):
    """Values of all micro-batches in order, if they are not rows of one tensor: for example with different lengths.

    It may be an argument of a step, its target and an argument of the example, or inside of one.
    """

    __slots__ = ()

    def require_num(self, num: int, what: str) -> None:
        """Refuse another number of values.

        Raises:
            PipelineError: names both numbers.
        """
        if len(self) != num:
            raise PipelineError(f"{what} has values of {len(self)} micro-batches, and the plan has {num}")


register_pytree_node(MicroBatches, lambda values: (list(values), None), lambda items, _: MicroBatches(items))
"""A replayed step copies each value."""


def _require_plain(leaf: torch.Tensor, what: str) -> None:
    """Refuse tensors that cannot cross, such as a DTensor: the next stage may be distributed otherwise."""
    if hasattr(leaf, "placements"):
        raise PipelineError(
            f"{what} returns a DTensor with placements {list(leaf.placements)}: stages exchange plain tensors; let the "
            "last module of the stage return one (use_local_output=True with output_layouts=Replicate() in "
            "parallelize_module), or return x.full_tensor()"
        )
    if leaf.layout is not torch.strided:
        raise PipelineError(f"{what} returns a tensor of layout {leaf.layout}: stages exchange dense tensors")
    if dtype_name(leaf.dtype) not in _DTYPES:
        fix = "torch.view_as_real makes it real" if leaf.is_complex() else f"return one of {', '.join(_DTYPES)}"
        raise PipelineError(f"{what} returns a tensor of type {leaf.dtype}, which does not cross between stages: {fix}")
    if not leaf.numel():
        raise PipelineError(f"{what} returns an empty tensor of shape {list(leaf.shape)}: leave it out")


def joined_outputs(outputs: Sequence[Any]) -> Any:
    """The outputs of all micro-batches along their first dim."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if len({output.shape[1:] for output in outputs}) > 1:
            return MicroBatches(outputs)
        return torch.cat([output if output.dim() else output[None] for output in outputs])
    if isinstance(first, Mapping):
        return {key: joined_outputs([output[key] for output in outputs]) for key in first}
    if isinstance(first, tuple | list):
        items = [joined_outputs([output[position] for output in outputs]) for position in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return list(outputs)
