"""Arguments and results of a stage: a tensor, a tuple, a list or a dict of tensors, with shapes and types as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeproof.exec.train.train_errors import PipelineError

Leaves = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Structure of a boundary's value. ``kind`` is tensor, tuple, list or dict, with its ``keys``."""

    kind: str
    keys: tuple[str, ...] = ()

    def arguments(self, leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the next stage's module."""
        if self.kind == "dict":
            return (), dict(zip(self.keys, leaves, strict=True))
        return tuple(leaves), {}

    def value(self, leaves: Sequence[torch.Tensor]) -> Any:
        """The value that the stage returned."""
        if self.kind == "tensor":
            return leaves[0]
        if self.kind == "dict":
            return dict(zip(self.keys, leaves, strict=True))
        return tuple(leaves) if self.kind == "tuple" else list(leaves)


def leaves_of(value: Any, what: str) -> tuple[Form, Leaves]:
    """The form and the tensors of a stage's output; ``what`` names the stage in the error.

    Raises:
        PipelineError: the value is something else.
    """
    if isinstance(value, torch.Tensor):
        _require_plain(value, what)
        return Form("tensor"), (value,)
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        form, leaves = Form("dict", tuple(value)), tuple(value.values())
    elif isinstance(value, tuple | list) and value:
        form, leaves = Form("tuple" if isinstance(value, tuple) else "list"), tuple(value)
    else:
        raise PipelineError(f"{what} returns {_kind(value)}: return a tensor, or a tuple, list or dict of tensors")
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            place = f"[{form.keys[position]!r}]" if form.keys else f"[{position}]"
            raise PipelineError(f"{what} returns {_kind(leaf)} at {place}: only tensors cross between stages")
        _require_plain(leaf, what)
    return form, leaves


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """Shape and type of a tensor that crosses a boundary, and whether a gradient comes back."""

    shape: tuple[int, ...]
    dtype: str
    has_gradient: bool

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @classmethod
    def of(cls, leaf: torch.Tensor, *, has_gradient: bool) -> LeafSpec:
        """The spec of a tensor."""
        return cls(tuple(leaf.shape), dtype_name(leaf.dtype), has_gradient)

    def plan_entry(self, num_rows: int) -> dict[str, Any]:
        """The entry of the plan's ``out``; a first dim of ``num_rows`` is the rows of a micro-batch."""
        shape: list[int | str] = list(self.shape)
        if shape[:1] == [num_rows]:
            shape[0] = "b"
        return {"shape": shape, "dtype": self.dtype, "gradient": self.has_gradient}


def dtype_name(dtype: torch.dtype) -> str:
    """The plan's name of a type."""
    return str(dtype).removeprefix("torch.")


class MicroBatches(tuple[Any, ...]):
    """Values of all micro-batches in their order, where they are not rows of one tensor: of other lengths, for example.

    It may be an argument of a step, its target and an argument of the example.
    """

    __slots__ = ()

    def require_num(self, num: int, what: str) -> None:
        """Refuse another number of values.

        Raises:
            PipelineError: names both numbers.
        """
        if len(self) != num:
            raise PipelineError(f"{what} has values of {len(self)} micro-batches, and the plan has {num}")


def micro_batches(value: Any, num: int, what: str) -> list[Any]:
    """Split the tensors of a value into ``num`` equal parts along their first dim; a scalar is in all of them.

    Raises:
        PipelineError: the rows of a tensor are no multiple of ``num``.
    """
    if isinstance(value, MicroBatches):
        value.require_num(num, what)
        return list(value)
    if isinstance(value, torch.Tensor):
        if not value.dim():
            return [value] * num
        rows = value.shape[0]
        if rows % num:
            raise PipelineError(f"{what} has {rows} rows, which {num} micro-batches do not divide")
        return list(value.split(rows // num))
    if isinstance(value, Mapping):
        parts = {key: micro_batches(item, num, f"{what}[{key!r}]") for key, item in value.items()}
        return [{key: split[index] for key, split in parts.items()} for index in range(num)]
    if isinstance(value, tuple | list):
        columns = [micro_batches(item, num, f"{what}[{position}]") for position, item in enumerate(value)]
        return [type(value)(column[index] for column in columns) for index in range(num)]
    return [value] * num


def _require_plain(leaf: torch.Tensor, what: str) -> None:
    """Refuse a tensor of which this rank has a part only: the next stage may be distributed in another way."""
    if hasattr(leaf, "placements"):
        raise PipelineError(
            f"{what} returns a DTensor with placements {list(leaf.placements)}: stages exchange plain tensors; let the "
            "last module of the stage return one (use_local_output=True with output_layouts=Replicate() in "
            "parallelize_module), or return x.full_tensor()"
        )
    if leaf.layout is not torch.strided:
        raise PipelineError(f"{what} returns a tensor of layout {leaf.layout}: stages exchange dense tensors")


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
