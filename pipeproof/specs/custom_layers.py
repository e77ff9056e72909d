"""The section ``model`` of a plan of custom layers: their names, outputs and weights."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from pipeproof.diagnostics.problems import Problem, describe_value, problems_error
from pipeproof.specs.exact_times import TIME_KEYS, Time
from pipeproof.specs.section import FROM_LIST, Section, divisors

ROWS = "b"
"""The size of a shape that means the rows of a micro-batch."""

SEQUENCE = "s"
"""The size of a shape that means the sequence length of a micro-batch."""

_MAX_SIZE = 2**40


def _size(value: object) -> object:
    """Accept one size of a shape: a number, or the letter of the rows or of the sequence length."""
    if (type(value) is str and value in (ROWS, SEQUENCE)) or (type(value) is int and 1 <= value <= _MAX_SIZE):
        return value
    letters = f"`{ROWS}` (the rows of a micro-batch), `{SEQUENCE}` (its sequence length)"
    message = f"a size is {letters} or an integer from 1 to 2^40, found "
    raise problems_error([Problem("PP106", (), message + describe_value(value))])


Size = Annotated[int | Literal["b", "s"], BeforeValidator(_size)]


LayerDtype: TypeAlias = Literal[
    "float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
"""A type of layer outputs."""


Stage = Annotated[int, Field(ge=0, le=2**20)]
"""The number of a stage."""


class LayerOutputSpec(Section):
    """A tensor that a layer passes to the next one; it crosses between stages where a stage ends."""

    shape: Annotated[tuple[Size, ...], FROM_LIST] = Field(
        description="Sizes of the dims for one micro-batch; b represents schedule.micro_batch_size, "
        "s the length in schedule.seq_lengths.",
    )
    dtype: LayerDtype | None = Field(default=None, description="Type of the elements; without it, `run.dtype`.")
    gradient: bool | None = Field(
        default=None, description="Whether a gradient comes back; without it, for floating-point types."
    )

    @property
    def has_gradient(self) -> bool:
        """True if the receiver sends a gradient back."""
        return (self.dtype is None or "float" in self.dtype) if self.gradient is None else self.gradient

    def sizes(self, num_rows: int, seq_length: int = 1) -> tuple[int, ...]:
        """Return the shape for a micro-batch of ``num_rows`` rows of ``seq_length``."""
        letters = {ROWS: num_rows, SEQUENCE: seq_length}
        return tuple(size if isinstance(size, int) else letters[size] for size in self.shape)


class LayerWeightSpec(Section):
    """A weight of a layer, as ``named_parameters`` lists it, with the type of ``run.dtype``."""

    name: str = Field(description="Name of the weight in the layer.", json_schema_extra={"minLength": 1})
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=_MAX_SIZE)], ...], FROM_LIST] = Field(
        description="Sizes of the dims."
    )


class CustomLayerSpec(Section):
    """A layer; `Pipeline.plan.save` writes these from the modules of a training script."""

    name: str = Field(
        description="Name of the layer, here and in `stages`.",
        json_schema_extra={"pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$"},
    )
    kind: str | None = Field(
        default=None,
        description="Name of the layer's class, or of the function.",
    )
    out: Annotated[tuple[LayerOutputSpec, ...], FROM_LIST] = Field(
        default=(),
        description="The layer's output tensors, usually one. The last layer has none here: its output goes to the "
        "loss function.",
    )
    parameters: Annotated[tuple[LayerWeightSpec, ...], FROM_LIST] = Field(
        default=(), description="The layer's weights, in the order of `named_parameters`."
    )
    borrows: Annotated[tuple[str, ...], FROM_LIST] = Field(
        default=(), description="Weights of earlier layers that this layer also uses, as LAYER.NAME."
    )
    activation_bytes: int | None = Field(
        default=None,
        ge=0,
        le=_MAX_SIZE,
        description="Bytes that the layer keeps of one micro-batch for its backward, its input included, as measured; "
        "without it, the bytes of its input.",
    )
    forward_us: Time | None = Field(
        default=None,
        description="Time of its forward. If `cost` has no times of computations, a stage takes the sum over its "
        "layers. All layers have the same time keys.",
    )
    backward_us: Time | None = Field(default=None, description="Time of its backward.")
    backward_input_us: Time | None = Field(default=None, description="The backward's input-gradient part.")
    backward_weight_us: Time | None = Field(default=None, description="The backward's weight-gradient part.")

    @property
    def times(self) -> dict[str, Fraction]:
        """The times in microseconds that the layer has, by key."""
        every = {key: getattr(self, key) for key in TIME_KEYS}
        return {key: time for key, time in every.items() if time is not None}


class LayerEdgeSpec(LayerOutputSpec):
    """A tensor that a layer passes to later layers than the next one."""

    name: str = Field(
        description="Name of the tensor: the keyword argument of its consumers.",
        json_schema_extra={"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
    )
    producer: str = Field(description="The layer that makes it.")
    consumers: Annotated[tuple[str, ...], FROM_LIST] = Field(
        description="The later layers that use it. Its gradient is the sum of theirs, the last layer's first.",
        json_schema_extra={"minItems": 1},
    )
    route: Literal["relay", "direct"] = Field(
        default="relay",
        description="relay: each stage passes the tensor on to the next one; direct: the producer's stage sends it to "
        "each rank with a consumer, and each consumer's stage sends its gradient back.",
    )


class ModuleSpec(Section):
    """A part of the model with pipeline ranks of its own, such as an encoder.

    All modules work on the same micro-batches. Replica r of ``dp`` computes the micro-batches m with m mod ``dp`` = r.
    """

    name: str = Field(
        description="Name of the module, in messages.", json_schema_extra={"pattern": "^[A-Za-z_][A-Za-z0-9_.-]*$"}
    )
    stages: Annotated[tuple[Stage, ...], FROM_LIST] = Field(
        description="The first and the last stage of the module; the next module begins with the next stage.",
        json_schema_extra={"minItems": 2, "maxItems": 2},
    )
    pp: int | None = Field(
        default=None, ge=1, le=2**16, description="Pipeline ranks of one replica; without it, one for each stage."
    )
    dp: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Replicas of the module. Micro-batch m belongs to replica m mod dp. The gradients of replicas are "
        "summed.",
    )
    tp: int = Field(default=1, ge=1, le=2**16, description="Only 1: no declaration shards a layer.")
    cp: int = Field(default=1, ge=1, le=2**16, description="Only 1.")
    ep: int = Field(default=1, ge=1, le=2**16, description="Only 1.")
    frozen: bool = Field(
        default=False,
        description="Whether the weights of the module are not trained: no weight gradients and no optimizer. If no "
        "module before it is trained either, it has no backward.",
    )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.stages[1] - self.stages[0] + 1

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks of one replica."""
        return self.pp or self.num_stages

    @property
    def num_chunks(self) -> int:
        """Stages of each rank."""
        return self.num_stages // self.num_ranks

    def _problems(self) -> Iterator[Problem]:
        """PP106: no axis shards a module; PP108: its stages divide over its ranks."""
        for axis in ("tp", "cp", "ep"):
            if getattr(self, axis) > 1:
                message = f"module `{self.name}` has {axis} {getattr(self, axis)}, and each of its ranks holds whole "
                yield Problem("PP106", (axis,), message + "layers", help=f"remove {axis}, or use dp")
        if len(self.stages) != 2 or self.stages[0] > self.stages[1]:
            message = f"module `{self.name}` has the stages {[*self.stages]}, which are not its first and its last"
            yield Problem("PP106", ("stages",), message, help="write [first, last]")
        elif self.num_stages % self.num_ranks:
            message = f"module `{self.name}` has {self.num_stages} stages, which do not divide over its pp {self.pp}"
            yield Problem("PP108", ("pp",), message, help=f"set pp to {divisors(self.num_stages, self.num_ranks)}")


class CustomModelSpec(Section):
    """A sequence of custom layers, and the tensors that cross between them."""

    kind: Literal["layers"] = Field(description="The family of the model.")
    layers: Annotated[tuple[CustomLayerSpec, ...], FROM_LIST] = Field(
        description="The layers in execution order.",
        json_schema_extra={"minItems": 1},
    )

    @property
    def moe(self) -> None:
        """None: experts of custom layers are not declared."""
        return

    @property
    def seq_length(self) -> int:
        """Length of a work item: 1, because custom layers may have no sequence dim."""
        return 1
