"""The plan that a person writes: every key with its type, bounds, default and meaning.

Values are strict: a quoted number is not a number and ``true`` is not 1. A
spec is frozen and holds together: sizes that must divide each other do, and
lists have the length that the topology asks for. Use
``pipeproof.specs.load`` to read one from a file or a dict with findings in
place of pydantic's errors.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError

from pipeproof.specs.checks import (
    check_chunks,
    check_cost,
    check_lengths,
    check_model,
    check_order,
    check_tensor_parallel,
)
from pipeproof.specs.problems import Problem, describe_value, nearest_name, problems_error
from pipeproof.specs.times import PositiveTimeByStage, StageTimes, Time, TimeByStage

AxisName = Literal["tp", "cp", "ep", "dp", "pp"]
"""An axis of the device mesh."""

TransportName = Literal["full", "partial"]
"""How a tensor crosses a stage boundary; ``pipeproof.comm.transport`` says what each does."""

_DEFAULT_BACKWARD_US = Fraction(200)


def _tuple_of_list(value: object) -> object:
    """Files have lists where a frozen spec has tuples; nothing else is converted."""
    return tuple(value) if isinstance(value, list) else value


_FROM_LIST = BeforeValidator(_tuple_of_list)


def _int_only(value: object) -> object:
    """``Literal[1]`` alone would accept ``true`` and 1.0, which equal 1."""
    if type(value) is not int:
        raise PydanticKnownError("int_type")
    return value


def _bool_only(value: object) -> object:
    """``Literal[False]`` alone would accept 0."""
    if not isinstance(value, bool):
        raise PydanticKnownError("bool_type")
    return value


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise problems_error(problems)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSpec(_Section):
    """The network: a GPT of pre-norm blocks with rotary attention and a SwiGLU MLP."""

    kind: Literal["gpt"] = Field(description="The family of the model.")
    num_layers: int = Field(ge=1, le=100_000, description="Number of transformer blocks.")
    hidden_size: int = Field(ge=2, le=2**20, description="Size of a token's activation between blocks.")
    num_heads: int = Field(ge=1, le=2**16, description="Number of attention heads; divides hidden_size.")
    ffn_size: int = Field(ge=1, le=2**24, description="Inner size of the MLP.")
    vocab_size: int = Field(ge=2, le=2**26, description="Number of distinct tokens.")
    seq_length: int = Field(ge=1, le=2**26, description="Tokens per sequence.")
    activation_order: Literal["sbh", "bsh"] = Field(
        default="sbh",
        description="Dim order of the tensor between stages: s(equence), b(atch), h(idden).",
    )
    tied_embedding: Annotated[Literal[False], BeforeValidator(_bool_only)] = Field(
        default=False, description="Whether embedding and head share one weight; only false in this release."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse(check_model(self))
        return self


class TopologySpec(_Section):
    """The device mesh: how many ranks along each axis, and how global ranks are numbered."""

    pp: int = Field(default=1, ge=1, le=2**16, description="Pipeline-parallel ranks.")
    tp: int = Field(default=1, ge=1, le=2**16, description="Tensor-parallel ranks.")
    dp: int = Field(default=1, ge=1, le=2**16, description="Data-parallel ranks.")
    cp: int = Field(default=1, ge=1, le=2**16, description="Context-parallel ranks, which share each sequence.")
    ep: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Expert-parallel ranks; each has micro-batches of its own, as dp ranks do.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Whether activations between blocks are cut along the sequence over the TP ranks "
        "(no effect with tp 1).",
    )
    order: Annotated[tuple[AxisName, ...], _FROM_LIST] = Field(
        default=("tp", "cp", "ep", "dp", "pp"),
        description="The five axes; the first changes fastest with the global rank.",
        json_schema_extra={"minItems": 5, "maxItems": 5, "uniqueItems": True},
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse(check_order(self))
        return self

    @property
    def num_ranks(self) -> int:
        """Number of global ranks: the product of all axes."""
        return prod((self.pp, self.tp, self.dp, self.cp, self.ep))


class ScheduleSpec(_Section):
    """The order in which each pipeline rank works on its micro-batches."""

    kind: Literal["gpipe", "1f1b", "interleaved"] = Field(
        description="gpipe: all forwards, then all backwards; 1f1b: one forward, one backward after warm-up; "
        "interleaved: 1f1b over several stages on each rank."
    )
    num_micro_batches: int = Field(ge=1, le=10**6, description="Micro-batches per step and data-parallel rank.")
    micro_batch_size: int = Field(ge=1, le=10**6, description="Sequences in a micro-batch.")
    num_chunks: int = Field(
        default=1, ge=1, le=2**16, description="Stages per pipeline rank; more than 1 with interleaved only."
    )
    num_sequence_splits: int = Field(
        default=1, ge=1, le=1, description="Pieces into which a sequence is cut; only 1 in this release."
    )
    placement: Literal["loop"] = Field(
        default="loop", description="How stages are dealt to ranks; only loop in this release."
    )
    variant: None = Field(default=None, description="Which tool's variant of the schedule; none in this release.")

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse(check_chunks(self))
        return self


class LossSpec(_Section):
    """What the reported loss and its gradient mean."""

    normalization: Literal["global_tokens", "mean_of_micro_batches"] = Field(
        default="global_tokens",
        description="Divide summed token losses by all counted tokens of the step, "
        "or take the mean of the micro-batches' means.",
    )


class TransportSpec(_Section):
    """How tensors cross stage boundaries. The plain string ``full`` or ``partial`` sets both directions."""

    forward: TransportName = Field(default="full", description="Transport of activations.")
    backward: TransportName = Field(default="full", description="Transport of activation gradients.")
    connections: Literal["warm"] = Field(
        default="warm", description="Connections are opened before the first step; only warm in this release."
    )
    recv_post: Literal["just_in_time"] = Field(
        default="just_in_time", description="When receives are posted; only just_in_time in this release."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_plain_string(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        names = ("full", "partial")
        if value not in names:
            near = nearest_name(value, names)
            raise problems_error(
                [
                    Problem(
                        "PP106",
                        (),
                        f"`transport` must be full or partial, found {describe_value(value)}",
                        help=f"did you mean `{near}`?" if near else None,
                    )
                ]
            )
        return {"forward": value, "backward": value}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of the mapping, or the plain string."""
        mapping = handler.resolve_ref_schema(handler(schema))
        description = mapping.pop("description")
        return {
            "title": mapping.pop("title"),
            "description": description,
            "anyOf": [{"type": "string", "enum": ["full", "partial"]}, mapping],
        }


class CostSpec(_Section):
    """What the simulator assumes each operation takes, in microseconds per stage and micro-batch.

    A time is exact: an integer, a decimal (0.1 is one tenth) or a fraction
    ``a/b``; where a stage's time may differ, also a list by global stage.
    The backward time is given whole (``backward_us``) or as its two halves.
    """

    forward_us: PositiveTimeByStage = Field(
        default=Fraction(100), description="Time of a forward.", json_schema_extra={"default": 100}
    )
    backward_us: TimeByStage | None = Field(
        default=None, description="Time of a backward; 200 where no backward time is given."
    )
    backward_input_us: TimeByStage | None = Field(default=None, description="The backward's input-gradient part.")
    backward_weight_us: TimeByStage | None = Field(default=None, description="The backward's weight-gradient part.")
    p2p_latency_us: Time = Field(
        default=Fraction(0),
        description="Time of a message between two ranks.",
        json_schema_extra={"default": 0},
    )
    p2p: Literal["async", "rendezvous", "backend"] = Field(
        default="async",
        description="When a send ends: at once, when its receive is posted, or as run.backend does it.",
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse(check_cost(self))
        return self

    def forward_of(self, stage: int) -> Fraction:
        """Microseconds of one forward of global stage ``stage``."""
        return _at(self.forward_us, stage)

    def backward_of(self, stage: int) -> Fraction:
        """Microseconds of one whole backward (input and weight gradients) of global stage ``stage``."""
        if self.backward_us is not None:
            return _at(self.backward_us, stage)
        if self.backward_input_us is not None and self.backward_weight_us is not None:
            return _at(self.backward_input_us, stage) + _at(self.backward_weight_us, stage)
        return _DEFAULT_BACKWARD_US


def _at(times: StageTimes, stage: int) -> Fraction:
    return times[stage] if isinstance(times, tuple) else times


class RunSpec(_Section):
    """How the plan is executed."""

    backend: Literal["paddle"] = Field(default="paddle", description="The framework that computes and communicates.")
    device: Literal["cpu"] = Field(default="cpu", description="Where it computes.")
    dtype: Literal["float32", "float64"] = Field(default="float32", description="Type of weights and activations.")
    steps: int = Field(default=2, ge=1, le=10**9, description="Number of optimizer steps.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights and tokens.")
    optimizer: Literal["sgd", "adamw"] = Field(default="adamw", description="The optimizer.")
    learning_rate: float = Field(default=0.01, gt=0, le=1e6, description="The constant learning rate.")


class PlanSpec(_Section):
    """A whole plan."""

    pipeproof: Annotated[Literal[1], BeforeValidator(_int_only)] = Field(description="Version of the plan format.")
    model: ModelSpec = Field(description="The network.")
    topology: TopologySpec = Field(description="The device mesh.")
    schedule: ScheduleSpec = Field(description="The pipeline schedule.")
    stages: (
        Annotated[tuple[Annotated[tuple[Annotated[str, Field(min_length=1)], ...], _FROM_LIST], ...], _FROM_LIST] | None
    ) = Field(default=None, description="Names of the layers of each global stage; without it, an even cut.")
    loss: LossSpec = Field(default_factory=LossSpec, description="The loss.")
    transport: TransportSpec = Field(default_factory=TransportSpec, description="Stage-to-stage communication.")
    cost: CostSpec = Field(default_factory=CostSpec, description="Times for the simulator.")
    run: RunSpec = Field(default_factory=RunSpec, description="Execution.")

    @property
    def num_stages(self) -> int:
        """Number of stages over all pipeline ranks."""
        return self.topology.pp * self.schedule.num_chunks

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse([*check_tensor_parallel(self.model, self.topology), *check_lengths(self)])
        return self
