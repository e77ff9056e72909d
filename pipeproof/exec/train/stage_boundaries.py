"""Values that a stage takes and returns: tensors, alone or in a tuple, list or dict, with shapes and types as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from pipeproof.exec.store.train_errors import PipelineError


@dataclass(frozen=True, slots=True)
class Form:
    """Structure of the tensors of a boundary. ``kind`` is tensor, tuple, list or dict, with its ``keys``."""

    kind: str
    keys: tuple[str, ...] = ()

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the next stage's module."""
        if self.kind == "dict":
            return (), dict(zip(self.keys, leaves, strict=True))
        return tuple(leaves), {}

    def value(self, leaves: Sequence[Any]) -> Any:
        """The value that the stage returned."""
        if self.kind == "tensor":
            return leaves[0]
        if self.kind == "dict":
            return dict(zip(self.keys, leaves, strict=True))
        return tuple(leaves) if self.kind == "tuple" else list(leaves)


def leaves_of(value: Any, what: str, tensor_type: type[Any]) -> tuple[Form, tuple[Any, ...]]:
    """The form and the tensors of a stage's output; ``what`` names the stage in the error.

    Raises:
        PipelineError: the value is something else.
    """
    if isinstance(value, tensor_type):
        return Form("tensor"), (value,)
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        form, leaves = Form("dict", tuple(value)), tuple(value.values())
    elif isinstance(value, tuple | list) and value:
        form, leaves = Form("tuple" if isinstance(value, tuple) else "list"), tuple(value)
    else:
        raise PipelineError(f"{what} returns {kind_text(value)}: return a tensor, or a tuple, list or dict of tensors")
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, tensor_type):
            key_path = f"[{form.keys[position]!r}]" if form.keys else f"[{position}]"
            raise PipelineError(f"{what} returns {kind_text(leaf)} at {key_path}: only tensors cross between stages")
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
    def of(cls, leaf: Any, *, has_gradient: bool) -> LeafSpec:
        """The spec of a tensor of either framework."""
        return cls(tuple(leaf.shape), dtype_name(leaf.dtype), has_gradient)

    def plan_entry(self, num_rows: int) -> dict[str, Any]:
        """The entry of the plan's ``out``; a first dim of ``num_rows`` is the rows of a micro-batch."""
        shape: list[int | str] = list(self.shape)
        if shape[:1] == [num_rows]:
            shape[0] = "b"
        return {"shape": shape, "dtype": self.dtype, "gradient": self.has_gradient}


def form_of(entry: Mapping[str, Any]) -> Form:
    """The structure of a stage's output, from its JSON facts."""
    return Form(entry["form"][0], tuple(entry["form"][1]))


def specs_of(out: Sequence[Sequence[Any]]) -> tuple[LeafSpec, ...]:
    """The tensors of a stage's output, from its JSON facts."""
    return tuple(LeafSpec(tuple(shape), *rest) for shape, *rest in out)


@dataclass(frozen=True, slots=True)
class Boundaries:
    """The boundaries of one stage. ``outputs`` is empty for the last one, and ``input_form`` None for the first."""

    input_form: Form | None
    output_form: Form
    outputs: tuple[LeafSpec, ...]
    by_micro_batch: tuple[tuple[LeafSpec, ...], ...] = ()
    """The outputs of each micro-batch; empty if all are identical."""
    unused: tuple[int, ...] = ()
    """Outputs that got no gradient on the example, because the next stages do not use them."""
    num_direct: int = 0
    """Number of the last inputs, which come on direct edges."""

    def outputs_of(self, index: int) -> tuple[LeafSpec, ...]:
        """The outputs of one micro-batch."""
        return self.by_micro_batch[index] if self.by_micro_batch else self.outputs


@cache
def dtype_name(dtype: object) -> str:
    """The plan's name of a framework's type: float32 of ``torch.float32`` and of ``paddle.float32``."""
    return str(dtype).rpartition(".")[2]


DTYPES = ("float32", "float64", "bfloat16", "float16")


def common_dtype(weights: Iterable[Any]) -> str:
    """The floating-point type of most elements of the weights; empty without any."""
    counts: Counter[str] = Counter()
    for weight in weights:
        counts[dtype_name(weight.dtype)] += prod(weight.shape)
    return next((name for name, _ in counts.most_common() if name in DTYPES), "")


def kind_text(value: object) -> str:
    """The kind of a value, for messages."""
    return "nothing" if value is None else f"a {type(value).__name__}"
