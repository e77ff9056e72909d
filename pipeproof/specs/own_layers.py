"""The section ``model`` of a plan whose layers are a person's own: what they are called, give and hold."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from pipeproof.specs.problems import Problem, describe_value, problems_error
from pipeproof.specs.section import FROM_LIST, Section

ROWS = "b"
"""Stands in a shape for the rows of a micro-batch."""

_MOST = 2**40


def _size(value: object) -> object:
    """One size of a shape: a number, or the letter."""
    if value == ROWS or (type(value) is int and 1 <= value <= _MOST):
        return value
    message = f"a size is `{ROWS}` (the rows of a micro-batch) or an integer from 1 to 2^40, found "
    raise problems_error([Problem("PP106", (), message + describe_value(value))])


Size = Annotated[int | Literal["b"], BeforeValidator(_size)]


KeptType: TypeAlias = Literal["float32", "float64", "int64", "int32", "bool"]
"""Types of what layers give, and of what states have of them."""


class OutSpec(Section):
    """A tensor that a layer gives to the next one, as it crosses where a stage ends."""

    shape: Annotated[tuple[Size, ...], FROM_LIST] = Field(
        description="Sizes of its dims for one micro-batch; b stands for schedule.micro_batch_size.",
    )
    dtype: KeptType | None = Field(default=None, description="Type of the elements; without it, `run.dtype`.")
    gradient: bool | None = Field(
        default=None, description="Whether a gradient comes back; without it, for floating-point types."
    )

    @property
    def has_gradient(self) -> bool:
        """Whether the receiver sends a gradient back."""
        return (self.dtype is None or "float" in self.dtype) if self.gradient is None else self.gradient

    def sizes(self, num_rows: int) -> tuple[int, ...]:
        """The shape for a micro-batch of so many rows."""
        return tuple(size if isinstance(size, int) else num_rows for size in self.shape)


class WeightSpec(Section):
    """A weight of a layer, as ``named_parameters`` lists it, with the type of ``run.dtype``."""

    name: str = Field(description="Its name in the layer.", json_schema_extra={"minLength": 1})
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=_MOST)], ...], FROM_LIST] = Field(
        description="Sizes of its dims."
    )


class BufferSpec(Section):
    """What training changes in a layer beside its weights, such as the running mean of a batch norm."""

    name: str = Field(description="Its name in the layer.", json_schema_extra={"minLength": 1})
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=_MOST)], ...], FROM_LIST] = Field(
        description="Sizes of its dims, none for a number."
    )
    dtype: KeptType | None = Field(default=None, description="Type of the elements; without it, `run.dtype`.")


class OwnLayerSpec(Section):
    """A layer: `pipeproof describe` writes these from the layers themselves."""

    name: str = Field(
        description="What the layer is called, here and in `stages`.",
        json_schema_extra={"pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$"},
    )
    kind: str | None = Field(
        default=None,
        description="What it is: the name of its class, or of the function. Where it is given, runs and saved states "
        "hold layers to it.",
    )
    out: Annotated[tuple[OutSpec, ...], FROM_LIST] = Field(
        default=(),
        description="The tensors that it gives, most often one; of all layers but the last, whose output the loss "
        "function takes.",
    )
    parameters: Annotated[tuple[WeightSpec, ...], FROM_LIST] = Field(
        default=(), description="Its weights, in the order of `named_parameters`."
    )
    buffers: Annotated[tuple[BufferSpec, ...], FROM_LIST] = Field(
        default=(), description="What training changes in it beside weights; states that runs save have it, too."
    )
    borrows: Annotated[tuple[str, ...], FROM_LIST] = Field(
        default=(), description="Weights of earlier layers that it computes with, too, as LAYER.NAME."
    )


class LayersSpec(Section):
    """A sequence of your own ``paddle.nn.Layer``s, and what crosses between them."""

    kind: Literal["layers"] = Field(description="The family of the model.")
    build: str = Field(
        description="FILE.py:FUNCTION, relative to the plan file: the function gives the layers, the loss function and "
        "the data function. Runs call it; `check` and `simulate` never do.",
        json_schema_extra={"pattern": "^.+\\.py:[A-Za-z_][A-Za-z0-9_]*$"},
    )
    layers: Annotated[tuple[OwnLayerSpec, ...], FROM_LIST] = Field(
        description="The layers in execution order; `pipeproof describe PLAN --write` declares them.",
        json_schema_extra={"minItems": 1},
    )

    @property
    def moe(self) -> None:
        """No experts are known among these layers."""
        return

    @property
    def vocab_size(self) -> None:
        """Nothing is known of ids."""
        return

    @property
    def unpadded_vocab_size(self) -> None:
        """Nor of padding between them."""
        return

    @property
    def file_and_function(self) -> tuple[str, str]:
        """Both halves of ``build``."""
        file, _, function = self.build.rpartition(":")
        return file, function
